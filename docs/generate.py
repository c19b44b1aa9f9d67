"""Write the generated parts of the documentation: `make docs`.

The table of keys in config/README.md comes from the schema and the declarations of data sets and
models; docs/packages.svg from the imports of the library. Graphviz draws the picture.
"""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "workflow" / "scripts"
sys.path.insert(0, str(SCRIPTS))

from ddp.experiment.programs import SHARED, properties  # noqa: E402
from ddp.experiment.schema import schema  # noqa: E402


def main() -> None:
    readme = ROOT / "config" / "README.md"
    text = readme.read_text()
    table = re.compile(r"(?<=\|---\|---\|---\|\n)(\| `.*\n)+")
    tables = iter([key_rows(schema()["properties"]), key_rows(own_keys())])
    readme.write_text(table.sub(lambda _: "\n".join(next(tables)) + "\n", text, count=2))
    picture = subprocess.run(["dot", "-Tsvg"], input=packages_dot(), capture_output=True, text=True)
    if picture.returncode:
        sys.exit(f"docs: dot failed: {picture.stderr.strip()}")
    (ROOT / "docs" / "packages.svg").write_text(picture.stdout)


def key_rows(properties: dict[str, Any]) -> list[str]:
    """A row of a table in config/README.md for each key."""
    return [key_row(key, spec) for key, spec in keys(properties).items()]


def own_keys() -> dict[str, Any]:
    """The keys of an experiment with a program of the user's that no other experiment has."""
    return {key: spec for key, spec in properties().items() if key not in SHARED}


def keys(properties: dict[str, Any], prefix: str = "") -> dict[str, dict[str, Any]]:
    """Every key of the schema, those of `dataset` as dataset.key."""
    flat: dict[str, dict[str, Any]] = {}
    for name, spec in properties.items():
        nested = spec.get("properties")
        flat |= keys(nested, f"{name}.") if nested else {prefix + name: spec}
    return flat


def key_row(key: str, spec: dict[str, Any]) -> str:
    default = f"`{json.dumps(spec['default'])}`" if "default" in spec else "none"
    return f"| `{key}` | {default} | {spec['description']} |"


def packages_dot() -> str:
    """The imports between the packages, without `base`, which all of them import.

    An arrow is left out if other arrows lead to the same package.
    """
    imports = package_imports(SCRIPTS / "ddp")
    lines = [
        "digraph {",
        'graph [rankdir=BT, ranksep=0.4, fontname="Helvetica"]',
        'node [shape=box, style="rounded,filled", fillcolor="#eef3f8", color="#4a6785", '
        'fontname="Helvetica", fontsize=12]',
        'edge [color="#4a6785", arrowsize=0.7]',
    ]
    for package, others in sorted(imports.items()):
        lines.append(f'"{package}"')
        for other in sorted(others):
            if not any(other in reachable(imports, via) for via in others - {other}):
                lines.append(f'"{package}" -> "{other}"')
    return "\n".join([*lines, "}"])


def package_imports(library: Path) -> dict[str, set[str]]:
    """What each package of the library imports from the others, except `base`."""
    names = {path.parent.name for path in library.glob("*/__init__.py")} - {"base"}
    found: dict[str, set[str]] = {name: set() for name in names}
    for path in library.rglob("*.py"):
        package = path.relative_to(library).parts[0]
        if package in names:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ddp."):
                    found[package].add(str(node.module).split(".")[1])
    return {package: (others & names) - {package} for package, others in found.items()}


def reachable(imports: dict[str, set[str]], package: str) -> set[str]:
    found = set(imports[package])
    for other in imports[package]:
        found |= reachable(imports, other)
    return found


if __name__ == "__main__":
    main()
