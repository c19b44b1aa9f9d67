"""What the Python of a user's program is asked: what is installed, and which modules are missing.

It runs there by its text, in Python 3.7 or later, whatever that Python has installed.
"""

import email
import hashlib
import importlib.util
import json
import os
import platform
import sys
import sysconfig
from pathlib import Path
from typing import Any


def main(mark: str, folder: str, listed: str, told: str, *imports: str) -> None:
    """Print the answers as JSON.

    Args:
        mark: comes before them.
        folder: of the program, from which it imports.
        listed: `all` lists all distributions.
        told: names of variables, separated by commas.
        imports: modules that it must find.
    """
    found, contents = installed() if listed == "all" else ({}, "")
    missing, elsewhere = looked_for(imports, folder)
    answers = {
        "interpreter": sys.executable,
        "python": platform.python_version(),
        "distributions": {name: found[name] for name in sorted(found)},
        "contents": hashlib.sha256(contents.encode()).hexdigest(),
        "modules": [name for name in os.environ.get("LOADEDMODULES", "").split(":") if name],
        "missing": missing,
        "elsewhere": elsewhere,
        "variables": {name: os.environ[name] for name in told.split(",") if name in os.environ},
        "fuse": shows_image(),
    }
    print(mark + json.dumps(answers))


def installed() -> tuple:
    """The versions of all distributions by name, and what changes with their files."""
    texts = []
    try:
        from importlib import metadata

        every = list(metadata.distributions())
        listed = [named(each) for each in every]
        # The hashes of all files, and the commit of a package that has only one version.
        texts = [text(each, name) for each in every for name in ("RECORD", "direct_url.json")]
    except ImportError:
        # Python 3.7. Without setuptools, of which pkg_resources is, each is read.
        try:
            import pkg_resources

            listed = [(each.project_name, each.version) for each in pkg_resources.working_set]
        except ImportError:
            listed, texts = read_from_folders()
    found, seen = {}, set()
    for name, version in listed:
        # Python imports the first one on its path.
        key = str(name).lower().replace("_", "-")
        if name and key not in seen:
            seen.add(key)
            found[name] = str(version)
    return found, "".join(sorted(texts))


def read_from_folders() -> tuple:
    """Name and version of what is installed on Python's path, with the texts of `installed`."""
    listed, texts = [], []
    for folder in map(Path, dict.fromkeys(sys.path)):
        for about in sorted(folder.glob("*.dist-info")):
            try:
                # Any file is of this encoding, and names and versions are ASCII.
                message = email.message_from_string((about / "METADATA").read_text("latin-1"))
                listed.append((message["Name"], message["Version"]))
                for name in ("RECORD", "direct_url.json"):
                    if (about / name).is_file():
                        texts.append((about / name).read_text("latin-1"))
            except OSError:
                continue
    return listed, texts


# A distribution that is damaged, or not in UTF-8, keeps nobody from the others.
def named(distribution: Any) -> tuple:
    """Its name and version."""
    try:
        about = distribution.metadata  # read anew each time, and by distribution.version
        return about["Name"], about["Version"]
    except Exception:
        folder = Path(str(getattr(distribution, "_path", ""))).name
        return folder.rpartition(".")[0].partition("-")[::2]


def text(distribution: Any, name: str) -> Any:
    """One of its files."""
    try:
        return distribution.read_text(name) or ""
    except UnicodeDecodeError as error:
        return error.object.decode("latin-1")


def looked_for(imports: tuple, folder: str) -> tuple:
    """The modules that are not found; and the files of those that are neither installed, nor of
    Python itself, nor beside the program, nor staged.
    """
    sys.path.insert(0, folder)
    folders = sysconfig.get_path("stdlib"), os.environ.get("LAUNCH_FILES")
    known = tuple(os.path.realpath(path) + os.sep for path in folders if path)
    missing, elsewhere = [], {}
    for name in imports:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        if spec is None:
            missing.append(name)
        elif spec.has_location and spec.origin and name != "launched":
            place = os.path.realpath(spec.origin)
            packages = {"site-packages", "dist-packages"} & {*Path(place).parts}
            above = Path(spec.origin).parent
            if Path(spec.origin).name.startswith("__init__."):
                above = above.parent
            beside = os.path.realpath(above) == os.path.realpath(folder)
            if not (packages or beside or place.startswith(known)):
                elsewhere[name] = place
    return missing, elsewhere


def shows_image() -> bool:
    """Whether a process beside this one shows the image."""
    try:
        tasks = Path(f"/proc/{os.getppid()}/task").iterdir()
        beside = " ".join((task / "children").read_text() for task in tasks).split()
        names = [Path(f"/proc/{pid}/comm").read_text(errors="replace") for pid in beside]
        return any(name.startswith("squashfuse") for name in names)
    except OSError:
        return False


if __name__ == "__main__":
    main(*sys.argv[1:])
