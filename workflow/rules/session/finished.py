"""Finished runs: whether their results are what they stand for, and what would replace them."""

import html
import json
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NoReturn

from classifier.models.names import code_of, with_network
from manynodes.base import atomic
from manynodes.base.errors import Refusal, shown
from manynodes.base.provenance import code_sha256
from manynodes.base.reading import MOST, file_sha256, read_bytes, read_json
from manynodes.checkpointing import owner, replaced
from manynodes.checkpointing.replaced import FINISHED
from manynodes.data.folder import SOURCE
from manynodes.experiment import command
from manynodes.experiment.config import Experiment
from manynodes.experiment.interpreter import NoAnswer
from manynodes.experiment.missing import initial_of
from manynodes.programs.folders import (
    Folders,
    has_request,
    read_request,
    refuse_foreign,
    refuse_links,
)
from manynodes.reporting import measures, progress, results, sums
from session import tell
from session.inputs import DATA, Inputs

# Without them nothing of a run is worth keeping.
NUMBERS = {"metrics.csv", "result.json"}
# Of a page, with the bytes that are read for it.
TITLE, LONGEST_HEAD = re.compile(r"<title>(.*?)</title>"), 1000


class FinishedRuns:
    """The results of an experiment's runs.

    Args:
        folder: of the experiment.
    """

    def __init__(self, experiment: Experiment, folder: Path, inputs: Inputs) -> None:
        self.experiment, self.results, self.inputs = experiment, folder, inputs

    def replaced(self, names: Iterable[str], code: bool = True) -> dict[str, str]:
        """Finished runs that training again would replace, with what has changed.

        Args:
            code: whether the code of the built-in trainer counts.
        """
        found = {name: self.differences(name, code) for name in names}
        return {name: ", ".join(differences) for name, differences in found.items() if differences}

    def differences(self, name: str, code: bool) -> list[str]:
        """What a finished run was made of that is different now; empty for other runs."""
        run, folder = self.experiment.runs[name], self.results / name
        found = results.changed(folder / "run.json", run)
        if found or not (folder / "run.json").exists():
            return found
        about = results.read_about(folder / "run.json", results.form_of(run))
        user_data = self.experiment.user_data
        if user_data and self.inputs.images_changed:
            # Without the record, such as of a folder that was deleted, nothing is known of them.
            if (DATA / user_data.name / SOURCE).exists():
                found.append(f"other images of {user_data.name}")
        elif run.dataset and (data := self.inputs.data_folder(run.dataset)) is not None:
            found += ["other data"] * (about["data_sha256"] != data.sha256)
        if not self.experiment.built_in:
            config = self.experiment.config
            before, now = about["sources_sha256"], self.experiment.sources_sha256
            if before == self.experiment.earlier_sha256 != now:
                # That is a change of the workflow's code.
                unhashed = f"an earlier version has not hashed {self.experiment.program_name}"
                found += [unhashed] * code
            elif before != now:
                what = " or its environment" * bool(self.experiment.environment.identity)
                found.append(f"{self.experiment.program_name}{what} has changed")
            found += [
                f"another value of {key}"
                for key in ("directory", "outputs")
                if about[key] != config[key]
            ]
            found += ["other files"] * bool(config["files"] and self.inputs.files_changed)
            # Otherwise they stay as they were published, see `tell_other_reads`.
            other = self.other_reads(about) if config["replace"] else []
            return found + [f"another value of {key}" for key in other]
        weights = initial_of(run, folder)
        if weights and about.get("initial_sha256") not in (None, sha256_of(weights)):
            found.append("other initial_weights")
        user_network = code_of(run.values["model"])
        if about["network_sha256"] != (user_network or None):
            found.append(f"{run.values['model'].rpartition(':')[0]} has changed")
        now = with_network(code_sha256("train.py"), run.values["model"])
        if code and about["code_sha256"] != now:
            commit = (about["git"]["commit"] or "none")[:10]
            found.append(f"its code has changed since commit {commit}")
        return found

    def refuse_other_state(self, name: str) -> None:
        """Refuse to train an interrupted run of the built-in trainer whose newest state is of other
        code, before others are trained beside it. One that cannot be read is left to its job.

        Raises:
            Refusal: with what to do.
        """
        folder = self.results / name
        # Of a run that has finished, the training skips it.
        if is_state_of(folder, self.experiment):
            return
        found = code_of_state(folder / "state")
        model = self.experiment.runs[name].values["model"]
        if found and found[0] != with_network(code_sha256("train.py"), model):
            raise Refusal(
                f"{folder}/state is of another run: the code has changed since commit "
                f"{found[1][:12]}; finish it with that version, or delete this folder to start over"
            )

    def refuse_replacement(self, changes: dict[str, str], remedy: str) -> NoReturn:
        """Refuse to train finished runs again, and tell the command that accepts rewritten files
        with unchanged bytes.

        Raises:
            Refusal: always.
        """
        for path in self.inputs.changed():
            # Without its record, such as in copied results, Snakemake sees no reason to make it.
            tell(f"if these files have the same bytes as before, first make {path} alone: this "
                 f"command --force {path}")  # fmt: skip
        line = results.replacement_line(self.experiment.name, changes)
        raise Refusal(f"{line}; {remedy}")

    def tell_other_program(self) -> None:
        """Warn of finished runs of another program under the experiment's name."""
        with suppress(OSError, ValueError, Refusal):
            given = json.loads(read_bytes(self.results / progress.RECORD, MOST))
            now = json.loads(self.experiment.science)
            keys = ("program", "command")
            if not isinstance(given, dict) or all(given.get(key) == now.get(key) for key in keys):
                return
            before = progress.read_record(self.results)
            ours, theirs = (
                "the classifier" if each.built_in else each.program_name
                for each in (self.experiment, before)
            )
            others = before.runs.keys() - self.experiment.runs if theirs != ours else ()
            if finished := sum(is_whole(self.results / name) for name in others):
                tell(f"warning: tables and page of {self.results} are of {theirs}, and its "
                     f"{finished:,} finished runs will not be in them any more; give another "
                     "experiment name to keep both")  # fmt: skip

    def other_reads(self, about: dict[str, Any]) -> list[str]:
        """The keys by which the numbers of a finished run were read, and that have changed since;
        none of a run whose version has not noted them.
        """
        return [
            key
            for key, before in about.get("reads", {}).items()
            if not results.same(before, self.experiment.config[key], as_written=True)
        ]

    def tell_other_reads(self) -> None:
        """Warn of finished runs whose numbers were read by other keys, and stay as they are."""
        runs: dict[str, list[str]] = {}
        replaces = self.experiment.built_in or self.experiment.config["replace"]
        for name in () if replaces else self.experiment.runs:
            # `check_results` refuses one that is damaged.
            with suppress(OSError, Refusal):
                about = results.read_about(self.results / name / "run.json", "program_run")
                runs.setdefault(" and ".join(self.other_reads(about)), []).append(name)
        for keys, names in runs.items():
            if keys:
                tell(f"warning: the numbers of {results.shortened(names)} were read by other "
                     f"{keys}, and stay so; --config replace=true trains them again")  # fmt: skip

    def tell_other_packages(self) -> None:
        """Name the packages and modules that finished runs have had in another version than their
        environment has now, and a changed `setup`.
        """
        environment = self.experiment.environment
        runs: dict[str, list[str]] = {}
        for name in () if self.experiment.built_in else self.experiment.runs:
            # `check_results` refuses one that is damaged.
            with suppress(FileNotFoundError, Refusal):
                record = read_json(self.results / name / "environment.json", "environment", "")
                asked = self.asked_again if record.get("python") else {}
                runs.setdefault(environment.changed_since(record, asked), []).append(name)
        for changed, names in runs.items():
            which = f"/{names[0]}: since it was"
            if len(names) > 1:
                which = f": since {results.shortened(names)} were"
            if changed:
                tell(f"{self.experiment.name}{which} trained, {changed}")

    @cached_property
    def asked_again(self) -> dict[str, Any]:
        """What the Python of the program says now; nothing, which is told, if it is not here."""
        environment, config = self.experiment.environment, self.experiment.config
        try:
            return environment.asked_again(command.command(config), config["directory"])
        except NoAnswer as refusal:
            tell(f"{self.experiment.name}: {refusal}; whether its packages have changed since runs "
                 "were trained is not known")  # fmt: skip
            return {}

    def refuse_other_evaluation(self, name: str) -> None:
        """Refuse the numbers of a run from another program of the user's, or other arguments of it,
        than the one that evaluates now.
        """
        if not self.experiment.evaluation:
            return
        folder = self.results / name
        about = measures.read_evaluated(folder)
        # Earlier versions noted the code alone.
        known = self.experiment.evaluation_sha256, self.experiment.evaluation_code
        if about["sources_sha256"] not in known:
            raise Refusal(
                f"{folder}/evaluation.json is of another evaluate, or of other arguments of it; "
                f"delete it and {sums.EVALUATE}"
            )

    def refuse_loss(
        self, name: str, again: str = "train it again with --config replace=true"
    ) -> None:
        """Refuse to train a run again that was finished, and of which files were deleted since; not
        if its numbers were.
        """
        gone = lost(self.results / name)
        if not gone or NUMBERS & {*gone}:
            return
        what, that = f"{gone[0]} is", "it"
        if len(gone) > 1:
            what, that = f"{gone[0]} and {len(gone) - 1:,} more of its files are", "them"
        keep = ""
        with suppress(FileNotFoundError, Refusal):
            measures.told(self.experiment, self.results / name)
            if self.experiment.has_evaluation:
                self.refuse_other_evaluation(name)
            keep = " keep it with --touch,"
        raise Refusal(
            f"{self.experiment.name}/{name} is finished, but {what} gone; put {that} back,{keep} "
            f"or {again}"
        )

    def refuse_other_report(self) -> None:
        """Refuse tables and a page that were not made of these runs, or were changed since."""
        with suppress(FileNotFoundError):
            if self.is_of_other_runs():
                raise Refusal(
                    f"{self.results}/report.html and its tables are of other runs than these; "
                    f"{sums.REMAKE}"
                )
            page = self.results / "report.html"
            if file := sums.changed(self.results):
                # Snakemake misses no file that is no target, such as a figure.
                raise Refusal(
                    f"{page} was made from another {file} ({sums.FILE}); {sums.REMAKE}"
                    if "/" in file and not file.startswith("figures/")
                    else f"{self.results / file} is not as it was made ({sums.FILE}); delete "
                    f"{page} and run the same command again"
                )
            if (name := title_of(page)) not in ("", self.experiment.name):
                raise Refusal(f"{page} is of the experiment {shown(name)}; {sums.REMAKE}")

    def is_of_other_runs(self) -> bool:
        """Whether the tables and the page are of other runs than this experiment's.

        Raises as `sums.read`.
        """
        named = {path.partition("/")[0] for path, _ in sums.read(self.results)
                 if path.count("/") == 1 and path.endswith("/run.json")}  # fmt: skip
        return named != self.experiment.runs.keys()

    def has_report(self) -> bool:
        """Whether the report is there, and of the files that are there."""
        with suppress(FileNotFoundError, Refusal):
            return sums.changed(self.results) is None and not self.is_of_other_runs()
        return False

    def refuse_links(self, name: str) -> None:
        """Refuse to train a run that would remove what a link leads to: Snakemake and the jobs
        remove what is there before they begin.
        """
        folder = self.results / name
        refuse_links(folder)
        refuse_foreign(folder, lambda: self.is_known(name))

    def is_known(self, name: str) -> bool:
        """Whether what lies in a run's folder is of this run, as far as its files tell."""
        folder, run = self.results / name, self.experiment.runs[name]
        with suppress(OSError, Refusal):
            return bool(results.read_about(folder / "run.json", results.form_of(run)))
        if not self.experiment.built_in:
            return has_request(Folders(folder))
        with suppress(OSError):
            found = owner.look(folder / "state/owner.json")
            return bool(found and found.record.token)
        return False

    def put_back(self, names: Iterable[str]) -> None:
        """Put back results of runs that a command which has ended was about to replace."""
        folders = [self.results / name for name in names]
        folders = [folder for folder in folders if (folder / replaced.FOLDER).is_dir()]
        alive = owner.living([folder / "state" for folder in folders])
        for folder in folders:
            if folder / "state" not in alive and replaced.put_back(folder):
                tell(f"{self.experiment.name}/{folder.name}: its earlier results are back")

    def forget_states(self, names: Iterable[str]) -> None:
        """Remove the states of runs whose results are there: of these runs, and complete.

        What Snakemake takes for finished may have been touched only.
        """
        for name in names:
            folder = self.results / name
            try:
                results.read_about_of(folder, self.experiment.runs[name])
            except (FileNotFoundError, Refusal):
                continue
            if not is_whole(folder) or not is_state_of(folder, self.experiment):
                continue
            if not self.experiment.built_in:
                # A program may have left its only result there.
                with suppress(OSError):
                    atomic.create(Folders(folder).finished, "")
            else:
                shutil.rmtree(folder / "state", ignore_errors=True)


