"""The environment of a user's program, as it is where the command is typed."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from manynodes.base.errors import Refusal
from manynodes.base.reading import file_sha256, is_file
from manynodes.experiment.command import NAME, PYTHON, place_of
from manynodes.experiment.containers import has_overlay
from manynodes.experiment.environments import UserEnvironment
from manynodes.experiment.installed import changed_packages
from manynodes.experiment.interpreter import NoAnswer, is_python, look
from manynodes.experiment.uv_lock import is_of, normal, packages_in, workspace_of


class EnvironmentHere(UserEnvironment):
    """An environment that is asked what is in it."""

    def refuse_missing(self) -> None:
        """Check what can be checked where the command is typed.

        Raises:
            Refusal: its Python is not there, does not answer, or is not as its lock says.
        """
        given = [name for name in ("python", "conda", "uv", "container") if getattr(self, name)]
        if len(given) > 1:
            raise Refusal(f"config: environment: {' and '.join(given)} are given; keep one of them")
        if self.stage and self.staged_from is None:
            raise Refusal(
                "config: environment.stage: needs the folder of a venv, conda or uv, or an image's "
                "file"
            )
        if self.options and not self.container:
            raise Refusal("config: environment.options: these are for a container; give it too")
        if self.strict and self.container:
            raise Refusal("config: environment.strict: an image is one whole; leave strict out")
        if self.strict and not self.answers:
            # Else it would say nothing of what they bring.
            raise Refusal(
                "config: environment.strict: needs python, conda or uv, and neither modules nor "
                "setup; leave strict out"
            )
        if self.prefix and not Path(self.interpreter).is_file():
            remedy = "correct environment"
            if self.uv:
                locked = Path(self.uv, "uv.lock").is_file()
                remedy = self.remedy("uv sync --locked" if locked else "uv sync")
            elif self.conda:
                remedy = "give the folder that `conda env list` shows"
            missing = self.interpreter if self.folder.exists() else self.folder
            raise Refusal(f"config: environment: {missing} is not there; {remedy}")
        if self.stage and self.container and has_overlay(Path(self.container)):
            raise Refusal(
                f"config: environment.stage: {self.container} has a writable overlay, and each "
                "node would have another; leave stage out"
            )
        try:
            _ = self.image, self.answers and self.here
            self.refuse_unlocked()
        except Refusal as refusal:
            raise Refusal(f"config: environment: {refusal}") from None

    def refuse_unlocked(self) -> None:
        """Refuse a uv project with other packages than its lock has: other versions, or the same of
        another commit, address or file. What else is locked, such as for extras, may be missing;
        the program's imports are looked for in the job.
        """
        if not self.uv:
            return
        # Only here: `launch` alone does without it.
        from packaging.utils import canonicalize_name

        locked = packages_in(self.lock)
        # Of a package there may be leftovers.
        there: dict[str, dict[str, Path]] = {}
        for name, version, about in self.in_folder():
            there.setdefault(canonicalize_name(name), {})[normal(version)] = about
        for name, found in sorted(there.items()):
            packages = locked.get(name, [])
            versions = {each["version"] for each in packages if "version" in each}
            # The second is of a site's own build of a version, 2.11.0+computecanada.
            if versions and not versions & {*found, *(each.partition("+")[0] for each in found)}:
                raise Refusal(
                    f"its .venv has {name} {'/'.join(sorted(found))}, and uv.lock "
                    f"{'/'.join(sorted(versions))}; run `uv sync --locked` in {self.uv}"
                )
            # Of those that differ between machines, uv has installed one.
            if packages and not any(
                is_of(each["source"], about, self.lock.parent)
                for each in packages
                for about in found.values()
            ):
                raise Refusal(
                    f"its .venv has {name} {'/'.join(sorted(found))} of another commit, address or "
                    f"file than uv.lock; run `uv sync --locked` in {self.uv}"
                )

    @cached_property
    def here(self) -> dict[str, Any]:
        """What `look` finds where the command is typed."""
        return look(self, [self.interpreter], self.variables(os.environ), (), Path())

    def asked_again(self, words: Sequence[str], directory: str | None) -> dict[str, Any]:
        """What the Python that a command starts says today; empty if it cannot be asked here.

        Args:
            words: of the command.
            directory: where the program starts.

        Raises:
            NoAnswer: it is another Python than the environment's, and is not here.
        """
        first = place_of(words[0], directory)
        if PYTHON in words or not is_python(first):
            return self.here if self.answers or self.is_ours else {}
        if NAME.search(first) or self.container or self.modules or self.setup:
            return {}
        variables = self.variables(os.environ)
        python = shutil.which(first, path=variables["PATH"])
        if python is None:
            raise NoAnswer(f"{first} is not here")
        return look(self, [python], variables, (), Path())

    def changed_since(self, record: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
        """What is different since a run, as in `changed_packages`.

        Args:
            record: environment.json of the run.
            asked: of `asked_again`, the same for all runs.
        """
        # Which modules those that are given have loaded in turn is not known here.
        before, now = record.get("unasked", {}), self.unasked
        both = before.keys() & now.keys() - ({"distributions"} if asked else set())
        was = {**record, "modules": [], **{key: before[key] for key in both}}
        is_now = {**was, "setup_sha256": self.setup_sha256, **{key: now[key] for key in both}}
        is_now |= {key: asked[key] for key in ("python", "distributions") if asked}
        return changed_packages(was, is_now)

    @property
    def packages_sha256(self) -> str:
        """Changes with the packages that are installed in it; empty if it cannot be asked here."""
        if not self.answers:
            return ""
        packages = {"python": self.here["python"]} | self.here["distributions"]
        text = json.dumps(packages, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def contents_sha256(self) -> str:
        """Changes with the files of these packages, and with the lock; or with the image."""
        if self.container:
            status = Path(self.container).stat()
            return f"{self.image} {status.st_size} {status.st_mtime_ns}"
        asked = self.here["contents"] if self.answers or self.is_ours else ""
        text = f"{self.packages_sha256} {asked} {self.identity} {self.unlisted}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def unlisted(self) -> list[tuple[str, int, int]]:
        """Changes with what pip lists in no RECORD: conda's packages, single modules and .pth files
        of which somebody has changed the text, and the names of folders, which have versions. Not
        with what lies deeper, thousands of files.
        """
        found = []
        for each in ("conda-meta/*.json", "lib/python*/site-packages/*"):
            for path in sorted(self.folder.glob(each)):
                if is_file(path):
                    status = path.stat()
                    found.append((path.name, status.st_size, status.st_mtime_ns))
                elif path.name != "__pycache__":
                    found.append((path.name, 0, 0))
        return found

    @property
    def lock(self) -> Path:
        """The lock file of its uv project.

        Raises:
            Refusal: it is not there.
        """
        lock = Path(str(self.uv), "uv.lock")
        if not lock.is_file():
            raise Refusal(f"{lock} is not there; {self.remedy('uv lock')}")
        return lock

    def remedy(self, command: str) -> str:
        """What makes a missing part of its uv project: a command, unless it is a workspace's."""
        if above := workspace_of(Path(str(self.uv))):
            return f"it is of the workspace {above}: give that as environment.uv"
        return f"run `{command}` in {self.uv}"

    @property
    def identity(self) -> str:
        """What of it decides the result, as a SHA-256; empty if nothing does.

        Raises:
            Refusal: there is no lock file or no image; with `strict`, its Python does not answer.
        """
        parts = {}
        if self.container:
            parts["image"] = self.image
        if self.uv:
            parts["lock"] = file_sha256(self.lock)
        if self.strict:
            parts["packages"] = self.packages_sha256
        text = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest() if parts else ""
