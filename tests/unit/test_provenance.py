"""The hash of the code: deaf to comments, alert to everything that computes."""

import shutil
import subprocess
from pathlib import Path

import pytest

from ddp import provenance
from programs import SCRIPTS


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = Path(shutil.copytree(SCRIPTS, tmp_path / "scripts"))
    monkeypatch.setattr(provenance, "SCRIPTS", folder)
    return folder


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_comments_docstrings_and_formatting_do_not_count(scripts) -> None:
    before = provenance.code_sha256("train.py")
    edit(scripts / "train.py", '"""Train one run', '# a comment\n"""Teach one run')
    edit(
        scripts / "ddp" / "batches.py",
        "    return batch.tensor_split(world_size)[rank]",
        "    return (batch . tensor_split( world_size ) [rank])  # so",
    )
    edit(scripts / "ddp" / "models.py", "Write weights and description", "Put weights and description")
    assert provenance.code_sha256("train.py") == before


@pytest.mark.parametrize(("file", "old", "new"), [
    ("ddp/steps.py", "label_smoothing=run.label_smoothing", "label_smoothing=0.0"),
    ("ddp/batches.py", "(coin + epoch) % 2", "(coin + epoch) % 3"),
    ("ddp/networks.py", ".flatten(1)) / 9", ".flatten(1)) / 8"),
    ("ddp/process_group.py", "dist.all_reduce(tensor)", "dist.broadcast(tensor, 0)"),
])  # fmt: skip
def test_what_computes_counts_wherever_it_is(scripts, file, old, new) -> None:
    before = {name: provenance.code_sha256(name) for name in ("train.py", "plot.py")}
    edit(scripts / file, old, new)
    assert provenance.code_sha256("train.py") != before["train.py"]
    assert provenance.code_sha256("plot.py") == before["plot.py"]


def test_a_clearer_message_costs_no_night_of_training(scripts) -> None:
    before = provenance.code_sha256("train.py")
    edit(scripts / "ddp" / "schema.py", "unknown key", "key unknown to us")
    assert provenance.code_sha256("train.py") == before


def test_the_modules_left_out_are_there() -> None:
    assert all((SCRIPTS / "ddp" / f"{name}.py").is_file() for name in provenance.NO_RESULT)


def test_the_commit_and_whether_there_are_changes(scripts) -> None:
    assert provenance.git_state() == {"commit": None, "dirty": None}
    git = ["git", "-C", str(scripts), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    clean = provenance.git_state()
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (scripts / "new.py").write_text("")
    assert provenance.git_state() == clean | {"dirty": True}