@cache
def sha256_of(path: str) -> str:
    """SHA-256 of the weights from which runs start; empty if they cannot be read."""
    with suppress(OSError):
        return file_sha256(Path(path))
    return ""


def code_of_state(folder: Path) -> tuple[str, str] | None:
    """The SHA-256 of the code, and the commit, of the newest state there; None if that cannot be
    told. Without torch, which takes seconds to import.
    """
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        with max(folder.glob("epoch=*_step=*.safetensors")).open("rb") as file:
            header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), MOST)))
        fields = dict(json.loads(header["__metadata__"]["tree"])["items"])
        commit = dict(fields["attempts"][-1]["items"])["commit"]
        return fields["code_sha256"], str(commit or "none")
    return None


def title_of(page: Path) -> str:
    """The experiment of which a page says to be; empty if it does not say."""
    if not page.is_file():
        return ""
    with page.open("rb") as file:
        found = TITLE.search(file.read(LONGEST_HEAD).decode(errors="replace"))
    return html.unescape(found[1]) if found else ""


def is_whole(folder: Path) -> bool:
    """Whether the results of a finished training are all there."""
    return (folder / "run.json").is_file() and not lost(folder)


def lost(folder: Path) -> list[str]:
    """The files of a finished training that are gone."""
    try:
        files = json.loads(read_bytes(folder / "run.json", MOST))["files"]
        return [name for name in files if not (folder / name).is_file()]
    except (OSError, ValueError, KeyError, TypeError):
        # One of an earlier version is complete if it is there at all.
        return []


def is_state_of(folder: Path, experiment: Experiment) -> bool:
    """Whether the state in a run's folder is of the training that has written its results, and not
    of one that is to replace them.
    """
    with suppress(OSError, Refusal):
        if not experiment.built_in:
            about = results.read_about(folder / "run.json", "program_run")
            return bool(read_request(Folders(folder))["attempts"] == about["attempts"])
        return (folder / "state" / FINISHED).read_text() == file_sha256(folder / "run.json")
    return False
