"""TensorBoard reads every point of a run once, whatever happened to the run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from manynodes.base.provenance import now
from manynodes.experiment.config import Experiment
from manynodes.programs.folders import Folders, note_start, prepare
from manynodes.reporting import events
from manynodes.reporting.events import Point, RunEvents, points_of
from programs import ROOT, program

CONFIG = {"experiment": "mine", "program": "t.py", "parameters": {"lr": [0.1, 0.2]}}


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """As TensorBoard reads them."""
    found = EventAccumulator(str(folder)).Reload()
    return [(event.step, round(event.value, 4)) for event in found.Scalars(tag)]


def test_a_run_that_grows_starts_again_and_is_written_over_has_each_point_once(
    tmp_path: Path,
) -> None:
    experiment = Experiment.from_config(CONFIG)
    run = tmp_path / "lr~0.1"
    (run / "work").mkdir(parents=True)
    metrics = run / "work/metrics.csv"

    def look(events: RunEvents) -> list[tuple[int, float]]:
        events.update(*points_of(experiment, tmp_path)[run.name])
        return scalars(run / "events", "loss")

    events = RunEvents(run / "events", {"lr": 0.1})
    metrics.write_text("epoch,loss\n1,0.9\n2,0.8\n3,0.")  # a row that is being written
    assert look(events) == [(1, 0.9), (2, 0.8)]
    metrics.write_text("epoch,loss\n1,0.9\n2,0.8\n3,0.7\n")
    assert look(events) == [(1, 0.9), (2, 0.8), (3, 0.7)]
    assert len(list((run / "events").iterdir())) == 1
    # Killed, and continued from the second epoch: its rows are there twice.
    metrics.write_text("epoch,loss\n1,0.9\n2,0.8\n3,0.7\n2,0.75\n3,0.65\n4,nan\n")
    assert look(events) == [(1, 0.9), (2, 0.75), (3, 0.65)]
    # The program that writes the files was killed, and is started again.
    again = RunEvents(run / "events", {"lr": 0.1})
    folders, values = Folders(run), json.loads(experiment.runs[run.name].to_json())
    request = {f"{key}_sha256": None for key in ("data", "files")}
    request |= {"sources_sha256": "", "directory": None}
    kept = metrics.read_text()
    prepare(folders, values, request, "fresh", {"by": "process 1", "started": now()})
    metrics.write_text(kept)
    for _ in range(2):
        note_start(folders)
    (folders.work / "result.json").write_text(json.dumps({"accuracy": 0.5}))
    assert program("publish", "--output", run).returncode == 0
    assert look(again) == [(1, 0.9), (2, 0.75), (3, 0.65)]
    assert scalars(run / "events", "result/accuracy") == [(4, 0.5)]
    found = EventAccumulator(str(run / "events")).Reload()
    assert "_hparams_/session_start_info" in found.summary_metadata


def said(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "workflow/scripts/events.py", *arguments]
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False,
        env=os.environ | variables,
    )  # fmt: skip


def points_of_table(results: Path, table: str) -> list[Point]:
    """Those of a run whose program has written this table."""
    run = results / "lr~0.1"
    (run / "work").mkdir(parents=True)
    (run / "work/metrics.csv").write_text(table)
    experiment = Experiment.from_config(CONFIG)
    return points_of(experiment, results)[run.name][0]


def test_fractions_of_an_epoch_are_points_of_their_own(tmp_path: Path) -> None:
    points = points_of_table(tmp_path, "epoch,loss\n0.5,4\n1,3\n1.5,2\n")
    assert points == [(1, "loss", 4), (2, "loss", 3), (3, "loss", 2)]


def test_rows_of_one_step_with_other_numbers_add_up(tmp_path: Path) -> None:
    """As of Lightning's CSVLogger; and an empty cell may have a blank."""
    points = points_of_table(tmp_path, "step,loss,val\n5,4,\n5,,3\n6, 2, \n6,y,1\n")
    assert points == [(5, "loss", 4), (5, "val", 3), (6, "loss", 2)]


def test_the_accuracy_on_the_test_images_is_of_the_published_epoch(tmp_path, monkeypatch) -> None:
    """With `best`, not of the last one."""
    experiment = Experiment.from_config({"experiment": "x", "dataset": {"name": "digits"}})
    (name,) = experiment.runs
    (tmp_path / name).mkdir()
    (tmp_path / name / "metrics.csv").write_text("epoch,val_loss\n1,4\n2,3\n3,5\n")
    found = SimpleNamespace(about={"metrics": {"epoch": 2}}, evaluation={"accuracy": 1, "loss": 0})
    monkeypatch.setattr(events, "read_finished", lambda *_: found)
    points, _ = points_of(experiment, tmp_path)[name]
    assert points[-2:] == [(2, "accuracy/test", 1), (2, "loss/test", 0)]


def test_damaged_rows_and_waiting_runs_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "experiment.json").write_text(json.dumps(CONFIG))
    (tmp_path / "lr~0.1/work").mkdir(parents=True)
    (tmp_path / "lr~0.1/work/metrics.csv").write_text("step,loss\nx,1\n1,2\n2,y\n1e999,3\n")
    done = said("--once", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 of 2 runs: ")
    assert scalars(tmp_path / "lr~0.1/events", "loss") == [(1, 2.0)]


@pytest.mark.parametrize("missing", [True, False])
def test_mistakes_are_told_in_one_line(tmp_path: Path, missing: bool) -> None:
    (tmp_path / "tensorboard.py").write_text("raise ImportError\n")
    if missing:
        done = said("--once", tmp_path / "nowhere")
        line = "experiment.json is not there"
    else:
        (tmp_path / "experiment.json").write_text(json.dumps(CONFIG))
        (tmp_path / "lr~0.1/work").mkdir(parents=True)
        (tmp_path / "lr~0.1/work/metrics.csv").write_text("step,loss\n1,2\n")
        done = said("--once", tmp_path, PYTHONPATH=str(tmp_path))
        line = "tensorboard is not installed here; pip install tensorboard"
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    assert line in done.stderr
