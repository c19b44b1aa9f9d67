"""What is installed in environments: the packages of two records, compared."""

from collections.abc import Mapping
from typing import Any

MOST_PACKAGES = 5  # named in a line
SETUP = "environment.setup"  # beside packages, what stands for `setup` and `options`


def packages_of(record: Mapping[str, Any]) -> dict[str, str]:
    """The versions of Python and of all packages and loaded modules, from environment.json."""
    found = {"image": record["image"]} if "image" in record else {}
    if "setup_sha256" in record:
        found[SETUP] = record["setup_sha256"][:12] or "none"
    for module in record.get("modules", ()):
        name, _, version = module.rpartition("/")
        found |= {f"module {name}": version} if name else {f"module {module}": "loaded"}
    return {"python": record.get("python") or "none"} | found | record.get("distributions", {})


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
    """What is different between two environment.json; nothing of Python and its packages if one of
    them does not know its Python.
    """
    records = [before, after]
    if not (before.get("python") and after.get("python")):
        records = [{**record, "python": None, "distributions": {}} for record in records]
    one, other = (
        {name: (version,) for name, version in packages_of(record).items()} for record in records
    )
    return other_packages(one, other)
