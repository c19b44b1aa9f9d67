"""The code hash ignores comments and notices every computation."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from manynodes.base import provenance
from manynodes.base.errors import Refusal
from manynodes.base.reading import parse_form
from manynodes.base.sources import local_sources, run_sources
from manynodes.experiment.command import words_sha256
from manynodes.experiment.config import Experiment
from manynodes.programs.attempt import begin
from manynodes.programs.folders import Folders
from manynodes.programs.task import Task
from manynodes.reporting.numbers import Numbers, summary_row
from programs import SCRIPTS, committed
from publish import about, read_environment


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = Path(shutil.copytree(SCRIPTS, tmp_path / "checkout/workflow/scripts"))
    monkeypatch.setattr(provenance, "SCRIPTS", folder)
    return folder


def code_sha256(program: str) -> str:
    """The hash without cached files."""
    provenance.file_hash.cache_clear()
    return provenance.code_sha256(program)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_comments_docstrings_and_formatting_do_not_count(scripts) -> None:
    before = code_sha256("train.py")
    edit(scripts / "train.py", '"""Train one run', '# a comment\n"""Teach one run')
    edit(
        scripts / "classifier" / "pixels" / "batches.py",
        "    part = batch.tensor_split(world_size)[rank]",
        "    part = (batch . tensor_split( world_size ) [rank])  # so",
    )
    edit(
        scripts / "classifier" / "models" / "weights.py",
        "Write weights and description",
        "Put weights and description",
    )
    assert code_sha256("train.py") == before


@pytest.mark.parametrize(("file", "old", "new"), [
    ("classifier/training/losses.py", "label_smoothing=smoothing", "label_smoothing=0.0"),
    ("classifier/pixels/batches.py", "(coin + epoch) % 2", "(coin + epoch) % 3"),
    ("classifier/models/networks.py", ".flatten(1)) / 9", ".flatten(1)) / 8"),
    ("manynodes/ranks/process_group.py", "dist.all_reduce(tensor)", "dist.broadcast(tensor, 0)"),
])  # fmt: skip
def test_what_computes_counts_wherever_it_is(scripts, file, old, new) -> None:
    before = {name: code_sha256(name) for name in ("train.py", "aggregate.py")}
    edit(scripts / file, old, new)
    assert code_sha256("train.py") != before["train.py"]
    assert code_sha256("aggregate.py") == before["aggregate.py"]


def test_a_clearer_message_costs_no_night_of_training(scripts) -> None:
    before = [code_sha256(name) for name in ("train.py", "evaluate.py")]
    edit(scripts / "manynodes" / "experiment" / "keys.py", "unknown key", "key unknown to us")
    edit(scripts / "manynodes" / "launching" / "gpus.py", "one per process", "one of each process")
    assert [code_sha256(name) for name in ("train.py", "evaluate.py")] == before


def test_the_modules_left_out_are_there() -> None:
    paths = [provenance.library_file(module) for module in provenance.NO_RESULT]
    assert all(path.is_file() or path.with_suffix("").is_dir() for path in paths)


def test_moving_a_module_does_not_count(scripts) -> None:
    before = code_sha256("train.py")
    (scripts / "classifier" / "pixels" / "batches.py").rename(
        scripts / "classifier" / "training" / "images.py"
    )
    for path in scripts.rglob("*.py"):
        moved = path.read_text().replace(
            "classifier.pixels.batches import", "classifier.training.images import"
        )
        path.write_text(
            moved.replace(
                "from classifier.pixels import batches",
                "from classifier.training import images as batches",
            )
        )
    assert code_sha256("train.py") == before


def test_code_in_a_package_below_a_package_counts(scripts) -> None:
    (scripts / "classifier" / "training" / "deep").mkdir()
    (scripts / "classifier" / "training" / "deep" / "factor.py").write_text("FACTOR = 1\n")
    edit(
        scripts / "classifier" / "training" / "steps.py",
        "import torch\n",
        "import torch\n\nfrom classifier.training.deep.factor import FACTOR\n",
    )
    before = code_sha256("train.py")
    edit(scripts / "classifier" / "training" / "deep" / "factor.py", "1", "2")
    assert code_sha256("train.py") != before


