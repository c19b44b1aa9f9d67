"""The environment of a user's program: its Python, what is loaded before, what is installed."""

import ast
import hashlib
import importlib.util
import json
import os
import re
import shlex
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from manynodes.base.cpus import BINDING, OF_LIBRARIES
from manynodes.base.environment import MODULES, variable
from manynodes.base.errors import Refusal, error_line, uncoloured
from manynodes.base.modules import FIND_MODULE
from manynodes.base.reading import file_sha256, is_file, open_file
from manynodes.base.temporary import file_without_a_name

# Seconds for a Python that lies on a cold network file system.
PATIENCE = 300
MOST_PACKAGES = 5  # named in a line
SETUP = "environment.setup"  # beside packages, what stands for `setup` and `options`
# What changes where Python looks for modules.
OTHER_PATHS = re.compile(r"sys\.(path|meta_path)|addsitedir|pyximport|importlib")
# The reason, before advice of several lines.
LMOD = re.compile(r"Lmod has detected the following error:\s*(.+?)\s*(?:\n\s*\n|\Z)", re.DOTALL)
OF_APPTAINER = re.compile(r"FATAL: |ERROR  : ")
IS_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
MARK = "manynodes-environment "
# Without them each process would be the only one, and write where the others do.
TOLD = ("RANK", "WORLD_SIZE", variable("results"))
# Bytes at the beginning of an image file of apptainer's, with an id and the times of the build.
SIF_HEADER, SIF_MAGIC = 128, b"SIF_MAGIC"
# Bytes before the counts of its descriptors, of a descriptor, and before a partition's kind in it.
SIF_COUNTS, SIF_DESCRIPTOR, SIF_EXTRA = 80, 585, 201
SIF_PARTITION, SIF_OVERLAY, MOST_DESCRIPTORS = 0x4004, 4, 1000
# What a container has of its own; it gets the other variables.
OF_CONTAINER = (
    "PATH", "HOME", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_", "LD_LIBRARY_PATH", "LD_PRELOAD",
)  # fmt: skip
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
AFTER = f"""
IFS=$' \\t\\n'
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
# In bash: the folders that a container shares with the node, under the same paths: a program finds
# its own files, our module, and what the contract names, also behind links. One below another is
# there with it.
SHARED = r"""
IFS=$' \t\n'
program_shared=("${TMPDIR:-/tmp}" "$program_here" "$program_start")
IFS=: read -ra program_path <<< "${PYTHONPATH:-}"
program_shared+=("${program_path[@]}")
for program_name in "${!LAUNCH_@}"; do program_shared+=("${!program_name}"); done
for program_name in "${LAUNCH_FILES:-/nowhere}"/*; do
  [ ! -L "$program_name" ] || program_shared+=("$(readlink -f "$program_name")")
done
for program_name in "${program_words[@]}"; do
  [[ $program_name == /*.py ]] || continue
  program_shared+=("${program_name%/*}" "$(dirname "$(readlink -f "$program_name")")")
done
declare -A program_places
for program_name in "${program_shared[@]}"; do
  [[ $program_name != /?* || ! -e $program_name ]] || program_places[${program_name%/}]=1
done
for program_name in "${!program_places[@]}"; do
  program_above=${program_name%/*}
  while [[ $program_above && ! ${program_places[$program_above]:-} ]]; do
    program_above=${program_above%/*}
  done
  [[ ! $program_above ]] || continue
  # Which separate the parts of the shorter option.
  if [[ $program_name == *[,:]* ]]; then
    program_name=${program_name//\"/\"\"}
    program_at+=(--mount "type=bind,\"src=$program_name\",\"dst=$program_name\"")
  else
    program_at+=("${program_bind[@]//PLACE/$program_name}")
  fi
done
"""
# A scheduler's warning goes to all processes, and would end a program that does not expect it.
UNWARNED = """sh -c 'trap "" USR1 USR2; exec "$@"' sh"""
# What runs in that Python, of 3.7 or later: what is installed there, and which modules are missing.
PROBE = """
import sys
# Not the folder in which it starts, which may have a json.py.
sys.path = [path for path in sys.path if path]
import hashlib, importlib.util, json, os, platform, sys, sysconfig
listed, texts = [], []
# One that is damaged, or not in UTF-8, keeps nobody from the others.
def named(d):
    try:
        about = d.metadata  # read anew each time, and by d.version
        return about["Name"], about["Version"]
    except Exception:
        folder = os.path.basename(str(getattr(d, "_path", "")))
        return folder.rpartition(".")[0].partition("-")[::2]
def text(d, name):
    try:
        return d.read_text(name) or ""
    except UnicodeDecodeError as error:
        return error.object.decode("latin-1")
if sys.argv[3] == "all":
    try:
        from importlib import metadata
        every = list(metadata.distributions())
        listed = [named(d) for d in every]
        # The hashes of all files, and the commit of a package that has only one version.
        texts = [text(d, name) for d in every for name in ("RECORD", "direct_url.json")]
    except ImportError:
        import pkg_resources
        listed = [(d.project_name, d.version) for d in pkg_resources.working_set]
found, seen = {}, set()
for name, version in listed:
    # Python imports the first one on its path.
    key = str(name).lower().replace("_", "-")
    if name and key not in seen:
        seen.add(key)
        found[name] = str(version)
sys.path.insert(0, sys.argv[2])
missing, elsewhere = [], {}
folders = sysconfig.get_path("stdlib"), os.environ.get("LAUNCH_FILES")
known = tuple(os.path.realpath(path) + os.sep for path in folders if path)
for name in sys.argv[4:]:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        continue
    if spec is None:
        missing.append(name)
    elif spec.has_location and name != "launched":
        place = os.path.realpath(spec.origin)
        installed = {"site-packages", "dist-packages"} & set(place.split(os.sep))
        above = os.path.dirname(spec.origin)
        if os.path.basename(spec.origin).startswith("__init__."):
            above = os.path.dirname(above)
        beside = os.path.realpath(above) == os.path.realpath(sys.argv[2])
        if not (installed or beside or place.startswith(known)):
            elsewhere[name] = place
def text_of(path):
    with open(path, errors="replace") as file:
        return file.read()
# Whether a process beside this one shows the image.
try:
    tasks = "/proc/%d/task" % os.getppid()
    beside = " ".join(text_of("%s/%s/children" % (tasks, task)) for task in os.listdir(tasks))
    fuse = any(text_of("/proc/%s/comm" % pid)[:10] == "squashfuse" for pid in beside.split())
except OSError:
    fuse = False
print(sys.argv[1] + json.dumps({
    "interpreter": sys.executable,
    "python": platform.python_version(),
    "distributions": {name: found[name] for name in sorted(found)},
    "contents": hashlib.sha256("".join(sorted(texts)).encode()).hexdigest(),
    "modules": [name for name in os.environ.get("LOADEDMODULES", "").split(":") if name],
    "missing": missing,
    "elsewhere": elsewhere,
    "variables": {name: os.environ[name] for name in TOLD if name in os.environ},
    "fuse": fuse,
}))
""".replace("TOLD", repr(TOLD))


class NoAnswer(Refusal):
    """Its Python does not answer."""


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

    @staticmethod
    def of(given: Mapping[str, Any] | None) -> "UserEnvironment":
        """From the value of the key; null is the Python that runs Snakemake."""
        values = dict(given or {})
        if unknown := values.keys() - {field.name for field in fields(UserEnvironment)}:
            raise Refusal(f"environment: {min(unknown)} is no part of it")
        lists = {name: tuple(values.get(name, ())) for name in ("options", "modules")}
        return UserEnvironment(**values | lists)

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
    def staged_from(self) -> Path | None:
        """What is staged of it: the folder of its Python, or its image; None if it has neither."""
        if self.container:
            return Path(self.container) if self.is_image_file else None
        return None if self.prefix is None or self.prefix.is_file() else self.prefix

    def at(self, place: Path) -> "UserEnvironment":
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
            lines += [FIND_MODULE, f"module load {shlex.join(self.modules)} || exit 1"]
        if self.setup:
            told = 'echo "environment.setup: $BASH_COMMAND ended with status $?" >&2'
            lines += ["set -e", f"trap {shlex.quote(told)} ERR", self.setup, "set +euf; trap - ERR"]
        if self.conda:
            scripts = shlex.quote(f"{Path(self.conda).absolute()}/etc/conda/activate.d")
            lines.append(f'for f in {scripts}/*.sh; do [ ! -r "$f" ] || . "$f"; done')
        if lines:
            lines = [BEFORE, *lines, AFTER, *self.lines_of_prefix]
        if not (lines or self.container):
            return tuple(words)
        # The paths in them hold where the command was typed, and not where the program starts.
        here = shlex.quote(str(Path.cwd()))
        # A script that they source would see the words of the program as its arguments.
        before = f'program_start=$PWD program_here={here}; program_words=("$@"); set --; cd {here}'
        after = 'cd "$program_start"; exec "${program_words[@]}"'
        if self.container:
            lines.append(self.container_lines())
            after = 'cd "$program_start"; exec "${program_at[@]}" "${program_words[@]}"'
        return ("bash", "-c", "\n".join([before, *lines, after]), "bash", *words)

    @property
    def of_prefix(self) -> dict[str, str]:
        """The variable that names the folder of its venv or of conda."""
        if self.prefix is None:
            return {}
        if self.conda:
            return {"CONDA_PREFIX": str(self.folder)}
        is_venv = (self.folder / "pyvenv.cfg").is_file()
        return {"VIRTUAL_ENV": str(self.folder)} if is_venv else {}

    @property
    def lines_of_prefix(self) -> list[str]:
        """Lines of bash with which the programs of its folder come before those of modules. An
        interpreter without a folder of its own may lie in /usr/bin, with other compilers.
        """
        if self.prefix is None or (self.prefix.is_file() and not self.of_prefix):
            return []
        given = [f"{name}={shlex.quote(value)}" for name, value in self.of_prefix.items()]
        folder = shlex.quote(str(Path(self.interpreter).parent))
        return [" ".join(["export", f"PATH={folder}:$PATH", *given])]

    @property
    def is_image_file(self) -> bool:
        """Whether its image is a file, for apptainer."""
        image = self.container or ""
        return image.endswith(".sif") or image.startswith(("/", ".")) or is_file(image)

    def container_lines(self) -> str:
        """Lines of bash that put into `program_at` the words that run a program in it."""
        image, options = shlex.quote(self.container or ""), shlex.join(self.options)
        at = f'"${{program_at[@]}}" {options}'
        if self.is_image_file:
            image = shlex.quote(str(Path(self.container or "").absolute()))
            bind, variables = "(--bind PLACE)", ""
            # Some sites have it under its first name alone, or a relative of it.
            runner = '"$(type -P apptainer || type -P singularity || echo apptainer)"'
            run = f'{runner} exec --pwd "$program_start" {at} {image}'
        else:
            bind = "(--volume PLACE:PLACE)"
            variables = (
                "for program_name in $(compgen -e); do case $program_name in "
                f"{'|'.join(OF_CONTAINER)}) ;; *) "
                'program_at+=(--env "$program_name") ;; esac; done\n'
            )
            # Ranks meet on the node's network, and their workers in its shared memory.
            run = (
                "podman run --rm --init --entrypoint= --network=host --ipc=host "
                f'--security-opt=label=disable --workdir "$program_start" {at} {image}'
            )
        return (
            f"program_at=(); program_bind={bind}\n{SHARED}{variables}program_at=({run} {UNWARNED})"
        )

    def variables(self, before: Mapping[str, str], start: Path) -> dict[str, str]:
        """The environment of a program, in which no uv, pip or conda finds the environment of the
        workflow.

        Args:
            before: this process's own.
            start: where the program starts.
        """
        found = {name: value for name, value in before.items() if not is_of_ours(name, value)}
        if project_above(start) == project_above(Path(__file__)):
            # uv would take the workflow for the program's project.
            found["UV_NO_PROJECT"] = "1"
        if self.is_ours:
            return found
        path = found.get("PATH", os.defpath).split(os.pathsep)
        if sys.prefix != sys.base_prefix or Path(sys.prefix, "conda-meta").is_dir():
            # Not of a system's Python: everything else is there too.
            path = [part for part in path if part != str(Path(sys.executable).parent)]
        found.pop("PYTHONHOME", None)
        if self.container:
            found.pop("PYTHONPATH", None)
            # Apptainer shares the home folder, whose packages would come before those of the image.
            found.setdefault("PYTHONNOUSERSITE", "1")
        if self.prefix:
            path.insert(0, str(Path(self.interpreter).parent))
            if any(self.folder.glob("lib*/python*/site-packages/torch")):
                found = without_our_torch(found)
            found |= self.of_prefix
        if self.uv:
            found.pop("UV_NO_PROJECT", None)
            project = str(Path(self.uv).absolute())
            found |= {"UV_PROJECT": project, "UV_FROZEN": "1", "UV_OFFLINE": "1", "UV_NO_SYNC": "1"}
        return found | {"PATH": os.pathsep.join(path)}

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
        if self.strict and not self.answers_here:
            # Else it would say nothing of what they bring.
            raise Refusal(
                "config: environment.strict: needs python, conda or uv, and neither modules nor "
                "setup; leave strict out"
            )
        if self.prefix and not Path(self.interpreter).is_file():
            remedy = "correct environment"
            if self.uv:
                remedy = f"run `uv sync --locked` in {self.uv}"
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
            _ = self.image, self.answers_here and self.here
        except Refusal as refusal:
            raise Refusal(f"config: environment: {refusal}") from None

    @property
    def answers_here(self) -> bool:
        """Whether its Python can be asked where the command is typed: modules and site settings
        may only be on the nodes.
        """
        return self.prefix is not None and not (self.modules or self.setup)

    @cached_property
    def here(self) -> dict[str, Any]:
        """What `look` finds where the command is typed."""
        return look(self, [self.interpreter], self.variables(os.environ, Path()), (), Path())

    @property
    def packages_sha256(self) -> str:
        """Changes with the packages that are installed in it; empty if it cannot be asked here."""
        if not self.answers_here:
            return ""
        packages = {name: version for name, version in packages_of(self.here).items()
                    if name != SETUP}  # fmt: skip
        text = json.dumps(packages, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def contents_sha256(self) -> str:
        """Changes with the files of these packages, and with the lock; or with the image."""
        if self.container and self.is_image_file:
            status = Path(self.container).stat()
            return f"{self.image} {status.st_size} {status.st_mtime_ns}"
        if not self.answers_here:
            return ""
        text = f"{self.packages_sha256} {self.here['contents']} {self.identity} {self.unlisted}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def unlisted(self) -> list[tuple[str, int, int]]:
        """Changes with what pip lists in no RECORD: conda's packages, and single modules and .pth
        files of which somebody has changed the text. Not with what lies deeper, thousands of files.
        """
        found = []
        for each in ("conda-meta/*.json", "lib/python*/site-packages/*"):
            for path in sorted(self.folder.glob(each)):
                if is_file(path):
                    status = path.stat()
                    found.append((path.name, status.st_size, status.st_mtime_ns))
        return found

    @cached_property
    def image(self) -> str:
        """What tells a build of its image from another one; empty without an image.

        Raises:
            Refusal: it is not there.
        """
        if not self.container:
            return ""
        if "://" in self.container or (self.is_image_file and Path(self.container).is_dir()):
            make = "pull" if "://" in self.container else "build"
            raise Refusal(
                f"{self.container} is no file; make one: apptainer {make} image.sif "
                f"{self.container}, and give that"
            )
        if self.is_image_file:
            try:
                with open_file(Path(self.container)) as file:
                    header = file.read(SIF_HEADER)
            except OSError as error:
                raise Refusal(f"{error_line(error)}; correct environment") from None
            if SIF_MAGIC not in header:
                raise Refusal(f"{self.container} is no image of apptainer's (SIF)")
            if has_overlay(Path(self.container)) and not {"--writable", "-w"} & {*self.options}:
                # Which others may write to, and nothing in the header tells it. With --writable,
                # each start of the program itself does.
                header += str(Path(self.container).stat().st_mtime_ns).encode()
            return hashlib.sha256(header).hexdigest()
        # With the modules that podman may come from; what they print comes first.
        words = replace(self, container=None, options=()).started(
            ["podman", "image", "inspect", "--format", "{{.Id}}", "--", self.container]
        )
        try:
            done = subprocess.run(
                words,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=PATIENCE,
                check=False,
            )
        except (FileNotFoundError, subprocess.TimeoutExpired):
            raise Refusal(
                f"podman is not there or does not answer, for image {self.container}; load its "
                "module, or give a .sif file"
            ) from None
        found = done.stdout.strip().rpartition("\n")[2].removeprefix("sha256:")
        if done.returncode or not re.fullmatch("[0-9a-f]{64}", found):
            said = uncoloured(done.stderr).strip().splitlines() or ["it gives no id"]
            raise Refusal(f"podman has no image {self.container} here: {said[-1]}")
        return found

    @property
    def pinned(self) -> dict[str, Any]:
        """The value of the key, with podman's image by its id: on a node, another image of the same
        name does not take its place.
        """
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given |= {} if self.is_image_file else {"container": self.image or None}
        return {name: value for name, value in given.items() if value}

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
            lock = Path(self.uv, "uv.lock")
            if not lock.is_file():
                raise Refusal(f"{lock} is not there; run `uv lock` in {self.uv}")
            parts["lock"] = file_sha256(lock)
        if self.strict:
            parts["packages"] = self.packages_sha256
        text = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest() if parts else ""


def has_overlay(image: Path) -> bool:
    """Whether an image file has a writable part of its own; not if it cannot be read. Source: the
    format of github.com/apptainer/sif, pkg/sif/sif.go.
    """
    descriptors = b""
    with suppress(OSError, struct.error), open_file(image) as file:
        # After launch script, magic, version, architecture, id and two times.
        _, total, start = struct.unpack_from("<3q", file.read(SIF_HEADER), SIF_COUNTS)
        file.seek(start)
        descriptors = file.read(SIF_DESCRIPTOR * min(max(total, 0), MOST_DESCRIPTORS))
    for at in range(0, len(descriptors) - SIF_DESCRIPTOR + 1, SIF_DESCRIPTOR):
        kind, used = struct.unpack_from("<i?", descriptors, at)
        part = struct.unpack_from("<2i", descriptors, at + SIF_EXTRA)
        if used and kind == SIF_PARTITION and part[1] == SIF_OVERLAY:
            return True
    return False


def look(
    environment: UserEnvironment,
    python: Sequence[str],
    variables: Mapping[str, str],
    imports: Sequence[str],
    folder: Path,
    listed: bool = True,
    start: Path | None = None,
    apart: bool = False,
) -> dict[str, Any]:
    """What a Python says of itself: its version, all distributions, loaded modules; and which of
    the imports come from `elsewhere`, neither installed nor beside the program.

    Args:
        python: the words that start it.
        imports: modules that it must find.
        folder: beside whose files it looks for them.
        listed: with all distributions, whose files are hundreds on a shared file system.
        start: where the program starts, from which PYTHONPATH may lead; here unless given.
        apart: the program's command tells each process its rank, which needs no variable for it.

    Raises:
        NoAnswer: it does not answer.
        Refusal: it does not find a module, or does not get the variables.
    """
    words = environment.started([*python, "-c", PROBE, MARK, str(folder),
                                 "all" if listed else "none", *imports])  # fmt: skip
    if environment.container:
        variables = {**variables, variable("probed"): str(folder.resolve())}
    # Not pipes, whose end comes only with that of what setup has started in the background.
    with file_without_a_name() as output, file_without_a_name() as errors:
        try:
            done = subprocess.run(
                words, env=variables, stdout=output, stderr=errors, timeout=PATIENCE, check=False,
                cwd=start,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoAnswer(f"{python[0]} does not answer: {error}") from None
        found = answer_in(content_of(output))
        error_text = uncoloured(content_of(errors)).strip()
    if done.returncode or found is None:
        raise NoAnswer(why_silent(environment, python[0], error_text, done.returncode, found))
    missing = found.pop("missing")
    several = int(variables.get("WORLD_SIZE") or 1) > 1 and not apart
    if several or "launched" in missing:
        refuse_lost(found["variables"], variables)
    del found["variables"]
    if missing:
        remedy = "correct environment" if environment.prefix else "give environment.python"
        raise Refusal(
            f"{found['interpreter']} ({found['python']}) has no module {missing[0]}, which the "
            f"program imports; install it there, or {remedy}"
        )
    return found | {"imports": list(imports), "setup_sha256": environment.setup_sha256}


def why_silent(
    environment: UserEnvironment, python: str, said: str, status: int, found: object
) -> str:
    """Why a Python has given no answer.

    Args:
        said: what was written to stderr.
        found: its answer; None if it did not give one.
    """
    # Of `setup`, it may not be what ended the shell.
    if environment.modules and (of_lmod := LMOD.search(said)):
        return f"module load {' '.join(environment.modules)}: {of_lmod[1]}"
    lines = said.splitlines() or [f"it ended with status {status}"]
    # Of apptainer, whose last line may be the end of another.
    told = [line for line in lines if OF_APPTAINER.match(line)] or lines
    before = " or ".join(name for name in ("modules", "setup") if getattr(environment, name))
    silent = before and found is None and not said
    why = f"; {before} may have ended the shell before it began" if silent else ""
    where = f" in {environment.container}" if environment.is_image_file else ""
    return f"{python}{where} does not answer{why}: {told[-1]}"


def refuse_lost(found: Mapping[str, str], given: Mapping[str, str]) -> None:
    """Refuse an environment that takes from a program what tells it which process it is.

    Args:
        found: the variables that are left.
    """
    for name in TOLD:
        if name in given and found.get(name) != given[name]:
            raise Refusal(
                f"the program would not get the variable {name}: leave out --cleanenv, "
                "--containall, APPTAINER_CLEANENV and the like, or what unsets it in setup"
            )


def content_of(file: IO[str]) -> str:
    """What another process has written to a file of `file_without_a_name`."""
    number = file.fileno()
    return os.pread(number, os.fstat(number).st_size, 0).decode(errors="replace")


def answer_in(text: str) -> dict[str, Any] | None:
    """What PROBE has said, in an output in which others may have left a line without its end."""
    _, mark, rest = text.rpartition(MARK)
    with suppress(ValueError):
        found: dict[str, Any] = json.JSONDecoder().raw_decode(rest)[0]
        return found if mark else None
    return None


def packages_of(record: Mapping[str, Any]) -> dict[str, str]:
    """The versions of Python and of all packages, from environment.json."""
    image = {"image": record["image"]} if "image" in record else {}
    if "setup_sha256" in record:
        image[SETUP] = record["setup_sha256"][:12] or "none"
    return {"python": record.get("python") or "none"} | image | record.get("distributions", {})


def other_packages(
    before: Mapping[str, tuple[str, ...]], after: Mapping[str, tuple[str, ...]]
) -> str:
    """The packages of other versions, as `numpy 2.3.5 -> 2.4.0`, in one line; empty without any.

    Args:
        before, after: by name, all versions that runs have had.
    """
    none = ("none",)
    found = [
        f"{name} {'/'.join(before.get(name, none))} -> {'/'.join(after.get(name, none))}"
        for name in sorted({*before, *after}, key=str.lower)
        if before.get(name) != after.get(name)
        # A record of an earlier version does not say it.
        and not (name == SETUP and {None} & {before.get(name), after.get(name)})
    ]
    more = f" and {len(found) - MOST_PACKAGES} more" * (len(found) > MOST_PACKAGES)
    return ", ".join(found[:MOST_PACKAGES]) + more


def changed_packages(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """What is different between the packages of two environment.json; empty if one of them says
    nothing of its Python.
    """
    if not (before.get("python") and after.get("python")):
        return ""
    one, other = (
        {name: (version,) for name, version in packages_of(record).items()}
        for record in (before, after)
    )
    return other_packages(one, other)


def is_of_ours(name: str, value: str) -> bool:
    """Whether a variable leads to the environment of the workflow."""
    return (name in ("VIRTUAL_ENV", "CONDA_PREFIX") or name.startswith(("UV_", "PIP_"))) and (
        Path(os.path.realpath(value)).is_relative_to(os.path.realpath(sys.prefix))
    )


def without_our_torch(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables without the folder of PYTHONPATH in which the workflow's own torch lies:
    another Python would take it for its own.
    """
    given = variables.get("PYTHONPATH", "")
    spec = importlib.util.find_spec("torch")
    ours = Path(spec.origin).parents[1].resolve() if spec and spec.origin else None
    folders = given.split(os.pathsep)
    kept = [folder for folder in folders if not folder or Path(folder).resolve() != ours]
    rest = {name: value for name, value in variables.items() if name != "PYTHONPATH"}
    return rest | ({"PYTHONPATH": os.pathsep.join(kept)} if given and kept else {})


def project_above(path: Path) -> Path | None:
    """The first pyproject.toml in a folder or above it."""
    for folder in (path.resolve(), *path.resolve().parents):
        if (folder / "pyproject.toml").is_file():
            return folder / "pyproject.toml"
    return None


def is_python(word: str) -> bool:
    """Whether a word of a command starts a Python."""
    return IS_PYTHON.fullmatch(Path(word).name) is not None


def needed(words: Sequence[str], folder: Path) -> tuple[tuple[str, ...], Path]:
    """The modules that a Python file imports whatever happens, and the folder that it is in.

    Args:
        words: after the interpreter; other than a file, nothing is known.
        folder: where the program starts.
    """
    file = folder / next((word for word in words if word[:1] != "-"), "")
    if file.suffix != ".py" or {"-m", "-c"} & set(words[:2]):
        return (), folder
    try:
        text = file.read_text(encoding="utf-8")
        body = ast.parse(text).body
    except (OSError, SyntaxError, ValueError):
        return (), folder
    if OTHER_PATHS.search(text):
        return (), folder  # only the program knows where it looks
    names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    names += [
        node.module or "" for node in body if isinstance(node, ast.ImportFrom) and not node.level
    ]
    tops = dict.fromkeys(name.partition(".")[0] for name in names)
    return tuple(top for top in tops if top[:2] != "__"), file.resolve().parent
