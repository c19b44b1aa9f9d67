"""How many small changes of the code do the unit tests notice?

    python benchmarks/mutants.py [--sample 40] [--seed 1] [--checkout FOLDER]

One operator, number or boolean of `workflow/scripts` is changed at a time. Then the unit tests of
the changed module run, in a copy of the checkout. A mutant is *caught* if they fail with it and
pass without it. Mutants are drawn by a hash of their place, so that two checkouts with the same
code are given the same ones. The change may leave the behaviour as it is, so that 100 % is no
target: compare two numbers.
"""

import argparse
import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = "workflow/scripts"
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
OPERATIONS = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*",
    ast.BitAnd: "|", ast.BitOr: "&", ast.LShift: ">>", ast.RShift: "<<", ast.Pow: "*",
}  # fmt: skip
# Seconds after which a mutant counts as caught: it hangs.
LIMIT = 600
# Files of tests for one mutant.
MOST_FILES = 5
# Of pytest: a wrong command, no tests.
NO_ANSWER = (4, 5)


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        path: of the file, from the top of the checkout.
        start, end: of the replaced text, in bytes.
        key: that decides whether it is drawn.
    """

    path: str
    line: int
    start: int
    end: int
    old: str
    new: str
    key: str


def mutants(root: Path, path: Path, seed: int) -> Iterator[Mutant]:
    """All mutants of a file."""
    source = path.read_bytes()
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def begin(node: ast.expr) -> int:
        return starts[node.lineno - 1] + node.col_offset

    def finish(node: ast.expr) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return starts[node.end_lineno - 1] + node.end_col_offset

    def changes(node: ast.AST) -> Iterator[tuple[int, int, str]]:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield finish(node.left), begin(node.comparators[0]), COMPARISONS[type(node.ops[0])]
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            yield finish(node.left), begin(node.right), OPERATIONS[type(node.op)]
        elif isinstance(node, ast.BoolOp):
            new = "or" if isinstance(node.op, ast.And) else "and"
            yield finish(node.values[0]), begin(node.values[1]), new
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield begin(node), begin(node.operand), ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield begin(node), finish(node), str(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield begin(node), finish(node), repr(node.value + 1)

    for node in evaluated(ast.parse(source)):
        for start, end, new in changes(node):
            old = source[start:end].decode()
            # Parentheses around an operand belong to the text between the operands.
            parts = re.fullmatch(r"([\s)]*)(.*?)([\s(]*)", old)
            # Operands on several lines may have a comment between them.
            if parts is None or "#" in old:
                continue
            left, operator, right = parts.groups()
            number = source.count(b"\n", 0, start)
            place = f"{lines[number].strip()!r} {start - starts[number]}"
            key = f"{seed} {path.relative_to(root)} {place} {new}"
            yield Mutant(
                str(path.relative_to(root)), number + 1, start, end, operator,
                f"{left}{new}{right}",
                hashlib.sha256(key.encode()).hexdigest(),
            )  # fmt: skip


def evaluated(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a program except its annotations."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST):
                yield node
                yield from evaluated(node)


def tests_of(root: Path, path: str) -> list[str]:
    """The unit tests that name a module or run a program, then those of the modules that import
    it, up to MOST_FILES: a module with one test of its own is mostly tested through others.
    """
    modules = {
        str(file.relative_to(root)): file.read_text()
        for file in (root / SCRIPTS).rglob("*.py")
        if "__pycache__" not in file.parts
    }
    tests = {
        str(file.relative_to(root)): file.read_text()
        for file in (root / "tests/unit").glob("test_*.py")
    }
    chosen: list[str] = []
    searched, near = set(), {path}
    while near and len(chosen) < MOST_FILES:
        searched |= near
        named = [re.compile(naming(module)) for module in near]
        counts = {
            test: sum(len(n.findall(text)) for n in named) for test, text in tests.items()
        }  # fmt: skip
        found = sorted(filter(counts.get, counts), key=lambda test: (-counts[test], test))
        chosen += [test for test in found if test not in chosen]
        near = {
            module for module, text in modules.items() if any(n.search(text) for n in named)
        } - searched  # fmt: skip
    return (chosen or sorted(tests))[:MOST_FILES]


def naming(path: str) -> str:
    """An expression for the text that imports a module or runs a program."""
    name = path.removeprefix(f"{SCRIPTS}/").removesuffix(".py")
    package, _, module = name.replace("/", ".").rpartition(".")
    if not package:
        return rf'["/]{module}(\.py)?["\']|(from|import) {module}\b'
    dotted = re.escape(package)
    return rf"from {dotted} import [^\n]*\b{module}\b|{dotted}\.{module}\b"


def failing(root: Path, tests: list[str], mutant: Mutant | None) -> str:
    """What the tests say last in a copy of the checkout with this change; empty if they pass."""
    with tempfile.TemporaryDirectory() as folder:
        # A second user takes part in some tests.
        Path(folder).chmod(0o711)
        copy = Path(folder, "checkout")
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns(".git", ".venv", "results",
                        ".snakemake", "__pycache__", ".*_cache"))  # fmt: skip
        if mutant:
            changed = copy / mutant.path
            source = changed.read_bytes()
            changed.write_bytes(source[: mutant.start] + mutant.new.encode() + source[mutant.end :])
        command = [
            sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:randomly", "-m", "not faults",
            f"--basetemp={folder}/tmp", *tests,
        ]  # fmt: skip
        environment = os.environ | {"TMPDIR": folder}
        process = subprocess.Popen(command, cwd=copy, env=environment, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        try:
            output = process.communicate(timeout=LIMIT)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return f"no end after {LIMIT} s"
        if process.returncode in NO_ANSWER:
            raise SystemExit(output)
        return "\n".join(output.splitlines()[-3:]) if process.returncode else ""


def is_caught(root: Path, mutant: Mutant) -> bool:
    """Whether the unit tests fail with this change, and pass without it."""
    tests = tests_of(root, mutant.path)
    if not failing(root, tests, mutant):
        return False
    if said := failing(root, tests, None):
        raise SystemExit(f"mutants: the tests fail without a change, too; repair them: {said}")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sample", type=int, default=40, metavar="N", help="number of mutants; 40 if not given")
    add("--seed", type=int, default=1, metavar="N", help="of the sample; 1 if not given")
    add("--checkout", type=Path, default=ROOT, help="another checkout, such as an older one")
    add("--jobs", type=int, default=2, metavar="N", help="mutants at a time; 2 if not given")
    args = parser.parse_args()
    root = args.checkout.resolve()
    found = [
        mutant
        for path in sorted((root / SCRIPTS).rglob("*.py"))
        for mutant in mutants(root, path, args.seed)
    ]
    drawn = sorted(found, key=lambda mutant: mutant.key)[: args.sample]
    with ThreadPoolExecutor(args.jobs) as pool:
        caught = pool.map(lambda mutant: is_caught(root, mutant), drawn)
        count = 0
        for mutant, noticed in zip(drawn, caught, strict=True):
            count += noticed
            how = "caught" if noticed else "MISSED"
            print(f"{how}  {mutant.path}:{mutant.line}  {mutant.old!r} -> {mutant.new!r}",
                  flush=True)  # fmt: skip
    print(f"{count} of {len(drawn)} mutants caught; {len(found)} possible")


if __name__ == "__main__":
    main()