@pytest.mark.faults
@pytest.mark.parametrize("program", ["train.py", "evaluate.py"])
def test_every_module_that_a_program_imports_is_followed(scripts, program) -> None:
    """Every module that Python loads for it, except those left out, changes the hash."""
    code = (
        f"import sys, runpy; sys.argv = ['-']; sys.path.insert(0, {str(scripts)!r}); "
        f"runpy.run_path({str(scripts / program)!r})"
    )
    listed = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{code}; print(*sys.modules)",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    ours = [name for name in listed if name.partition(".")[0] in provenance.LIBRARIES]
    assert len(ours) > 20
    before = code_sha256(program)
    for module in ours:
        path = provenance.library_file(module)
        if path.is_file() and not provenance.is_no_result(module):
            path.write_text(path.read_text() + "\nADDED = 1\n")
            after = code_sha256(program)
            assert after != before, module
            before = after


def test_the_commit_and_whether_there_are_changes(scripts) -> None:
    assert provenance.git_state() == {"commit": None, "dirty": None}
    committed(scripts)
    clean = provenance.git_state()
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (scripts / "new.py").write_text("")
    assert provenance.git_state() == clean | {"dirty": True}


def test_a_program_s_repository_with_what_differs_from_its_commit(tmp_path: Path) -> None:
    assert provenance.repository_of(tmp_path) == {}
    program = tmp_path / "code/train.py"
    program.parent.mkdir()
    program.write_text("before\n")
    committed(tmp_path)
    clean = provenance.repository_of(program.parent)
    assert len(clean.pop("commit")) == 40
    assert clean == {"path": str(tmp_path), "dirty": False, "diff": ""}
    program.write_text("after\n")
    (tmp_path / "code/new.py").touch()
    found = provenance.repository_of(program.parent)
    assert found["dirty"] is True
    untracked, *diff = found["diff"].splitlines()
    assert untracked == "untracked: code/new.py"
    assert diff[-2:] == ["-before", "+after"]
    program.write_text("x" * 2_000_000)
    found = provenance.repository_of(program.parent)
    assert found["diff"].endswith("xxx\n(cut off)")
    assert 1_000_000 < len(found["diff"]) < 1_000_100


@pytest.fixture
def hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that a repository may name, which makes a file `ran` beside it. Some users trust
    all repositories, and git then runs whatever they name: the settings are no user's.
    """
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    program = tmp_path / "hook"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def of_user(tmp_path: Path) -> Path:
    """A repository with a program, with a change that is not committed."""
    folder = tmp_path / "mine"
    (folder / "code").mkdir(parents=True)
    (folder / "code/train.py").write_text("before\n")
    committed(folder)
    (folder / "code/train.py").write_text("after\n")
    return folder


def test_no_repository_is_taken_for_that_of_a_program_outside_of_it(
    of_user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named through `..` or a link, from a folder in that repository."""
    (tmp_path / "other").mkdir()
    (of_user / "linked").symlink_to(tmp_path / "other")
    monkeypatch.chdir(of_user / "code")
    for folder in ("../../other", "../linked"):
        assert provenance.repository_of(Path(folder)) == {}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other/code").symlink_to(of_user / "code")
    assert provenance.repository_of(Path("other/code"))["commit"] == commit_of(of_user)


