"""The environment of a user's program: where its Python is, and the words that start in it."""

import hashlib
import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from manynodes.base.cpus import BINDING, OF_LIBRARIES
from manynodes.base.environment import MODULES
from manynodes.base.errors import Refusal
from manynodes.base.modules import FIND_MODULE, load_modules
from manynodes.experiment.containers import (
    OF_UV,
    container_lines,
    image_in_store,
    image_of_file,
    is_image_file,
    refuse_no_file,
)

CHECKOUT = MODULES.resolve().parents[1]
# Without CONDA_PREFIX, conda takes the environment that these name.
OF_CONDA = re.compile(r"CONDA_(DEFAULT_ENV|PREFIX_\d+|PROMPT_MODIFIER|SHLVL)")
# In bash, before modules and setup are loaded and after it. A site's may replace PYTHONPATH, of
# which the part that leads to the program and to `launched` comes first again; and they take
# nothing from the CPUs and GPUs of this process but GPUs that they leave out.
BEFORE = f"""
_mn_path=:${{PYTHONPATH:-}}: _mn_modules={shlex.quote(str(MODULES))}
case $_mn_path in
  *:"$_mn_modules":*) _mn_path=${{_mn_path%%:"$_mn_modules":*}}:$_mn_modules ;;
  *) _mn_path= ;;
esac
_mn_path=${{_mn_path#:}}
_mn_threads=${{OMP_NUM_THREADS-}} _mn_gpus=${{CUDA_VISIBLE_DEVICES-all}}
"""
# In Python: PYTHONPATH without a folder, if there is a torch without that.
WITHOUT = """
import importlib.util, os, sys
def others(folders):
    return [each for each in folders if not each or os.path.realpath(each) != sys.argv[1]]
sys.path[:] = filter(None, others(sys.path))
if importlib.util.find_spec("torch") is None:
    sys.exit(1)
print(os.pathsep.join(others(os.environ["PYTHONPATH"].split(os.pathsep))))
"""
AFTER = f"""
IFS=$' \\t\\n'
{OF_UV}
[[ ${{PYTHONPATH-}} == "$_mn_path"* ]] ||
  export PYTHONPATH="$_mn_path${{PYTHONPATH:+:$PYTHONPATH}}"
unset {" ".join([*BINDING, *OF_LIBRARIES])}
[[ ! $_mn_threads ]] || export OMP_NUM_THREADS="$_mn_threads"
if [[ $_mn_gpus != all ]]; then
  _mn_name=${{CUDA_VISIBLE_DEVICES-all}}
  for _mn_name in ${{_mn_name//,/ }}; do
    [[ ,$_mn_gpus,-1, == *,$_mn_name,* ]] ||
      export CUDA_VISIBLE_DEVICES="$_mn_gpus"
  done
fi
"""


