"""What is known of the images and files that an experiment reads, before they are fetched and
after.
"""

import json
import os
import shlex
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from classifier import check
from manynodes.base.errors import Refusal
from manynodes.data.files import below, fingerprint, read_files
from manynodes.data.folder import MANIFEST, SOURCE, DataFolder
from manynodes.experiment import job_size
from manynodes.experiment.config import Experiment, Run, facts, facts_of
from manynodes.experiment.missing import initial_of

DATA = Path("results/data")
# What decides whether weights fit a network.
OF_NETWORK = ("initial_weights", "model", "widths", "model_args", "crop_size")


class Inputs:
    """The images and files of an experiment, as they are where the command is typed. No job asks:
    its node may not see them, and there may be millions.

    Args:
        results: folder of the experiment.
    """

    def __init__(self, experiment: Experiment, results: Path) -> None:
        self.experiment, self.results = experiment, results
        self.folders: dict[str, DataFolder] = {}

    def facts_of(self, dataset: str) -> dict[str, Any]:
        """The images of a data set, as far as they are known, for a program's `check`."""
        user_data = self.experiment.user_data
        if user_data is None:
            return facts_of(dataset)
        if (data := self.data_folder(user_data.name)) is not None:
            images = data.manifest["images"]
            known = (data.image_shape, data.classes, images, data.class_names)
            return facts(user_data.name, *known)
        shape = (*(user_data.image_size or (None, None)), user_data.channels)
        return facts(user_data.name, shape, user_data.classes, {})

    def groups_of(self, dataset: str) -> dict[str, Any]:
        """The groups and labels of the user's training images, for a `check`; empty if they are not
        known, or there are no groups. This reads them.
        """
        data = self.data_folder(dataset)
        if data is None or (groups := data.extra("groups")) is None:
            return {}
        return {"train_groups": groups, "train_labels": data.split("train")[1]}

    def refuse_unfit_weights(self) -> None:
        """Refuse weights to start from that are of another network."""
        # A user's network may take a while to be made.
        different = {
            json.dumps([run.dataset, *(run.values[key] for key in OF_NETWORK)]): run
            for name, run in self.experiment.runs.items()
            if run.dataset and initial_of(run, self.results / name)
        }
        for run in different.values():
            try:
                check.refuse_unfit_weights(run, self.facts_of(str(run.dataset)))
            except Refusal as refusal:
                raise Refusal(f"config: {refusal}") from None

    @property
    def images_option(self) -> str:
        """The option of `aggregate` for the user's folder of images; empty without one."""
        user_data = self.experiment.user_data
        if user_data is None or user_data.kind != "folder":
            return ""
        return f" --images={shlex.quote(user_data.path)}"

    def data_folder(self, dataset: str) -> DataFolder | None:
        """The data set, if it has been fetched from what the configuration names."""
        if dataset not in self.folders and not self.images_changed:
            with suppress(Refusal, OSError):
                self.folders[dataset] = DataFolder.read(DATA / dataset)
        return self.folders.get(dataset)

    def refuse_damaged(self, dataset: str | None) -> None:
        """Refuse a data set that is there and is not what was fetched, as `DataFolder.read`."""
        if dataset and (DATA / dataset / MANIFEST).exists():
            DataFolder.read(DATA / dataset)

    @cached_property
    def fingerprint(self) -> str | None:
        """Of the user's images, see `UserData`; computed once, as it looks at every file."""
        return self.experiment.user_data.fingerprint if self.experiment.user_data else None

    @cached_property
    def files_fingerprint(self) -> str:
        """Of the files that the user's program reads."""
        return fingerprint(map(Path, self.experiment.config["files"]))

    @cached_property
    def files_bytes(self) -> int:
        """Of those files together."""
        if not self.files_changed:
            with suppress(Refusal, OSError):
                return read_files(self.results / "files").bytes
        paths = map(Path, self.experiment.config["files"])
        return sum(file.stat().st_size for path in paths for _, file in below(path))

    @cached_property
    def files_changed(self) -> bool:
        """Whether they would be hashed again."""
        return is_of_others(self.results / "files", self.files_fingerprint)

    @property
    def images_changed(self) -> bool:
        """Whether the user's images would be imported again."""
        user_data = self.experiment.user_data
        return user_data is not None and is_of_others(DATA / user_data.name, self.fingerprint)

    @cached_property
    def environment_bytes(self) -> int:
        """Of the environment that is staged, as an archive and unpacked. Before it is packed, this
        looks at all of its files, and takes an archive of half their size.
        """
        environment = self.experiment.environment
        if not (environment.stage and (place := environment.staged_from)):
            return 0
        if environment.container:
            return place.stat().st_size
        with suppress(Refusal, OSError):
            packed = read_files(self.results / "environment")
            # One of an earlier version does not say what it holds.
            return packed.bytes + packed.manifest.get("unpacked", 2 * packed.bytes)
        return int(1.5 * bytes_below(place))

    def images_of(self, dataset: str | None, environment: bool) -> job_size.Images:
        """The size of a data set and of its images; a usual size if it is not known yet. Its bytes
        are of all that is staged.

        Args:
            environment: the environment is staged too, if it is to be staged at all.
        """
        data = self.data_folder(dataset) if self.experiment.user_data and dataset else None
        found = job_size.USUAL
        if data is not None:
            found = job_size.Images(*data.image_shape[:2], data.bytes)
        files = self.files_bytes if self.experiment.config["files"] else 0
        staged = files + (self.environment_bytes if environment else 0)
        return replace(found, bytes=(found.bytes if dataset else 0) + staged)

    def parameters_of(self, run: Run) -> int:
        """How many parameters the network of a run has, see `classifier.check.parameters`."""
        if not self.experiment.built_in or run.dataset is None:
            return 0
        return check.parameters(run, self.facts_of(run.dataset))

    def changed(self) -> list[Path]:
        """The manifests that would be made anew, because images or files have been written."""
        made = []
        if self.experiment.user_data and self.images_changed:
            made.append(DATA / self.experiment.user_data.name / MANIFEST)
        if self.experiment.config["files"] and self.files_changed:
            made.append(self.results / "files" / MANIFEST)
        return made


def bytes_below(folder: Path) -> int:
    """Of the files in a folder, but for those that vanish, such as bytecode."""
    found = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                found += Path(path, name).lstat().st_size
    return found


def is_of_others(folder: Path, fingerprint: str | None) -> bool:
    """Whether what was fetched into a folder is of other sources than those with this fingerprint,
    or of unknown ones.
    """
    try:
        return (folder / SOURCE).read_text() != fingerprint
    except OSError:
        return True
