"""The lock file of a uv project, and whether what is installed is what it has."""

import csv
import json
import tomllib
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from manynodes.base.errors import Refusal


def workspace_of(project: Path) -> Path | None:
    """The folder of the workspace that a uv project is a member of, which has lock and `.venv` for
    all of its members; None if it is none.
    """
    project = project.resolve()
    for above in project.parents:
        with suppress(OSError, ValueError, AttributeError, TypeError, NotImplementedError):
            found = tomllib.loads((above / "pyproject.toml").read_text(encoding="utf-8"))
            workspace = found.get("tool", {}).get("uv", {}).get("workspace", {})
            members, others = (
                {path for pattern in workspace.get(key, ()) for path in above.glob(pattern)}
                for key in ("members", "exclude")
            )
            if project in members - others:
                return above
    return None


def packages_in(lock: Path) -> Mapping[str, list[dict[str, Any]]]:
    """What a lock file of uv's has of each package that is not a folder's; several where it differs
    between machines.

    Raises:
        Refusal: it cannot be read.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        for package in tomllib.loads(lock.read_text(encoding="utf-8")).get("package", []):
            if not package["source"].keys() & {"editable", "virtual", "directory"}:
                about = {key: str(value) for key, value in package["source"].items()}
                version = {"version": normal(package["version"])} if "version" in package else {}
                found.setdefault(package["name"], []).append(version | {"source": about})
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise Refusal(f"{lock} cannot be read; run `uv lock` in {lock.parent}") from None
    return found


def is_of(source: Mapping[str, str], about: Path, folder: Path) -> bool:
    """Whether an installed package comes from where a lock says, as far as that is known.

    Args:
        about: its dist-info.
        folder: of the lock.
    """
    address = commit = ""
    # There is none of what comes from an index.
    with suppress(OSError, ValueError, LookupError, TypeError):
        direct = json.loads((about / "direct_url.json").read_bytes())
        address = without_secrets(direct["url"])
        commit = str(direct["vcs_info"]["commit_id"])
    if "git" in source:
        return commit == source["git"].rpartition("#")[2]
    if "url" in source:
        return address == without_secrets(source["url"])
    return not commit and ("path" not in source or has_files_of(about, folder / source["path"]))


def without_secrets(address: str) -> str:
    """An address without user, password and what comes behind `#`."""
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="").geturl()


def has_files_of(about: Path, wheel: Path) -> bool:
    """Whether an installed package has the files of a wheel, by the hashes that both list; True if
    that cannot be known, as of an archive of sources.

    Args:
        about: its dist-info.
    """
    with suppress(OSError, ValueError, LookupError, zipfile.BadZipFile):
        with zipfile.ZipFile(wheel) as file:
            (record,) = (each for each in file.namelist() if each.endswith(".dist-info/RECORD"))
            given = hashes_in(file.read(record).decode())
        return given <= hashes_in((about / "RECORD").read_text(encoding="utf-8"))
    return True


def hashes_in(record: str) -> set[tuple[str, str]]:
    """The files of a RECORD with their hashes, without those that are installed elsewhere."""
    rows = csv.reader(record.splitlines())
    return {(row[0], row[1]) for row in rows if len(row) > 1 and row[1] and ".data/" not in row[0]}


def normal(version: str) -> str:
    """A version as uv writes it: 2024.7.4 for 2024.07.04."""
    from packaging.utils import canonicalize_version

    return canonicalize_version(version, strip_trailing_zero=False)
