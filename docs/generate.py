"""Write the generated parts of the documentation: `make docs`.

The tables of keys in config/README.md, and the schema for editors, come from what declares the
keys; docs/packages.svg from the imports of the library. Graphviz draws the picture.
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

from manynodes.base.reading import SCHEMAS  # noqa: E402
from manynodes.experiment.keys import OF_PROGRAMS, keys_of  # noqa: E402

FOR_EDITORS = SCHEMAS / "config.schema.yaml"
MADE = "# Made by `make docs` from experiment.schema.yaml and the classifier's parameters.yaml.\n"


def main() -> None:
    readme = ROOT / "config" / "README.md"
    text = readme.read_text()
    table = re.compile(r"(?<=\|---\|---\|---\|\n)(\| `.*\n)+")
    made = iter(tables())
    readme.write_text(table.sub(lambda _: "\n".join(next(made)) + "\n", text, count=3))
    FOR_EDITORS.write_text(editor_schema())
    picture = subprocess.run(["dot", "-Tsvg"], input=packages_dot(), capture_output=True, text=True)
    if picture.returncode:
        sys.exit(f"docs: dot failed: {picture.stderr.strip()}")
    (ROOT / "docs" / "packages.svg").write_text(picture.stdout)


def tables() -> list[list[str]]:
    """The rows of the tables in config/README.md: of the keys of every experiment, the parameters
    of the classifier, and the keys for a user's own program.
    """
    every = keys_of({})
    flat = keys(every.properties)
    for_programs = ("program", "command", *OF_PROGRAMS)
    groups: list[list[str]] = [[], [], []]
    for key, spec in flat.items():
        group = 1 if key in every.parameters else 2 if key in for_programs else 0
        groups[group].append(key_row(key, spec))
    return groups


def editor_schema() -> str:
    """The keys of an experiment with the classifier, for an editor: YAML with one line per key."""
    schema = keys_of({}).schema
    lines = [f"  {json.dumps(key)}: {json.dumps(spec, ensure_ascii=False)}"
             for key, spec in schema["properties"].items()]  # fmt: skip
    rest = [f"{json.dumps(key)}: {json.dumps(part)}"
            for key, part in schema.items() if key != "properties"]  # fmt: skip
    return MADE + "\n".join([*rest, '"properties":', *lines]) + "\n"


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
    program = package_imports(SCRIPTS / "classifier")
    imports = package_imports(SCRIPTS / "manynodes") | program
    lines = [
        "digraph {",
        'graph [rankdir=BT, ranksep=0.4, fontname="Helvetica"]',
        'node [shape=box, style="rounded,filled", fillcolor="#eef3f8", color="#4a6785", '
        'fontname="Helvetica", fontsize=12]',
        'edge [color="#4a6785", arrowsize=0.7]',
    ]
    for package, others in sorted(imports.items()):
        lines.append(f'"{package}"' + (' [fillcolor="#f6efe2"]' if package in program else ""))
        for other in sorted(others):
            if not any(other in reachable(imports, via) for via in others - {other}):
                lines.append(f'"{package}" -> "{other}"')
    return "\n".join([*lines, "}"])


def package_imports(library: Path) -> dict[str, set[str]]:
    """What each package of a folder imports from others, except `base`."""
    names = {path.parent.name for path in library.glob("*/__init__.py")} - {"base"}
    found: dict[str, set[str]] = {name: set() for name in names}
    for path in library.rglob("*.py"):
        package = path.relative_to(library).parts[0]
        if package in names:
            for node in ast.walk(ast.parse(path.read_text())):
                module = (isinstance(node, ast.ImportFrom) and node.module) or ""
                if module.startswith(("manynodes.", "classifier.")):
                    found[package].add(module.split(".")[1])
    return {package: others - {package, "base"} for package, others in found.items()}


def reachable(imports: dict[str, set[str]], package: str) -> set[str]:
    found = set(imports[package])
    for other in imports[package]:
        found |= reachable(imports, other)
    return found


if __name__ == "__main__":
    main()