def commit_of(folder: Path) -> str:
    command = ["git", "-c", "safe.directory=*", "-C", folder, "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("packed", [False, True])
def test_the_commit_of_a_program_is_known_without_git(
    of_user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    """Compute nodes may have none. In a worktree and a submodule, `.git` is a file."""
    commit, tree = commit_of(of_user), tmp_path / "tree"
    if packed:
        subprocess.run(["git", "-C", of_user, "pack-refs", "--all"], check=True)
    subprocess.run(["git", "-C", of_user, "worktree", "add", "-q", "-b", "x/y", tree], check=True)
    monkeypatch.setenv("PATH", "/nowhere")
    unknown = {"dirty": None, "diff": "", "unknown": "git: No such file or directory"}
    for folder in (of_user, tree):
        known = {"path": str(folder), "commit": commit}
        assert provenance.repository_of(folder / "code") == known | unknown
    assert provenance.repository_of(tmp_path) == {}
    for head in ("nonsense", "ref: refs/heads/none", "ref: ../../code/train.py"):
        (of_user / ".git/HEAD").write_text(head)
        found = provenance.repository_of(of_user)
        assert found == {"path": str(of_user), "commit": None} | unknown


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's repository")
def test_the_commit_of_somebody_else_s_program_is_known_and_runs_nothing(
    of_user: Path, tmp_path: Path, hook: Path
) -> None:
    commit = commit_of(of_user)
    subprocess.run(["git", "-C", of_user, "config", "core.fsmonitor", hook], check=True)
    give_away(of_user)
    found = provenance.repository_of(of_user / "code")
    assert (found["path"], found["commit"], found["dirty"]) == (str(of_user), commit, None)
    assert "dubious ownership" in found["unknown"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("hangs", "known"), [
    ("status", ("commit", "dirty", "diff")), ("diff", ("commit",)), ("rev-parse", ()),
])  # fmt: skip
def test_what_git_has_said_before_it_hangs_is_kept(
    of_user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: str, known: tuple
) -> None:
    git = shutil.which("git")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/git").write_text(
        f'#!/bin/sh\ncase "$*" in *{hangs}*) exec sleep 600 ;; esac\nexec {git} "$@"\n'
    )
    (tmp_path / "bin/git").chmod(0o755)
    complete = provenance.repository_of(of_user)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setattr(provenance, "GIT_TIMEOUT", 5)
    monkeypatch.setattr(provenance, "MOST_DIFF", 9)
    found = provenance.repository_of(of_user)
    assert found.pop("unknown") == "git does not answer within 5 s"
    nothing = {"path": str(of_user), "commit": None, "dirty": None, "diff": ""}
    # Whatever hangs, no more is kept than the record may have.
    complete["diff"] = f"{complete['diff'][:9]}\n(cut off)"
    assert found == nothing | {key: complete[key] for key in known}


def test_what_is_not_known_of_a_program_s_repository_is_told_and_recorded(
    of_user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, said = commit_of(of_user), list[str]()
    monkeypatch.setenv("PATH", "/nowhere")
    task = Task(("{python}", str(of_user / "code/train.py")), tmp_path / "run", {})
    assert begin(task, "", "exact", "process 1 on a", said.append)
    known = f"warning: the repository {of_user}: its changes are not recorded"
    assert said == [f"{known}: git: No such file or directory"]
    folders = Folders(task.output)
    for name in ("environment.json", "metrics.csv", "result.json"):
        (folders.run / name).touch()
    monkeypatch.chdir(of_user / "code")
    assert provenance.repository_of(Path())["path"] == str(of_user)
    run = about(folders, [], read_environment(folders))
    assert parse_form(json.dumps(run), "program_run")["repository"] == {
        "path": str(of_user), "commit": commit, "dirty": None,
        "unknown": "git: No such file or directory",
    }  # fmt: skip
    (row,) = Experiment.from_config({"experiment": "e", "command": ["ls"]}).runs.values()
    found = summary_row(row, Numbers(run, {}, pd.DataFrame(), None, {"run.json": ""}))
    assert found["program_commit"] == f"{commit[:10]} (changes unknown)"


def test_why_git_cannot_compare_is_told(of_user: Path) -> None:
    """As with a filter that is not installed here."""
    (of_user / ".gitattributes").write_text("*.py filter=none\n")
    for name, value in (("required", "true"), ("clean", "false")):
        subprocess.run(["git", "-C", of_user, "config", f"filter.none.{name}", value], check=True)
    found = provenance.repository_of(of_user)
    assert found["commit"] == commit_of(of_user)
    assert "clean filter 'none' failed" in found["unknown"]


def test_a_module_s_packages_are_a_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "pkg/sub").mkdir(parents=True)
    for name in ("pkg/__init__.py", "pkg/sub/__init__.py", "pkg/sub/train.py"):
        (tmp_path / name).write_text("")
    found = local_sources(tmp_path / "pkg/sub/train.py", tmp_path)
    assert set(found) == {"pkg/sub/train.py", "pkg/sub/__init__.py", "pkg/__init__.py"}


def test_imports_from_the_package_above_are_a_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "pkg/sub").mkdir(parents=True)
    (tmp_path / "train.py").write_text("from pkg.sub.mod import f")
    texts = {"mod": "from ..utils import g\nfrom .. import other\nfrom ...beyond import x"}
    for name in ("pkg/__init__", "pkg/sub/__init__", "pkg/sub/mod", "pkg/utils", "pkg/other"):
        (tmp_path / f"{name}.py").write_text(texts.get(Path(name).name, ""))
    found = local_sources(tmp_path / "train.py")
    assert {"pkg/utils.py", "pkg/other.py"} < set(found)
    assert len(found) == 6