@dataclass(frozen=True)
class UserEnvironment:
    """The key `environment` of an experiment.

    Attributes:
        python: an interpreter, or the folder of a venv or a conda environment.
        conda: folder of a conda environment, whose activation scripts run.
        uv: folder of a uv project, with its `.venv`.
        container: an image, a file of apptainer's or a name in podman's store.
        options: of `apptainer exec` or `podman run`.
        modules: names for `module load`.
        setup: lines of bash that run after it.
        strict: every installed package decides the result.
        stage: its folder is packed, and unpacked on each node's scratch; an image is copied there.
    """

    python: str | None = None
    conda: str | None = None
    uv: str | None = None
    container: str | None = None
    options: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    setup: str = ""
    strict: bool = False
    stage: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Self:
        """From the value of the key; null is the Python that runs Snakemake."""
        values = dict(given or {})
        if unknown := values.keys() - {field.name for field in fields(UserEnvironment)}:
            raise Refusal(f"environment: {min(unknown)} is no part of it")
        lists = {name: tuple(values.get(name, ())) for name in ("options", "modules")}
        return cls(**values | lists)

    @property
    def prefix(self) -> Path | None:
        """The folder of its Python, if that is known before its modules are loaded."""
        if self.uv:
            return Path(self.uv, ".venv")
        given = self.conda or self.python
        return Path(given) if given else None

    @property
    def setup_sha256(self) -> str:
        """SHA-256 of what its shell and its container are told, which may have secrets; empty
        without either. What they set may change the result, and nothing else would show it.
        """
        told = json.dumps([self.setup, self.options])
        return hashlib.sha256(told.encode()).hexdigest() if self.setup or self.options else ""

    @property
    def answers(self) -> bool:
        """Whether its Python can be asked where it is not prepared: modules and site settings may
        only be on the nodes.
        """
        return self.prefix is not None and not (self.modules or self.setup)

    @cached_property
    def unasked(self) -> dict[str, Any]:
        """What is known of it on any machine without its Python, for the record: what `module load`
        is given, and if its Python cannot be asked, the packages in its folder.
        """
        found: dict[str, Any] = {"modules": list(self.modules)}
        if self.prefix and not self.answers:
            found["distributions"] = {name: version for name, version, _ in self.in_folder()}
        return found

    def in_folder(self) -> Iterator[tuple[str, str, Path]]:
        """Name, version and dist-info of the packages that pip or uv has put into its folder. Its
        Python sees PYTHONPATH too.
        """
        for path in sorted(self.folder.glob("lib/python*/site-packages/[!~]*.dist-info")):
            name, _, version = path.name.removesuffix(".dist-info").partition("-")
            yield name, version, path

    @property
    def staged_from(self) -> Path | None:
        """What is staged of it: the folder of its Python, or its image; None if it has neither, as
        the Python of a system has not.
        """
        if self.container:
            return Path(self.container) if self.is_image_file else None
        prefix = self.prefix
        if self.is_ours:
            ours = Path(sys.prefix)
            # Conda's own has the others below it.
            of_conda = (ours / "conda-meta").is_dir() and not (ours / "condabin").is_dir()
            alone = sys.prefix != sys.base_prefix or of_conda
            prefix = ours if alone else None
        return None if prefix is None or prefix.is_file() else prefix

    def at(self, place: Path) -> Self:
        """The same with what is `staged_from` somewhere in another place."""
        if self.container:
            return replace(self, container=str(place))
        if self.conda:
            return replace(self, conda=str(place))
        return replace(self, uv=None, python=str(place))

    @property
    def is_ours(self) -> bool:
        """Whether it is the Python that runs Snakemake."""
        return not (self.prefix or self.container or self.modules or self.setup)

    @property
    def interpreter(self) -> str:
        """Path of its Python, or the name under which it is found on PATH."""
        if self.is_ours:
            return sys.executable
        if self.prefix is None:
            return "python3"
        # Not resolved: a venv's Python is a link, and knows its venv by the link's place.
        path = self.prefix.absolute()
        return str(path if path.is_file() else path / "bin" / "python")

    @property
    def folder(self) -> Path:
        """The folder that has its `bin`."""
        return Path(self.interpreter).parents[1]

    def started(self, words: Sequence[str]) -> tuple[str, ...]:
        """The words of a command that starts in this environment; bash becomes the command."""
        lines = []
        if self.modules:
            lines += [FIND_MODULE, load_modules(self.modules)]
        if self.setup:
            told = 'echo "environment.setup or site_setup: $BASH_COMMAND ended with status $?" >&2'
            lines += ["set -e", f"trap {shlex.quote(told)} ERR", self.setup, "set +euf; trap - ERR"]
        if lines or self.conda:
            lines += self.lines_of_prefix
        if self.conda:
            scripts = shlex.quote(f"{Path(self.conda).absolute()}/etc/conda/activate.d")
            each = f'for f in {scripts}/*.sh; do [ ! -r "$f" ] || . "$f"; done'
            lines.append(each)
        if lines:
            lines = [BEFORE, *lines, AFTER, *self.lines_of_torch]
        if not (lines or self.container):
            return tuple(words)
        # The paths in them hold where the command was typed, and not where the program starts.
        here = shlex.quote(str(Path.cwd()))
        # A script that they source would see the words of the program as its arguments.
        before = f'program_start=$PWD program_here={here}; program_words=("$@"); set --; cd {here}'
        after = 'cd "$program_start"; exec "${program_words[@]}"'
        if self.container:
            lines.append(container_lines(self.container, self.options))
            after = 'cd "$program_start"; exec "${program_at[@]}" "${program_words[@]}"'
        return ("bash", "-c", "\n".join([before, *lines, after]), "bash", *words)

    @property
    def of_prefix(self) -> dict[str, str]:
        """The variables that name its venv, or its environment of conda, as activating does."""
        if self.prefix is None:
            return {}
        if self.conda:
            return {"CONDA_PREFIX": str(self.folder), "CONDA_DEFAULT_ENV": self.folder.name}
        is_venv = (self.folder / "pyvenv.cfg").is_file()
        return {"VIRTUAL_ENV": str(self.folder)} if is_venv else {}

    @property
    def is_alone(self) -> bool:
        """Whether it is an interpreter without a folder of its own: it may lie in /usr/bin, with
        other compilers than those of modules.
        """
        return self.prefix is not None and self.prefix.is_file() and not self.of_prefix

    @property
    def lines_of_prefix(self) -> list[str]:
        """Lines of bash with which the programs of its folder come before those of modules."""
        if self.prefix is None or self.is_alone:
            return []
        given = [f"{name}={shlex.quote(value)}" for name, value in self.of_prefix.items()]
        folder = shlex.quote(str(Path(self.interpreter).parent))
        return [" ".join(["export", f"PATH={folder}:$PATH", *given])]

    @property
    def lines_of_torch(self) -> list[str]:
        """Lines of bash with which a Python that modules or setup bring takes its own torch, if it
        has one, and not the workflow's from PYTHONPATH. Only behind them it can be asked.
        """
        ours = None if self.prefix or self.container else our_torch(os.environ)
        if ours is None:
            return []
        asked = f"python3 -c {shlex.quote(WITHOUT)} {shlex.quote(ours)} 2>/dev/null"
        return [f'if _mn_path=$({asked}); then export PYTHONPATH="$_mn_path"; fi']

    def variables(self, before: Mapping[str, str]) -> dict[str, str]:
        """The environment of a program, in which no uv, pip or conda finds the environment of the
        workflow.

        Args:
            before: this process's own.
        """
        found = {name: value for name, value in before.items() if not is_of_ours(name, value)}
        if self.conda or "CONDA_PREFIX" not in found:
            found = {name: value for name, value in found.items() if not OF_CONDA.fullmatch(name)}
        if self.is_ours:
            return found
        path = found.get("PATH", os.defpath).split(os.pathsep)
        if sys.prefix != sys.base_prefix or Path(sys.prefix, "conda-meta").is_dir():
            # Not of a system's Python: everything else is there too.
            ours = [Path(sys.executable).parent]
            if not self.conda:
                # Of conda's own environment: its `conda` takes that if no other is active.
                ours.append(Path(sys.prefix, "condabin"))
            path = without(path, ours)
        found.pop("PYTHONHOME", None)
        if self.container:
            found.pop("PYTHONPATH", None)
            # Apptainer shares the home folder, whose packages would come before those of the image.
            found.setdefault("PYTHONNOUSERSITE", "1")
        if self.prefix:
            above = Path(self.interpreter).parent
            if not self.is_alone or without(path, [above]) == path:
                path.insert(0, str(above))
            has_torch = any(self.folder.glob("lib*/python*/site-packages/torch"))
            if has_torch and (torch := our_torch(found)):
                rest = without(found["PYTHONPATH"].split(os.pathsep), [Path(torch)])
                found["PYTHONPATH"] = os.pathsep.join(rest)
            found |= self.of_prefix
        if self.uv:
            project = str(Path(self.uv).absolute())
            found |= {"UV_PROJECT": project, "UV_FROZEN": "1", "UV_OFFLINE": "1", "UV_NO_SYNC": "1"}
        if not found.keys() & {"VIRTUAL_ENV", "CONDA_PREFIX"}:
            # In a folder above the program's there is the workflow's `.venv`, which `uv pip` would
            # take. UV_PYTHON would also decide the Python of a uv project that the program starts.
            found["UV_SYSTEM_PYTHON"] = "1"
        return found | {"PATH": os.pathsep.join(path)}

    @property
    def is_image_file(self) -> bool:
        """Whether its image is a file, for apptainer."""
        return is_image_file(self.container or "")

    @cached_property
    def image(self) -> str:
        """What tells a build of its image from another one; empty without an image.

        Raises:
            Refusal: it is not there.
        """
        if not self.container:
            return ""
        refuse_no_file(self.container)
        if self.is_image_file:
            writable = bool({"--writable", "-w"} & {*self.options})
            return image_of_file(Path(self.container), writable)
        return image_in_store(self.container, replace(self, container=None, options=()).started)

    @property
    def pinned(self) -> dict[str, Any]:
        """The value of the key, with podman's image by its id: on a node, another image of the same
        name does not take its place.
        """
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given |= {} if self.is_image_file else {"container": self.image or None}
        return {name: value for name, value in given.items() if value}


