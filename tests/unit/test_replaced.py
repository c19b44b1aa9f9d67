"""Results that another training is to replace are never lost, whenever it is ended."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from manynodes.checkpointing import replaced
from programs import program


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    for name in ("model.safetensors", "run.json", "metrics.csv", "checkpoints/epoch=001"):
        (tmp_path / name).write_text(f"old {name}")
    return tmp_path


def remove_as_snakemake_does(run: Path) -> None:
    for name in ("model.safetensors", "run.json", "metrics.csv", "checkpoints/epoch=001"):
        (run / name).unlink()
    (run / "checkpoints").rmdir()


def entries(run: Path) -> dict[str, str]:
    return {
        str(path.relative_to(run)): path.read_text() for path in run.rglob("*") if path.is_file()
    }


def test_results_are_put_back_if_nothing_replaces_them(run: Path) -> None:
    before = entries(run)
    replaced.set_aside(run)
    remove_as_snakemake_does(run)
    (run / "metrics.csv").write_text("new")
    assert replaced.put_back(run)
    assert entries(run) == before
    assert not replaced.put_back(run)


def test_a_program_that_begins_where_they_were_put_back_leaves_them(run: Path) -> None:
    """As after `snakemake --unlock` and a dry run while its job was starting."""
    words = ["{python}", "-c", "raise SystemExit(3)"]
    assert program("launch", "--launcher", "none", "--output", run, "--", *words).returncode == 1
    remove_as_snakemake_does(run)
    assert replaced.put_back(run)
    assert (run / "model.safetensors").read_text() == "old model.safetensors"


def test_they_are_gone_when_the_other_training_has_finished(run: Path) -> None:
    replaced.set_aside(run)
    remove_as_snakemake_does(run)
    (run / "run.json").write_text("new")
    # As if it had been ended before `forget`.
    assert not replaced.put_back(run)
    assert entries(run) == {"run.json": "new"}


def test_they_stay_while_the_other_training_has_yet_to_begin(run: Path) -> None:
    before = entries(run)
    replaced.set_aside(run)
    assert not replaced.put_back(run)
    remove_as_snakemake_does(run)
    assert replaced.put_back(run)
    assert entries(run) == before


def test_a_link_in_place_of_the_folder_is_not_followed(run: Path, tmp_path_factory) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "run.json").write_text("of somebody else")
    remove_as_snakemake_does(run)
    (run / replaced.FOLDER).symlink_to(other)
    assert not replaced.put_back(run)
    assert entries(other) == {"run.json": "of somebody else"}


@pytest.mark.parametrize("calls", range(8))
def test_wherever_putting_back_is_ended_it_can_be_done_again(
    run: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    before = entries(run)
    replaced.set_aside(run)
    remove_as_snakemake_does(run)
    left = calls

    def limited(real):
        def move(*arguments):
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            return real(*arguments)

        return move

    with monkeypatch.context() as patch:
        for name in ("rename", "replace"):
            patch.setattr(os, name, limited(getattr(os, name)))
        with suppress(KeyboardInterrupt):
            replaced.put_back(run)
    replaced.put_back(run)
    assert entries(run) == before


def test_what_could_not_be_removed_of_earlier_ones_does_not_count(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system keeps a file that is open, under a name of its own."""
    before = entries(run)
    (run / replaced.FOLDER).mkdir()
    (run / replaced.FOLDER / ".nfs0001").touch()
    assert not replaced.has_kept(run)
    replaced.set_aside(run)
    assert entries(run / replaced.FOLDER) == before
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        replaced.forget(run)
    assert not replaced.has_kept(run)
    replaced.set_aside(run)
    remove_as_snakemake_does(run)
    assert replaced.put_back(run)
    assert entries(run) == before


def test_a_folder_that_was_not_completely_set_aside_does_not_count(run: Path) -> None:
    before = entries(run)
    (run / "replaced.new").mkdir()
    (run / "replaced.new/run.json").write_text("half")
    replaced.set_aside(run)
    assert entries(run / replaced.FOLDER) == before