@pytest.mark.parametrize("modules", [999, 1000])
def test_a_program_may_be_of_a_large_repository(tmp_path: Path, modules: int) -> None:
    names = [f"module_{number}" for number in range(modules)]
    (tmp_path / "train.py").write_text("".join(f"import {name}\n" for name in names))
    for name in names:
        (tmp_path / f"{name}.py").write_text("")
    if modules < 1000:
        assert len(local_sources(tmp_path / "train.py")) == 1000
    else:
        with pytest.raises(Refusal, match="more than 1000 files beside it; install them as a pack"):
            local_sources(tmp_path / "train.py")


def test_a_program_behind_a_link_imports_from_beside_its_file(tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common/train.py").write_text("import helper")
    (tmp_path / "common/helper.py").write_text("")
    (tmp_path / "train.py").symlink_to("common/train.py")
    words = ["{python}", str(tmp_path / "train.py")]
    before = words_sha256(words, other_python=False)
    (tmp_path / "common/helper.py").write_text("x = 1")
    assert words_sha256(words, other_python=False) != before


def test_another_python_may_know_more_syntax(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import helper\ntype X = int\ntype = \n")
    (tmp_path / "helper.py").write_text("")
    with pytest.raises(Refusal, match=r"train.py:[23]: "):
        local_sources(tmp_path / "train.py")
    assert list(local_sources(tmp_path / "train.py", other_python=True)) == [
        "train.py", "helper.py",
    ]  # fmt: skip


@pytest.fixture
def checkout(scripts: Path) -> Path:
    """A repository with the programs; of another user if the tests run as root."""
    folder = scripts.parents[1]
    committed(folder, "workflow")
    give_away(folder)
    return folder


def give_away(folder: Path) -> None:
    # Otherwise git itself has no objection.
    if os.geteuid() == 0:
        subprocess.run(["chown", "--recursive", "2000", folder], check=True)


def test_the_commit_of_somebody_else_s_checkout_is_known(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = (checkout / ".git/index").stat().st_ino
    (checkout / "workflow/scripts/train.py").touch()
    monkeypatch.setenv("GIT_DIR", str(checkout / "another"))
    assert len(provenance.git_state()["commit"]) == 40
    assert provenance.why_no_commit() is None
    # Nothing in it is written.
    assert (checkout / ".git/index").stat().st_ino == index


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's repository")
def test_a_repository_around_the_checkout_runs_no_program(
    checkout: Path, tmp_path: Path, hook: Path
) -> None:
    # As somebody could make it in /tmp, above what others unpack there.
    git = ["git", "-c", "safe.directory=*", "-C", checkout]
    subprocess.run([*git, "config", "core.fsmonitor", hook], check=True)
    (checkout / ".git").rename(checkout.parent / ".git")
    give_away(checkout.parent)
    assert provenance.git_state() == {"commit": None, "dirty": None}
    assert not (tmp_path / "ran").exists()


def test_what_git_says_instead_of_the_commit_is_told(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / ".git/HEAD").write_text("nonsense")
    assert str(provenance.why_no_commit()).startswith("fatal: not a git repository")
    monkeypatch.setenv("PATH", "/nowhere")
    assert provenance.why_no_commit() == "git: No such file or directory"


def test_the_commit_of_the_checkout_is_known_without_git(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"commit": commit_of(checkout), "dirty": None}
    monkeypatch.setenv("PATH", "/nowhere")
    assert provenance.git_state() == known


def test_a_file_may_say_its_encoding(tmp_path: Path) -> None:
    """Or begin with the mark that Windows' editors write."""
    (tmp_path / "train.py").write_bytes(b"\xef\xbb\xbfimport helper\n")
    (tmp_path / "helper.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe4'\n")
    found = local_sources(tmp_path / "train.py")
    assert found["train.py"] == "import helper\n"
    assert found["helper.py"].endswith("name = 'ä'\n")
    assert run_sources({"helper.py": found["helper.py"]}).name == "ä"
    (tmp_path / "helper.py").write_bytes(b"# -*- coding: rot13 -*-\n")
    with pytest.raises(Refusal, match=r"helper\.py is not a Python file"):
        local_sources(tmp_path / "train.py")
    (tmp_path / "helper.py").write_bytes(b"# -*- coding: none -*-\n")
    with pytest.raises(Refusal, match=r"helper\.py:1: .*encoding"):
        local_sources(tmp_path / "train.py")
