"""The container of a user's program: its image, and the words that start something in it."""

import hashlib
import re
import shlex
import struct
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from manynodes.base.errors import Refusal, error_line, uncoloured
from manynodes.base.processes import answer_within
from manynodes.base.reading import is_file, open_file

# Seconds for what lies on a cold network file system, such as a Python.
PATIENCE = 300
# Bytes at the beginning of an image file of apptainer's, with an id and the times of the build.
SIF_HEADER, SIF_MAGIC = 128, b"SIF_MAGIC"
# Bytes before the counts of its descriptors, of a descriptor, and before a partition's kind in it.
SIF_COUNTS, SIF_DESCRIPTOR, SIF_EXTRA = 80, 585, 201
SIF_PARTITION, SIF_OVERLAY, MOST_DESCRIPTORS = 0x4004, 4, 1000
# What a container has of its own; it gets the other variables.
OF_CONTAINER = (
    "PATH", "HOME", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_", "LD_LIBRARY_PATH", "LD_PRELOAD",
)  # fmt: skip
# In bash: the folders that a container shares with the node, under the same paths: a program finds
# its own files, our module, and what the contract names, also behind links. One below another is
# there with it.
SHARED = r"""
# Since bash 5.2, & in a path would be what it replaces.
shopt -u patsub_replacement 2>/dev/null || :
shopt -s dotglob
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
# `uv pip` then takes what this names, and not the `.venv` of a folder above.
OF_UV = '[ -z "${VIRTUAL_ENV-}${CONDA_PREFIX-}" ] || unset UV_SYSTEM_PYTHON'
# A scheduler's warning goes to all processes, and would end a program that does not expect it.
UNWARNED = f"""sh -c 'trap "" USR1 USR2; {OF_UV}; exec "$@"' sh"""


def is_image_file(image: str) -> bool:
    """Whether an image is a file, for apptainer."""
    return image.endswith(".sif") or image.startswith(("/", ".")) or is_file(image)


def container_lines(image: str, options: Sequence[str]) -> str:
    """Lines of bash that put into `program_at` the words that run a program in a container."""
    at = f'"${{program_at[@]}}" {shlex.join(options)}'
    if is_image_file(image):
        image = shlex.quote(str(Path(image).absolute()))
        bind, variables = "(--bind PLACE)", ""
        # Some sites have it under its first name alone, or a relative of it.
        runner = '"$(type -P apptainer || type -P singularity || echo apptainer)"'
        run = f'{runner} exec --pwd "$program_start" {at} {image}'
    else:
        image = shlex.quote(image)
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
    return f"program_at=(); program_bind={bind}\n{SHARED}{variables}program_at=({run} {UNWARNED})"


def refuse_no_file(image: str) -> None:
    """Refuse an image that must be made a file first."""
    if "://" in image or (is_image_file(image) and Path(image).is_dir()):
        make = "pull" if "://" in image else "build"
        raise Refusal(
            f"{image} is no file; make one: apptainer {make} image.sif {image}, and give that"
        )


def image_of_file(image: Path, writable: bool) -> str:
    """What tells a build of an image file from another one, as a SHA-256.

    Args:
        writable: each start of the program itself writes to it.

    Raises:
        Refusal: it is not there, or is none.
    """
    try:
        with open_file(image) as file:
            header = file.read(SIF_HEADER)
    except OSError as error:
        raise Refusal(f"{error_line(error)}; correct environment") from None
    if SIF_MAGIC not in header:
        raise Refusal(f"{image} is no image of apptainer's (SIF)")
    if has_overlay(image) and not writable:
        # Which others may write to, and nothing in the header tells it.
        header += str(image.stat().st_mtime_ns).encode()
    return hashlib.sha256(header).hexdigest()


def image_in_store(image: str, started: Callable[[Sequence[str]], Sequence[str]]) -> str:
    """The id of an image in podman's store.

    Args:
        started: the words that start a command with the modules that podman may come from.

    Raises:
        Refusal: podman does not answer, or has no such image.
    """
    words = started(["podman", "image", "inspect", "--format", "{{.Id}}", "--", image])
    try:
        done = answer_within(PATIENCE, words, stderr=subprocess.PIPE)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        raise Refusal(
            f"podman is not there or does not answer, for image {image}; load its module, or give "
            "a .sif file"
        ) from None
    # What modules print comes first.
    found = done.stdout.strip().rpartition("\n")[2].removeprefix("sha256:")
    if done.returncode or not re.fullmatch("[0-9a-f]{64}", found):
        said = uncoloured(done.stderr).strip().splitlines() or ["it gives no id"]
        raise Refusal(f"podman has no image {image} here: {said[-1]}")
    return found


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
