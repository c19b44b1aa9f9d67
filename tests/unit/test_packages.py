"""The packages import each other only as docs/architecture.md says."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from programs import ROOT, SCRIPTS

LIBRARY = SCRIPTS / "manynodes"
CLASSIFIER = SCRIPTS / "classifier"


def allowed() -> dict[str, set[str]]:
    """The table of the packages in docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \|([^|]*)\|$", text, re.MULTILINE)
    return {package: {"base", *re.findall(r"`(\w+)`", others)} for package, others in rows}


@cache
def imported() -> dict[str, set[str]]:
    """What each package imports from the others."""
    roots = {root.name: root for root in (LIBRARY, CLASSIFIER)}
    found: dict[str, set[str]] = {
        path.parent.name: set() for root in roots.values() for path in root.glob("*/__init__.py")
    }
    for root in roots.values():
        for path in root.glob("*/**/*.py"):
            package = path.relative_to(root).parts[0]
            for node in ast.walk(ast.parse(path.read_text())):
                names = str(node.module).split(".") if isinstance(node, ast.ImportFrom) else [""]
                if names[0] in roots and names[1:2] not in ([], [package]):
                    found[package].add(names[1])
    return found


def names_of(folder: Path) -> set[str]:
    return {path.parent.name for path in folder.glob("*/__init__.py")}


def test_packages_import_only_what_the_architecture_page_allows() -> None:
    assert imported().keys() == allowed().keys()
    for package, others in imported().items():
        assert others <= allowed()[package], package


def test_the_page_allows_nothing_that_is_not_used() -> None:
    for package, others in allowed().items():
        assert others - {"base", package} <= imported()[package], package


def test_the_library_knows_nothing_of_the_classifier() -> None:
    used = set().union(*(imported()[package] for package in names_of(LIBRARY)))
    assert not used & names_of(CLASSIFIER)
    assert not names_of(LIBRARY) & names_of(CLASSIFIER)


def test_there_is_no_circle() -> None:
    TopologicalSorter(imported()).prepare()


def test_the_library_does_not_know_programs_snakemake_or_a_command_line() -> None:
    programs = {path.stem for path in SCRIPTS.glob("*.py")}
    for path in LIBRARY.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            roots = {name.partition(".")[0] for name in names}
            assert not roots & (programs | {"argparse"}), path
            if "schedulers" not in path.parts:
                assert not any(root.startswith("snakemake") for root in roots), path


def test_every_package_says_what_it_is() -> None:
    for path in (*LIBRARY.rglob("__init__.py"), *CLASSIFIER.rglob("__init__.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert docstring, path
        if path.parent not in (LIBRARY, CLASSIFIER):
            assert "In: " in docstring, path
            assert "Out: " in docstring, path


def test_no_test_module_imports_another() -> None:
    for path in (ROOT / "tests").glob("*/test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and str(node.module).startswith("test_"))