def is_of_ours(name: str, value: str) -> bool:
    """Whether a variable leads to the environment of the workflow, or to its checkout."""
    if not (name in ("VIRTUAL_ENV", "CONDA_PREFIX") or name.startswith(("UV_", "PIP_"))):
        return False
    # Of an interpreter the folder counts: in a venv, the file is a link to another one.
    place, above = (Path(os.path.realpath(each)) for each in (value, Path(value).parent))
    ours = os.path.realpath(sys.prefix)
    return place == CHECKOUT or place.is_relative_to(ours) or above.is_relative_to(ours)


def without(folders: Sequence[str], others: Sequence[Path]) -> list[str]:
    """Folders of a search path but for others, however these are spelled. Empty is where a program
    starts.
    """
    places = {os.path.realpath(other) for other in others}
    return [each for each in folders if not each or os.path.realpath(each) not in places]


def our_torch(variables: Mapping[str, str]) -> str | None:
    """The folder of PYTHONPATH in which the workflow's own torch lies: another Python would take it
    for its own. None if it is in no folder of PYTHONPATH.
    """
    folders = variables.get("PYTHONPATH", "").split(os.pathsep)
    spec = importlib.util.find_spec("torch") if any(folders) else None
    ours = Path(spec.origin).parents[1] if spec and spec.origin else None
    return str(ours.resolve()) if ours and without(folders, [ours]) != folders else None
