"""What a user's program may leave: tables and numbers in many shapes; files and links."""

import importlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer import event_file_writer
from tensorboard.summary.writer.event_file_writer import EventFileWriter as FileWriter

import watch
from manynodes.base.errors import Refusal
from manynodes.checkpointing import incidents, replaced
from manynodes.checkpointing.owner import acquire
from manynodes.data.files import below, collect, fingerprint, read_files
from manynodes.experiment.command import apart, filled, unseen
from manynodes.experiment.config import Experiment
from manynodes.experiment.keys import keys_of
from manynodes.experiment.table import with_table
from manynodes.launching.agents import Output, Stop, run_all
from manynodes.programs import attempt
from manynodes.programs.folders import (
    Folders,
    differences,
    is_run,
    note_start,
    of_another_launch,
    prepare,
    read_request,
    starts_of,
)
from manynodes.programs.outputs import publish
from manynodes.programs.rank import rows_of
from manynodes.programs.task import Task
from manynodes.programs.user_numbers import (
    MOST_LINE,
    LogRows,
    collected,
    metrics_of,
    note_anew,
    read_user_metrics,
    read_user_result,
)
from manynodes.reporting import difference, measures, page
from manynodes.reporting.events import points_of
from manynodes.reporting.measures import (
    Result,
    columns_of,
    numbers_of,
    parse_result,
    read_measured,
    read_result,
    write_result,
)
from manynodes.reporting.metrics import newest, read_metrics, rows_so_far, write_metrics
from manynodes.reporting.numbers import not_finite
from manynodes.reporting.numbers import read as read_numbers
from manynodes.reporting.numbers import tables as tables_of
from manynodes.reporting.progress import read_all, read_record
from manynodes.reporting.results import changed, same
from manynodes.schedulers.base import Command
from programs import ABOUT, ROOT, finished


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("", []),
        ("epoch,loss\n1,0.5\n2,0.4\n", [(1, 0.5), (2, 0.4)]),
        # Without its last end of line; with a mark of the byte order and blanks.
        ("epoch,loss\n1,0.5\n2,0.4", [(1, 0.5), (2, 0.4)]),
        ("\ufeffepoch, loss\n1, 0.5\n", [(1, 0.5)]),
        # Interrupted: half a line, a second header, rows again.
        ("epoch,loss\n1,0.5\n2", [(1, 0.5)]),
        ("epoch,loss\n1,0.5\n2,0.9\nepoch,loss\n2,0.4\n3,0.3\n", [(1, 0.5), (2, 0.4), (3, 0.3)]),
    ],
)
def test_rows_count_once(tmp_path: Path, text: str, rows: list) -> None:
    (tmp_path / "metrics.csv").write_text(text)
    assert [tuple(row.values()) for row in read_metrics(tmp_path / "metrics.csv")] == rows


def test_a_later_row_replaces_only_what_it_has(tmp_path: Path) -> None:
    """As of a program that writes training and validation one after the other."""
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,loss,val\n1,3,\n1,,4\n2,2,\n2,,3\n2,nan,\n")
    first, second = read_metrics(path)
    assert first == {"epoch": 1, "loss": 3, "val": 4}
    assert (math.isnan(second["loss"]), second["val"]) == (True, 3)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("epoch,loss\n1,tensor(0.5)\n", 'row 2: "tensor(0.5)" is not a number'),
        ("1,0.5\n2,0.4\n", "its first line has numbers; it must name every column"),
        ("epoch,epoch\n1,2\n", "must name every column, each once"),
        ("epoch,loss\n1,2,3\n4,5\n", "row 2 has 3 cells, not 2"),
        ("epoch,loss\n,3\n4,5\n", "row 2 has no epoch"),
        ("epoch;loss\n1;0,5\n", 'has ";" between its columns, and no comma; write commas'),
        ("epoch\tloss\n1\t0.5\n", "between its columns, and no comma; write commas"),
    ],
)
def test_other_tables_are_refused(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "metrics.csv").write_text(text)
    with pytest.raises(Refusal, match=line.replace("(", r"\(").replace(")", r"\)")):
        read_metrics(tmp_path / "metrics.csv")


def test_a_result_that_is_not_finite_is_one(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text('{"NaN, loss": NaN, "a": -Infinity, "b": 1}')
    found = read_result(path).numbers
    assert found["b"] == 1
    assert math.isnan(found["a"])
    assert math.isnan(found["NaN, loss"])
    write_result(path, Result(found, None))
    assert json.loads(path.read_text()) == {"NaN, loss": None, "a": None, "b": 1.0}
    assert '"b": 1\n' in path.read_text()
    path.write_text('{"note": "loss was NaN, so it stopped", "a":NaN, "b": 2}')
    assert read_result(path).texts == {"note": "loss was NaN, so it stopped"}
    # As exp(loss) of a training that diverged; JSON has no largest whole number.
    path.write_text('{"a": 1e308, "b": -1' + "0" * 400 + "}")
    assert [math.isnan(value) for value in read_result(path).numbers.values()] == [True, True]


def test_two_numbers_of_one_name_have_two_names_everywhere(tmp_path: Path) -> None:
    """As in summary.csv: the training's own accuracy is not that of the evaluation."""
    config = {"evaluate": "e.py", "parameters": {"lr": [1, 2]}}
    written = [{"accuracy": 0.93, "lr": 1}]
    folder = finished(tmp_path / "mine", config, written, evaluations=[{"accuracy": 0.71}])
    experiment = read_record(folder)
    found = read_measured(experiment, folder / "lr~1").numbers
    columns = columns_of(experiment.axes, [found])
    assert {columns[of]: value for of, value in found.items()} == {
        "accuracy": 0.93, "lr (result)": 1, "accuracy (evaluated)": 0.71,
    }  # fmt: skip
    rows: list[dict[str, float | None]] = [{"epoch": 1, "seconds": 3}]
    newest_ones = numbers_of(Result({}, None), Result({}, None), rows)
    assert newest_ones == {("newest", "seconds"): 3}
    assert [*columns_of([], [newest_ones]).values()] == ["seconds (newest)"]


MATRIX = {"confusion_matrix": [[1, 0], [0, 1]]}
# Each first number is of the training of the first run, the second of what the other has instead.
UNLIKE: dict[str, tuple[list[dict], list[dict], list[str], str]] = {
    "evaluated": (
        [{"accuracy": 0.9} | MATRIX, {}],
        [{"accuracy": 0.75}, {"accuracy": 0.5, "confusion_matrix": [[1, 1], [0, 1]]}],
        [""], "accuracy",
    ),
    "newest": ([{"loss": 0.5}, {}], [], ["", "epoch,loss\n1,4\n2,3\n"], "loss"),
}  # fmt: skip


@pytest.mark.parametrize("origin", UNLIKE)
def test_a_name_means_the_same_in_all_runs_wherever_it_is_read(tmp_path: Path, origin: str) -> None:
    """A run that has not written the number does not lend its name to another one."""
    results, evaluations, metrics, key = UNLIKE[origin]
    config = {"parameters": {"lr": [1, 2]}} | ({"evaluate": "e.py"} if evaluations else {})
    folder = finished(tmp_path / "mine", config, results, evaluations=evaluations, metrics=metrics)
    experiment = read_record(folder)
    tables = tables_of(experiment, read_numbers(experiment, experiment.runs, folder))
    summary, other = tables["summary"].set_index("lr"), f"{key} ({origin})"
    assert summary[key].notna().tolist() == [True, False]
    assert summary[other].notna().tolist() == [bool(evaluations), True]
    value = summary[other][2]
    assert read_all(experiment, folder)[1].numbers == f"{other} {value:g}"
    if evaluations:
        # That of the training is of other images, although it has more of them right.
        assert tables["confusion"]["run"].unique().tolist() == ["lr~2"]
        points, _ = points_of(experiment, folder)["lr~2"]
        assert (0, f"result/{other}", value) in points
    # Compared with an experiment that has only the second of these numbers.
    alone = finished(tmp_path / "alone", config, [{}] * 2, evaluations=evaluations[1:],
                     metrics=metrics[-1:])  # fmt: skip
    both = {key: value} if origin == "newest" else {}  # which stands in for a result, too
    one, _ = difference.read(alone, folder)
    assert one.numbers["lr~1"] == {other: value, "seconds": 1} | both
    assert one.elsewhere == {key: origin}
    assert difference.read(alone)[0].numbers["lr~1"] == {key: value, "seconds": 1}


def test_what_runs_have_written_is_read_once(tmp_path: Path, monkeypatch) -> None:
    """At each look; a confusion matrix may be large."""
    config = {"parameters": {"lr": [1, 2]}, "evaluate": "e.py"}
    folder = finished(tmp_path / "mine", config, [{"a": 1}] * 2, evaluations=[{"b": 1}])
    experiment, files, read = read_record(folder), [], measures.read_bytes
    monkeypatch.setattr(measures, "read_bytes", lambda *args: files.append(args[0]) or read(*args))
    for look in (
        lambda: read_all(experiment, folder),
        lambda: read_numbers(experiment, experiment.runs, folder),
        lambda: points_of(experiment, folder),
        lambda: difference.read(folder),
    ):
        files.clear()
        look()
        assert len(files) == len({*files}) == 4


def test_what_there_is_to_say_of_numbers_is_a_reason(tmp_path: Path) -> None:
    """Which `watch` shows whole, with its remedy."""
    config = {"parameters": {"lr": [1, 2, 3]}}
    folder = finished(tmp_path / "mine", config, [{}, {"a": 1}, {"a": 2}])
    (folder / "lr~2/result.json").unlink()
    found = read_all(read_record(folder), folder)
    assert [each.numbers for each in found] == ["", "", "a 2"]
    assert found[0].reason.endswith("where they are, if it has any; then add --config replace=true")
    assert "/lr~2/result.json cannot be read" in found[1].reason
    assert found[2].reason == ""
    shown = io.StringIO()
    console = Console(file=shown, width=80, height=24)
    console.print(watch.view("mine", found, console))
    for each in found[:2]:
        assert each.reason.replace(" ", "") in "".join(shown.getvalue().split())


def test_an_infinite_last_row_is_that_of_a_training_that_diverged(tmp_path: Path) -> None:
    """As null in a result: neither the largest number nor a part of a mean."""
    rows = [f"epoch,loss\n1,2\n2,{last}\n" for last in ("1", "inf", "-1e400")]
    config = {"parameters": {"lr": [1, 2, 3]}}
    folder = finished(tmp_path / "mine", config, [{}] * 3, metrics=rows)
    experiment = read_record(folder)
    runs = read_numbers(experiment, experiment.runs, folder)
    assert not_finite(runs) == {"lr~2": ["loss"], "lr~3": ["loss"]}
    summary = tables_of(experiment, runs)["summary"]
    assert summary["loss"].isna().tolist() == [False, True, True]
    assert page.between(summary, "loss") == "loss 1 (1 of 3 runs)"


def test_the_module_refuses_at_once_what_is_no_number(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "workflow/modules")
    monkeypatch.setenv("LAUNCH_RESULTS", str(tmp_path))
    launched = importlib.reload(importlib.import_module("launched"))
    import torch

    launched.row(epoch=1, loss=torch.tensor(0.5))
    launched.row(epoch=2, loss=0.25)
    launched.row(epoch=2, loss=0.125)
    assert (tmp_path / "metrics.csv").read_text() == "epoch,loss\n1,0.5\n2,0.125\n"
    with pytest.raises(ValueError, match="counts epoch, this row counts step"):
        launched.row(step=3)
    with pytest.raises((TypeError, ValueError)):
        launched.row(epoch=3, loss="low")
    launched.results = tmp_path / "other"
    launched.row(loss=0.5, epoch=1)
    with pytest.raises(ValueError, match="loss goes back while epoch goes on; give epoch first"):
        launched.row(loss=0.25, epoch=2)
    launched.results = tmp_path / "some"
    launched.row(iter=100, loss=0.5)
    launched.row(iter=100, epoch=1, val=0.25)
    assert (tmp_path / "some/metrics.csv").read_text() == "iter,epoch,val\n100,1,0.25\n"
    launched.results = tmp_path
    launched.result(ok=True, loss=float("nan"))
    assert read_result(tmp_path / "result.json").numbers["ok"] == 1


IN_FORKED = """
import multiprocessing, sys, time
import numpy as np
import launched

child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True)
child.start()
child.terminate()
child.join()
target = launched.state / "last.npy"
for number in (1, 2):
    launched.save(target, lambda path, number=number: np.save(path, np.full(3, number)))
    assert np.load(target).tolist() == [number] * 3
try:
    launched.save(launched.state / "last", lambda path: np.save(path, np.ones(3)))
except ValueError as error:
    print(error)
print([path.name for path in launched.state.iterdir()])
"""


def test_the_module_leaves_children_alone_and_saves_whole_files(tmp_path) -> None:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "workflow/modules"), "LAUNCH_STATE": str(tmp_path / "state"),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", IN_FORKED], env=environment, capture_output=True, text=True,
        check=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "last was to be written, and last.npy was; numpy adds .npy to a path: give it a name that "
        "ends so",
        "['last.npy']",
    ]


def test_children_that_are_spawned_can_be_ended(tmp_path) -> None:
    """They import the main module again, and `launched` with it."""
    program = tmp_path / "spawns.py"
    program.write_text(
        "import multiprocessing, time\n"
        "import launched, os, signal\n"
        "def ends():\n"
        "    assert not launched.stop_requested()\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    assert launched.stop_requested()\n"
        "if __name__ == '__main__':\n"
        "    method = multiprocessing.get_context('spawn')\n"
        "    method.Process(target=time.sleep, args=(1000,), daemon=True).start()\n"
        "    with method.Pool(1) as pool:\n"
        "        print(pool.map(abs, [-1]))\n"
        # A rank that the program starts itself may be told to stop.
        "    rank = method.Process(target=ends)\n"
        "    rank.start()\n"
        "    rank.join()\n"
        "    print(rank.exitcode)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "workflow/modules")}
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[1]\n0\n"


def test_files_are_found_behind_links_and_a_loop_ends(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/a").write_text("a")
    (tmp_path / "d").mkdir()
    (tmp_path / "d/b").write_text("b")
    (tmp_path / "d/train").symlink_to("../real")
    (tmp_path / "d/up").symlink_to(".")
    collect([tmp_path / "d"], tmp_path / "out", "x-files")
    found = read_files(tmp_path / "out")
    assert set(found.manifest["files"]) == {"d/b", "d/train/a"}
    assert found.damaged_files() == []
    before = fingerprint([tmp_path / "d"])
    (tmp_path / "real/a").write_text("aa")
    assert fingerprint([tmp_path / "d"]) != before
    with pytest.raises(Refusal, match="absent is not there"):
        fingerprint([tmp_path / "absent"])
    (tmp_path / "d/again").symlink_to("../real")
    assert {name for name, _ in below(tmp_path / "d")} == {"b", "train/a", "again/a"}
    (tmp_path / "d/out").symlink_to("..")
    with pytest.raises(Refusal, match="d/out leads to a folder above .*; remove it"):
        fingerprint([tmp_path / "d"])
    # There would be no such folder on a scratch.
    (tmp_path / "empty/too").mkdir(parents=True)
    with pytest.raises(Refusal, match="files: .*empty has no file; fill the folder, or leave it"):
        fingerprint([tmp_path / "empty"])


def test_a_file_that_is_not_given_any_more_is_not_found_either(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    collect([tmp_path / "a", tmp_path / "b"], tmp_path / "out", "x-files")
    collect([tmp_path / "a"], tmp_path / "out", "x-files")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"a", "manifest.json"}
    assert (tmp_path / "out/a").read_text() == "a"
    assert (tmp_path / "b").read_text() == "b"


def test_outputs_are_published_as_what_they_are(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    (folders.work / "ck").mkdir(parents=True)
    (folders.work / "ck/e3.pt").write_text("3")
    (folders.work / "last.pt").symlink_to("ck/e3.pt")
    publish(folders, ["last.pt", "ck/"])
    assert (folders.outputs / "last.pt").read_text() == "3"
    assert not (folders.outputs / "last.pt").is_symlink()
    assert (folders.outputs / "ck/e3.pt").read_text() == "3"
    for wrong, line in (("ck", "write ck/ in"), ("last.pt/", "write last.pt"), ("x", "is not in")):
        with pytest.raises(Refusal, match=line):
            publish(folders, [wrong])


def test_a_program_that_goes_on_does_not_write_into_what_is_published(tmp_path: Path) -> None:
    folders, began = Folders(tmp_path), {"started": "2026-01-01T00:00:00+00:00"}
    asked = {"sources_sha256": "a", "data_sha256": None, "files_sha256": None, "directory": None}
    prepare(folders, {}, asked, "exact", began)
    (folders.work / "ck").mkdir()
    written = {"m.txt": folders.work / "m.txt", "last.pt": folders.saved / "last.pt",
               "ck/a.pt": folders.work / "ck/a.pt"}  # fmt: skip
    for path in written.values():
        path.write_text("old")
    (folders.work / "last.pt").symlink_to(folders.saved / "last.pt")
    os.utime(folders.work / "m.txt", ns=(1, 1))
    publish(folders, ["m.txt", "last.pt", "ck/"])
    (folders.run / "run.json").write_text("{}")
    replaced.set_aside(folders.run)
    shutil.rmtree(folders.outputs)
    assert prepare(folders, {}, asked, "exact", began)
    assert (folders.work / "m.txt").stat().st_mtime_ns == 1
    for path in written.values():
        assert path.read_text() == "old"
        path.write_text("new")
    (folders.run / "run.json").unlink()
    assert replaced.put_back(folders.run)
    assert {name: (folders.outputs / name).read_text() for name in written} == dict.fromkeys(
        written, "old"
    )


def test_links_of_outputs_lead_to_outputs(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    (folders.work / "ck").mkdir(parents=True)
    (folders.work / "ck/e3.pt").write_text("3")
    (folders.work / "ck/best.pt").symlink_to(folders.work / "ck/e3.pt")
    publish(folders, ["ck/"])
    (folders.work / "ck/e3.pt").unlink()
    assert (folders.outputs / "ck/best.pt").read_text() == "3"
    (folders.work / "other").mkdir()
    (folders.work / "other/a.pt").write_text("a")
    (folders.work / "ck/other").symlink_to("../other")
    (folders.work / "ck/up").symlink_to("..")
    (folders.work / "other/back").symlink_to("../ck")
    (folders.saved / "step_3").mkdir(parents=True)
    (folders.saved / "step_3/a.pt").write_text("saved")
    (folders.work / "ck/saved").symlink_to("../../state/saved/step_3")
    (folders.work / "ck/.big.pt.x.unfinished").mkdir()
    publish(folders, ["ck/"])
    assert sorted(path.name for path in (folders.outputs / "ck").iterdir()) == [
        "best.pt", "other", "saved", "up",
    ]  # fmt: skip
    shutil.rmtree(folders.work)
    # The next training saves others there.
    shutil.rmtree(folders.saved)
    assert (folders.outputs / "ck/saved/a.pt").read_text() == "saved"
    assert (folders.outputs / "ck/other/a.pt").read_text() == "a"
    assert (folders.outputs / "ck/up").is_symlink()


def test_half_a_line_in_the_middle_is_named_or_left_out(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(
        '{"step": 1, "loss": 2}\n{"step": 2, "lo{"step": 2, "loss": 1}\n'
    )
    rows = read_user_metrics(tmp_path, "m.jsonl")
    assert rows == [{"step": 1, "loss": 2}, {"step": 2, "loss": 1}]
    (tmp_path / "m.jsonl").write_text('{"step": 1, "loss": 2}\nstep 2\n')
    with pytest.raises(Refusal, match="m.jsonl: line 2 is no JSON object; remove it"):
        read_user_metrics(tmp_path, "m.jsonl")
    (tmp_path / "m.csv").write_text("step,loss\n1,2\n2,1.22,1.2\n")
    with pytest.raises(Refusal, match="m.csv: line 3 has more cells than the first; remove it"):
        read_user_metrics(tmp_path, "m.csv")


def test_a_confusion_matrix_is_kept_beside_the_numbers(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text('{"accuracy": 0.5, "confusion_matrix": [[1, 0], [1, 0]]}')
    found = read_result(path)
    assert found == Result({"accuracy": 0.5}, (["0", "1"], [[1, 0], [1, 0]]))
    write_result(path, found)
    assert read_result(path) == found
    for matrix, names in (("[[1], [2]]", '["a", "b"]'), ("[[1, 0], [0, 1]]", '["a"]'),
                          ("[[1, 0], [0, -1]]", '["a", "b"]')):  # fmt: skip
        path.write_text(f'{{"confusion_matrix": {matrix}, "class_names": {names}}}')
        with pytest.raises(Refusal, match=r"is not a JSON object of numbers \("):
            read_result(path)


def test_the_same_file_has_the_same_result_by_the_key(tmp_path: Path) -> None:
    """A loss that is null has diverged; another program's lists may be anything."""
    path = tmp_path / "result.json"
    path.write_text(
        '{"loss": null, "name": "adam", "confusion_matrix": [[1, 0], [1, 0]], '
        '"class_names": ["cat", "dog"]}'
    )
    found = parse_result(read_user_result(tmp_path, "result.json"), path)
    assert found.confusion == (["cat", "dog"], [[1, 0], [1, 0]])
    assert str(found) == str(read_result(path))
    # What is null and no such number may be a text elsewhere.
    path.write_text('{"loss": 2, "trial_name": null}')
    assert parse_result(read_user_result(tmp_path, "result.json"), path) == Result(
        {"loss": 2}, None
    )
    for matrix in ("[[0.5, 0.5], [1, 0]]", "[[1], [2]]", "null", '"see the log"', "{}"):
        path.write_text(f'{{"loss": 2, "sizes": [3], "confusion_matrix": {matrix}}}')
        assert parse_result(read_user_result(tmp_path, "result.json"), path) == Result(
            {"loss": 2}, None
        )


@pytest.mark.parametrize("resume", ["exact", "anyway", "fresh"])
@pytest.mark.parametrize(
    "mine",
    ["state/metrics.csv", "state/finished", "state/incidents.jsonl", "state/environment.json",
     "state/owner.json", "state/printed/1.log", "state/started/a", "state/notes/a", "evaluation/a",
     "outputs/a"],
)  # fmt: skip
def test_what_is_of_no_run_is_not_removed(tmp_path: Path, mine: str, resume: str) -> None:
    folders = Folders(tmp_path / "run")
    path = folders.run / mine
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(Refusal, match="there is of no run; give a folder of its own"):
        is_run(folders, resume)


def test_a_run_whose_first_attempt_was_ended_early_is_one(tmp_path: Path) -> None:
    """Before anything but its owner and what interrupted it was noted."""
    folders = Folders(tmp_path / "run")
    with acquire(folders.state, "process 1 on a", print):
        pass
    incidents.add(folders.state, incidents.INTERRUPTION, "ended")
    for folder in folders.emptied:
        folder.mkdir(parents=True)
    assert not is_run(folders, "exact")
    (folders.state / "environment.json").touch()
    with pytest.raises(Refusal, match=r"run: state/environment\.json there is of no run"):
        is_run(folders, "exact")
    folders.request.touch()
    assert is_run(folders, "exact")


def test_a_job_continues_its_own_state_with_fresh_and_no_other_s(tmp_path: Path) -> None:
    """It would start over after each requeue."""
    folders = Folders(tmp_path)

    def begin(by: str, resume: str, requeued: bool = False) -> bool:
        task = Task(("./train",), tmp_path, {}, token=by)
        attempt.begin(task, "a", resume, by, print, requeued)
        continues = (folders.saved / "state").exists()
        (folders.saved / "state").write_text("")
        return continues

    assert not begin("PBS job 7 run 1", "fresh")
    assert begin("PBS job 7 run 2", "fresh", requeued=True)
    # The same command once more, such as in an interactive job.
    assert not begin("PBS job 7 run 2", "fresh")
    assert not begin("PBS job 8.site run 2", "fresh", requeued=True)
    # Submitted again, it has another id.
    assert begin("PBS job 8.site, now 9.site run 1", "fresh", requeued=True)
    assert begin("process 1 on a", "exact")
    assert not of_another_launch(folders, "process 1 on a")
    assert of_another_launch(folders, "PBS job 8 run 2")
    folders.request.unlink()
    assert not of_another_launch(folders, "PBS job 8 run 2")


def test_a_state_belongs_to_what_it_was_made_by(tmp_path: Path) -> None:
    folders, attempt = Folders(tmp_path), {"started": "2026-01-01T00:00:00+00:00"}
    before = {
        "lr": 0.1, "sources_sha256": "a", "data_sha256": None, "files_sha256": None,
        "directory": None,
    }  # fmt: skip
    assert not prepare(folders, before, before, "exact", attempt)
    # Nothing was written: whatever changes, there is nothing to protect.
    assert not prepare(folders, before, before | {"lr": 0.2}, "exact", attempt)
    assert not prepare(folders, before, before, "exact", attempt)
    (folders.saved / "state").write_text("")
    assert prepare(folders, before, before, "exact", attempt)
    now = before | {"lr": 0.2, "sources_sha256": "b"}
    with pytest.raises(Refusal, match=r"lr was 0.1 and is 0.2, the sources changed; undo that"):
        prepare(folders, now, now, "exact", attempt)
    assert prepare(folders, now, now, "anyway", attempt)
    assert (folders.saved / "state").exists()
    assert not prepare(folders, now, now, "fresh", attempt)
    assert not (folders.saved / "state").exists()
    (folders.saved / "state").write_text("")
    folders.finished.touch()
    assert not prepare(folders, before, before, "exact", attempt)
    assert not (folders.saved / "state").exists()
    assert differences(before, before) == ""


def begin_again(run: Path, sources: str, said: list[str], snapshots: list[str]) -> bool:
    """Begin an attempt of a program with these sources."""
    task = Task(("./train",), run, {}, reads={"snapshots": snapshots}, token=sources)
    return attempt.begin(task, sources, "exact", "process 1 on a", said.append)


def test_a_run_that_saved_nothing_starts_over_if_its_program_changes(tmp_path: Path) -> None:
    """As after each repair of a program that failed when only a framework had written its log."""
    folders, said = Folders(tmp_path / "run"), list[str]()
    assert begin_again(folders.run, "a", said, ["ck/*.pt"])
    for number in (1, 2):
        (folders.work / "run.log").write_text(f"log {number}")
        folders.printed.mkdir(exist_ok=True)
        for left in (folders.metrics, folders.spoiled, folders.printed / "1.log"):
            left.write_text("of before")
        note_start(folders)
        incidents.add(folders.state, incidents.INTERRUPTION, "ended")
        assert begin_again(folders.run, f"b{number}", said, ["ck/*.pt"])
        # Nothing of it is lost: the pattern may be wrong.
        assert (folders.earlier / f"{number}/run.log").read_text() == f"log {number}"
        assert not any(folders.work.iterdir())
        left = (folders.metrics, folders.spoiled, folders.printed, folders.starts)
        assert not any(path.exists() for path in left)
        assert not incidents.read(folders.state)
        assert len(read_request(folders)["attempts"]) == 1
        assert said.pop().startswith(
            "starts over: the sources changed, and nothing is saved, or named in snapshots; "
        )
    # The same program goes on where it was.
    (folders.work / "run.log").write_text("log 3")
    assert begin_again(folders.run, "b2", said, ["ck/*.pt"])
    assert (folders.work / "run.log").read_text() == "log 3"
    folders.finished.touch()
    assert begin_again(folders.run, "b2", said, ["ck/*.pt"])
    assert not folders.earlier.exists()


@pytest.mark.parametrize(
    "left",
    ["work/ck/1.pt", "state/saved/last.pt", "state/saved/ck ->", "state/ended", "no snapshots"],
)
def test_what_a_changed_program_could_continue_from_is_kept(tmp_path: Path, left: str) -> None:
    folders, said = Folders(tmp_path / "run"), list[str]()
    snapshots = [] if left == "no snapshots" else ["ck/*.pt"]
    begin_again(folders.run, "a", said, snapshots)
    (folders.work / "run.log").write_text("log")
    path = folders.run / left.removesuffix(" ->")
    if left.endswith("->"):
        path.symlink_to(tmp_path)
    elif snapshots:
        path.parent.mkdir(exist_ok=True)
        path.write_text("a night's work")
    where = "work" if left in ("work/ck/1.pt", "no snapshots") else "state"
    remedy = "fresh, or anyway to keep it" if where == "work" else "anyway or "
    line = rf"run/{where} is of another run: the sources changed; undo that, .* resume={remedy}"
    with pytest.raises(Refusal, match=line):
        begin_again(folders.run, "b", said, snapshots)
    assert (folders.work / "run.log").read_text() == "log"
    assert path.is_symlink() or path.exists() == bool(snapshots)
    assert not folders.earlier.exists()


def test_what_was_saved_under_an_earlier_name_is_kept(tmp_path: Path) -> None:
    folders, said = Folders(tmp_path / "run"), list[str]()
    begin_again(folders.run, "a", said, ["last.pt"])
    (folders.work / "last.pt").write_text("a night's work")
    with pytest.raises(Refusal, match="is of another run: the sources changed; undo that"):
        begin_again(folders.run, "b", said, ["out/last.pt"])
    # The pattern may have been changed before.
    assert begin_again(folders.run, "a", said, ["lsat.pt"])
    with pytest.raises(Refusal, match="is of another run: the sources changed; undo that"):
        begin_again(folders.run, "b", said, ["lsat.pt"])
    # Of an earlier version nothing is known of them.
    folders.snapshots.unlink()
    with pytest.raises(Refusal, match="is of another run: the sources changed; undo that"):
        begin_again(folders.run, "b", said, ["out/last.pt"])
    assert (folders.work / "last.pt").exists()
    # What lies there may be no patterns.
    folders.snapshots.write_text(json.dumps(["a**b", "/*.pt", "", "\0"]))
    assert begin_again(folders.run, "b", said, ["out/last.pt"])
    assert (folders.earlier / "1/last.pt").read_text() == "a night's work"


def test_a_program_that_left_no_file_has_ended_for_the_same_request(tmp_path: Path) -> None:
    folders, said = Folders(tmp_path), list[str]()

    def begins(word: str, resume: str = "exact") -> bool:
        task = Task(("./train", word), tmp_path, {})
        ended = attempt.has_ended(task, "a")
        began = attempt.begin(task, "a", resume, "process 1 on a", said.append)
        if began:
            folders.ended.write_text("2026-01-01T00:00:00+00:00")
        assert resume != "exact" or began == (not ended)
        return began

    assert begins("one")
    assert not begins("one")
    assert not begins("one", "anyway")
    assert begins("one", "fresh")
    assert begins("other")
    assert not begins("other")
    folders.request.write_text("damaged")
    assert begins("other")
    # Its results are published, and are to be replaced.
    folders.finished.touch()
    assert begins("other")


def test_validation_that_comes_late_shares_columns_with_the_training(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 1 / step, "elapsed": step} for step in range(10, 101, 10)]
    for at in (40, 20):
        rows.insert(at // 10 + 1, {"step": at, "val_loss": 0.5, "elapsed": at + 12})
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_user_metrics(tmp_path, "m.jsonl")
    assert [row["step"] for row in found if row["val_loss"] is not None] == [20, 40]
    assert len(found) == 10


def test_what_changed_is_told_in_whole_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, others = ["python", "{here}/../exp/a.py"], {"data_sha256": None, "files_sha256": None}
    before = {"command": words, "sources_sha256": "a", "directory": None}
    now = {"command": [*words, "--launcher", "pytorch"], "sources_sha256": "b", "directory": "x"}
    added = 'command was "nothing" and is "--launcher pytorch"'
    all_three = f'{added}, the sources changed, directory was null and is "x"'
    assert differences(before, now, 110) == all_three
    assert differences(before, now, 85) == f"{added}, the sources changed and 1 more"
    assert differences(before, now, 62) == f"{added} and 2 more"
    assert differences(before, now, 40) == "command changed and 2 more"
    long = {"command": [*words, "--data", "/a/long/path/of/another/folder"], "directory": "y" * 99}
    for most in (40, 62, 85, 120):
        for one, other in ((before, now), (before, before | long), (before | long, now)):
            told = differences(one, other, most)
            assert len(told) <= most
            assert told.count('"') % 2 == 0
    monkeypatch.chdir(tmp_path)
    began = {"started": "2026-01-01T00:00:00+00:00"}
    told = (
        r'command was "nothing" and is "--launcher pytorch"(, the sources changed)? and [12] more'
    )
    for run in ("results/experiment/run", tmp_path / ("x" * 60)):
        folders = Folders(Path(run))
        for left, resume in ((folders.work, "fresh, or anyway to"), (folders.saved, "anyway or ")):
            prepare(folders, {}, before | others, "fresh", began)
            (left / "file").write_text("")
            line = rf"of another run: {told}; undo that, or add --config resume={resume}"
            with pytest.raises(Refusal, match=line):
                prepare(folders, {}, now | others, "exact", began)


@pytest.mark.parametrize(
    "attempts",
    ["[]", "[{}]", "[1]", '[{"started":"2024"}]', '[{"started":"2024-99-99T00:00:00+00:00"}]'],
)
def test_a_state_with_a_damaged_request_is_kept(tmp_path: Path, attempts: str) -> None:
    folders = Folders(tmp_path)
    folders.saved.mkdir(parents=True)
    state = folders.saved / "state"
    state.write_text("a night's work")
    attempt = {"started": "2026-01-01T00:00:00+00:00"}
    request = '{"sources_sha256":"","data_sha256":null,"files_sha256":null,"directory":null}'
    folders.request.write_text(f'{{"run":{{}},"request":{request},"attempts":{attempts}}}')
    asked = {"directory": None}
    with pytest.raises(Refusal, match=r"request\.json cannot be read .*resume=anyway continues"):
        prepare(folders, {}, asked, "exact", attempt)
    assert state.exists()
    assert prepare(folders, {}, asked, "anyway", attempt)
    assert state.exists()
    folders.request.unlink()
    with pytest.raises(Refusal, match=r"request\.json cannot be read"):
        prepare(folders, {}, asked, "exact", attempt)
    assert not prepare(folders, {}, asked, "fresh", attempt)
    assert not state.exists()
    # The program has ended, and its results are only checked again.
    folders.request.write_text("damaged")
    state.write_text("a night's work")
    folders.ended.write_text(attempt["started"])
    assert prepare(folders, {}, json.loads(request), "anyway", attempt)
    assert [each["started"] for each in read_request(folders)["attempts"]] == [attempt["started"]]
    folders.ended.unlink()
    good = '[{"started":"2024-01-01T00:00:00+00:00"}]'
    folders.request.write_text(f'{{"run":{{}},"request":{request},"attempts":{good}}}')
    assert read_request(folders)["attempts"] == [{"started": "2024-01-01T00:00:00+00:00"}]


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("{lr}", "0.1"),
        ("--flag={on}", "--flag=true"),
        ('{"a":{"b":1}}', '{"a":{"b":1}}'),
        ("{{lr}}", "{lr}"),
        ("{a: {lr}}", "{a: 0.1}"),
        ("--lr={none}", "--lr=null"),
    ],
)
def test_only_names_in_braces_are_replaced(word: str, wanted: str) -> None:
    # A word that is nothing but the name of a null is left out.
    assert filled([word, "{none}"], {"lr": 0.1, "on": True, "none": None}) == [wanted]
    with pytest.raises(Refusal, match="data} is not there; give dataset"):
        filled(["{data}"], {"data": None})


@pytest.mark.parametrize(
    "text",
    [
        "import launched\nseed = launched.parameters()['seed']\n",
        "from launched import (\n    parameters,\n)\n",
        "import os, launched as l\nseed = l.parameters()['seed']\n",
        "import os\npath = os.environ['LAUNCH_PARAMETERS']\n",
    ],
)
def test_a_parameter_that_does_not_reach_the_program_is_seen(tmp_path: Path, text: str) -> None:
    file, beside, shell = (tmp_path / name for name in ("train.py", "settings.py", "run.sh"))
    words = ["{python}", str(file), "--lr={lr}"]
    file.write_text("import settings\n")
    # What nearly every PyTorch program has.
    beside.write_text("import launched\noptimizer = SGD(model.parameters(), lr)\n")
    assert unseen([words], ["lr", "seed"]) == ["seed"]
    assert unseen([words], ["lr", "seed"], directory="{state}/{seed}") == []
    assert unseen([words, ["{python}", "e.py", "{seed}"]], ["lr", "seed"]) == []
    assert unseen([words], ["seed"], setup="export SEED=$(jq .seed $LAUNCH_PARAMETERS)") == []
    assert unseen([["sh", "-c", "x"]], ["lr"]) == []
    shell.write_text('"$@" --seed $(jq .seed $LAUNCH_PARAMETERS)')
    assert unseen([["bash", str(shell), *words]], ["seed"]) == []
    beside.write_text(text)
    assert unseen([words], ["lr", "seed"]) == []


def program(**keys: object) -> Experiment:
    return Experiment.from_config({"experiment": "test"} | keys)


def test_parameters_and_keys_are_axes() -> None:
    experiment = program(
        program="t.py", arguments=["{lr}", 5], parameters={"lr": [0.1, 0.2]}, nodes=[1, 2]
    )
    assert list(experiment.runs) == [
        "nodes~1_lr~0.1", "nodes~1_lr~0.2", "nodes~2_lr~0.1", "nodes~2_lr~0.2",
    ]  # fmt: skip
    run = experiment.runs["nodes~2_lr~0.1"]
    assert run.command == ("{python}", "{here}/t.py", "{lr}", "5")
    assert run.values["lr"] == 0.1
    paired = program(program="t.py", runs=[{"lr": 1, "nodes": 1}, {"lr": 2, "nodes": 2}])
    assert list(paired.runs) == ["nodes~1_lr~1", "nodes~2_lr~2"]


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"parameters": {"seconds": 3}}, "parameters.seconds: has a meaning of its own"),
        ({"files": ["a/manifest.json"]}, "is manifest.json"),
        ({"files": ["failure.json"]}, "is failure.json, which is ours; "),
        ({"files": [".source"]}, "is .source, which is ours; "),
        ({"files": ["a/x", "b/x"]}, "is there twice"),
        ({"files": [".."]}, 'files: ".." has no name'),
        ({"arguments": ["{a:{zz}}"]}, "{zz} stands for nothing"),
        ({"runs": [{"l r": 1}]}, '"l r" is not a name of letters'),
        ({"parameters": {True: 1}}, "parameters: true is not a name of letters"),
        ({"outputs": ["a", "a/"]}, "are the same, or one is inside the other"),
        ({"outputs": ["a/b", "a"]}, "are the same, or one is inside the other"),
        ({"outputs": ["c*.pt"]}, '"c*.pt" is not a path inside the results folder'),
        ({"arguments": ["{data}"]}, "{data} stands for nothing; give dataset"),
        ({"arguments": ["{files}"]}, "{files} stands for nothing; give files"),
        ({"arguments": ["{file}"]}, "{file} stands for nothing; did you mean {files}?"),
        ({"directory": "{stat}"}, "directory: {stat} stands for nothing; did you mean {state}?"),
        ({"arguments": ["{outputs}"]}, "{outputs} stands for nothing; it is for evaluate"),
        (
            {"snapshots": ["{results}/*.pt"]},
            "{results} is not filled in here; the path",
        ),
        ({"evaluate": ["e.py", "{state}"]}, "{state} stands for nothing; an evaluation has"),
    ],
)
def test_what_would_be_lost_is_refused(keys: dict, line: str) -> None:
    with pytest.raises(Refusal) as refused:
        program(program="t.py", **keys)
    assert line in str(refused.value)


@pytest.mark.parametrize("where", ["runs", "search", "table"])
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("launcher", "{}.launcher: is no axis; give it beside program, or one value in parameters"),
        ("timeout", "{}.timeout: is no axis; give it beside program"),
        ("arguments", "{}.arguments: is no axis; give it beside program"),
        ("node", "{}.node: did you mean nodes? If not, name {{node}} in arguments, or give one"),
        ("gpus", "{}.gpus: did you mean nproc_per_node?"),
        ("launchr", "{}.launchr: did you mean launcher?"),
        ("release", ""),
        ("lr", ""),
    ],
)
def test_what_varies_together_is_no_other_key_of_ours(
    tmp_path: Path, where: str, name: str, line: str
) -> None:
    (tmp_path / "runs.csv").write_text(f"{name}\n1\n2\n")
    rows = {"runs": {"runs": [{name: 1}, {name: 2}]}, "table": {"runs": "runs.csv"},
            "search": {"search": {"runs": 2, name: [1, 2]}}}[where]  # fmt: skip
    given = {"experiment": "test", "program": "t.py"} | rows
    word = {"arguments": [f"--x={{{name}}}"]}
    for more, taken in (
        ({}, not line),
        # An own parameter that is nearly a key is told apart by a word, any by `parameters`.
        (word, "no axis" not in line),
        ({"parameters": {name: 3}}, True),
        (word | {"parameters": {name: 3}}, True),
    ):
        if taken:
            found = Experiment.from_files(given | more, [tmp_path])
            assert {str(run.parameters[name]) for run in found.runs.values()} == {"1", "2"}
            continue
        with pytest.raises(Refusal) as refused:
            Experiment.from_files(given | more, [tmp_path])
        kind = "search" if where == "search" else "runs"
        assert str(refused.value).startswith(f"config: {line.format(kind)}")
        assert len(str(refused.value)) <= 200
    # Results of an earlier version can be read.
    if where == "runs":
        assert Experiment.from_config(given, reading=True).runs


def test_texts_that_name_something_stay_texts(tmp_path: Path) -> None:
    config = {
        "experiment": "test", "program": "t.py",
        "parameters": {"subject": ["01", "10"], "release": "1.10", "hash": "12e4567",
                       "other": "12345e7",
                       "rate": "1e-3", "seeds": ["0", "1"], "on": "true"},
        "seed": "1e3", "nodes": "2",
    }  # fmt: skip
    run = Experiment.from_config(keys_of(config).with_types(config)).runs["subject~01_seeds~1"]
    assert run.parameters == {
        "subject": "01", "release": "1.10", "hash": "12e4567", "other": "12345e7",
        "rate": 0.001, "seeds": 1, "on": True,
    }  # fmt: skip
    assert json.dumps([run.seed, run.nodes]) == "[1000, 2]"
    # What a spreadsheet writes: fractions with a trailing zero, and rows of empty cells.
    table = tmp_path / "runs.csv"
    table.write_text("subject,rate,nodes\n01,0.10,1\n10,0.05,2\n,,\n")
    given = {"experiment": "test", "program": "t.py", "runs": str(table)}
    runs = Experiment.from_config(with_table(given, [], keys_of(given))).runs
    assert [(run.parameters, run.nodes) for run in runs.values()] == [
        ({"subject": "01", "rate": 0.1}, 1),
        ({"subject": "10", "rate": 0.05}, 2),
    ]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["{python}"], "python"),
        (["{python}", "-u", "missing.py"], "python"),
        (["{solver}", "x"], "solver"),
        (["bash", "-c", "sleep 1; " * 60], "bash"),
        (["-x"], "x"),
    ],
)
def test_any_command_has_a_name(words: list[str], name: str) -> None:
    experiment = program(command=words, parameters={"solver": ["./a", "./b"]})
    assert experiment.program_name == name
    assert experiment.sources_sha256 == ""


def test_a_parameter_more_or_less_is_a_change(tmp_path: Path) -> None:
    run = program(program="t.py", parameters={"lr": 0.1}).runs["run"]
    path = tmp_path / "run.json"
    about = ABOUT | {"config": json.loads(run.to_json())}
    path.write_text(json.dumps(about))
    for parameters, change in (
        ({"lr": 0.1}, []),
        ({"lr": 0.2}, ["lr 0.1 -> 0.2"]),
        ({"lr": 0.1, "wd": 0.01}, ["wd not given -> 0.01"]),
        ({}, ["lr 0.1 -> not given"]),
    ):
        (run,) = program(program="t.py", parameters=parameters).runs.values()
        assert changed(path, run) == change
    # One of an earlier version is protected too.
    path.write_text(json.dumps(about | {"newer": 1}))
    assert changed(path, run) == ["run.json is damaged, or not of this version"]


def test_numbers_that_are_too_large_to_draw_are_infinite(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,loss\n1,1e308\n2,-1e308\n3,nan\n4,2\n")
    assert [row["loss"] for row in read_metrics(path)][:2] == [math.inf, -math.inf]
    path.write_text("epoch,loss\n1e308,1\n")
    with pytest.raises(Refusal, match="has no epoch"):
        read_metrics(path)


def test_tables_in_the_form_of_others_become_rows(tmp_path) -> None:
    """As of Lightning, with rows of their own for training and validation; of timm; of Trainer."""
    (tmp_path / "version_0").mkdir()
    (tmp_path / "version_0/metrics.csv").write_text(
        "epoch,step,train_loss,val_loss,time\n0,9,0.5,,a\n0,9,,0.75,b\n1,19,0.25,,c\n"
    )
    rows = read_user_metrics(tmp_path, "version_*/metrics.csv")
    assert list(rows[0]) == ["step", "epoch", "train_loss", "val_loss"]
    assert [row["step"] for row in rows] == [9, 19]
    assert (rows[0]["train_loss"], rows[0]["val_loss"]) == (0.5, 0.75)
    assert rows[1]["val_loss"] is None
    (tmp_path / "rows.jsonl").write_text('{"epoch": 1, "loss": NaN}\n{"epoch": 2, "loss": 1}\n{"ep')
    rows = read_user_metrics(tmp_path, "rows.jsonl")
    assert math.isnan(rows[0]["loss"])
    assert rows[1] == {"epoch": 2, "loss": 1}
    # A checkpoint that is removed while we look.
    (tmp_path / "state-0.json").symlink_to("removed")
    state = {"log_history": [{"step": 1, "loss": 0.5}, {"step": 1, "eval_loss": 0.75}]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert read_user_metrics(tmp_path, "state*.json#log_history") == [
        {"step": 1, "loss": 0.5, "eval_loss": 0.75}
    ]
    writer = FileWriter(str(tmp_path / "runs"))
    for step, value in ((1, 0.5), (2, 0.25)):
        scalar = Summary(value=[Summary.Value(tag="train/loss", simple_value=value)])
        writer.add_event(Event(step=step, wall_time=0, summary=scalar))
    writer.close()
    assert read_user_metrics(tmp_path, {"tensorboard": "runs"}) == [
        {"step": 1, "train/loss": 0.5}, {"step": 2, "train/loss": 0.25},
    ]  # fmt: skip
    # An attempt after it, and two at once.
    for name, start in (("at/b", 0), ("at/a", 10), ("of/train", 0), ("of/validation", 0.5)):
        writer = FileWriter(str(tmp_path / name))
        for step in (1, 2):
            scalar = Summary(value=[Summary.Value(tag="loss", simple_value=start + step)])
            writer.add_event(Event(step=step, wall_time=start + step, summary=scalar))
        writer.close()
    assert read_user_metrics(tmp_path, {"tensorboard": "at"}, [(0, 0), (5, 5)]) == [
        {"step": 1, "loss": 11}, {"step": 2, "loss": 12},
    ]  # fmt: skip
    assert read_user_metrics(tmp_path, {"tensorboard": "of"})[0] == {
        "step": 1, "train/loss": 1, "validation/loss": 1.5,
    }  # fmt: skip
    (tmp_path / "ended.jsonl").write_text('{"epoch": 1, "loss": 2}\n{"epoch": 2, "loss": 1}')
    assert [row["loss"] for row in read_user_metrics(tmp_path, "ended.jsonl")] == [2, 1]
    (tmp_path / "anew.csv").write_text("epoch,iter,loss\n1,50,3\n1,99,2\n2,50,1\n2,99,1\n")
    with pytest.raises(Refusal, match="metrics: iter begins anew in each epoch"):
        read_user_metrics(tmp_path, "anew.csv")
    (tmp_path / "log.txt").write_text('{"epoch": 1, "loss": 2}\n{"epoch": 2, "loss": 1}\n')
    assert [row["loss"] for row in read_user_metrics(tmp_path, "log.txt")] == [2, 1]
    # pandas' own index has no name; a loss counts nothing.
    (tmp_path / "history.csv").write_text(",loss,acc\n0,0.9,0.1\n1,0.5,0.3\n2,0.41,0.91\n")
    rows = read_user_metrics(tmp_path, "history.csv")
    assert [(row["row"], row["loss"], row["acc"]) for row in rows][-1] == (3, 0.41, 0.91)
    (tmp_path / "capital.csv").write_text("time,Epoch,loss\n9,1,3\n5,2,2\n7,3,1\n")
    assert list(read_user_metrics(tmp_path, "capital.csv")[0]) == ["epoch", "time", "loss"]
    (tmp_path / "round.csv").write_text("round,loss,val\n1,3,\n1,,4\n2,2,\n2,,3\n3,1,\n3,,2\n")
    rows = read_user_metrics(tmp_path, "round.csv")
    assert [(row["round"], row["loss"], row["val"]) for row in rows][1:] == [(2, 2, 3), (3, 1, 2)]
    (tmp_path / "cut.json").write_text('{"epoch": 1, "loss": 2')
    with pytest.raises(Refusal, match="cut.json"):
        read_user_metrics(tmp_path, "cut.json")
    (tmp_path / "same.csv").write_text("epoch,step,loss\n1,500,3\n2,500,2\n3,500,1\n")
    with pytest.raises(Refusal, match="metrics: step begins anew in each epoch"):
        read_user_metrics(tmp_path, "same.csv")
    (tmp_path / "again.csv").write_text("epoch,loss\n0,1.5\n1,N/A\nepoch,loss\n2,1.25\n")
    rows = read_user_metrics(tmp_path, "again.csv")
    assert [(row["epoch"], row["loss"]) for row in rows if row["epoch"] != 1] == [
        (0, 1.5), (2, 1.25),
    ]  # fmt: skip
    assert rows[1]["loss"] is None
    assert newest(rows) == {"loss": 1.25}
    (tmp_path / "named.csv").write_text("name,score\nalpha,1\n1e5,2\n")
    assert [list(row) for row in read_user_metrics(tmp_path, "named.csv")] == 2 * [
        ["score", "name"]
    ]
    (tmp_path / "per.csv").write_text('epoch,acc,rate\n1,50%,"1,234"\n2,60%,"2,345"\n')
    assert list(read_user_metrics(tmp_path, "per.csv")[1].values()) == [2, 60, 2345]
    (tmp_path / "error.tsv").write_text("iter\tRMSE\n0\t1.5\n1\t1.25\n")  # of CatBoost
    assert read_user_metrics(tmp_path, "error.tsv")[1] == {"iter": 1, "RMSE": 1.25}
    (tmp_path / "comma.tsv").write_text("iter\tRMSE\n0\t1,5\n")
    with pytest.raises(Refusal, match="comma.tsv: line 2: 1,5 may have a decimal comma"):
        read_user_metrics(tmp_path, "comma.tsv")
    (tmp_path / "semi.csv").write_text("epoch;acc\n1;0,5\n")
    (tmp_path / "twice.csv").write_text("epoch,epoch,loss\n1,2,0.5\n")
    with pytest.raises(Refusal, match='twice.csv has two columns "epoch"; rename one'):
        read_user_metrics(tmp_path, "twice.csv")
    with pytest.raises(Refusal, match='semi.csv has ";" between its columns, and no comma'):
        read_user_metrics(tmp_path, "semi.csv")
    (tmp_path / "bare.csv").write_text("0,2.5\n1,2\n")
    (tmp_path / "texts.csv").write_text("a,b\nx,y\n")
    for given in (
        "texts.csv",
        "bare.csv",
        "no.csv",
        "state.json#nowhere",
        "state.json",
        {"tensorboard": "version_0"},
    ):
        with pytest.raises(Refusal, match="correct the key metrics|names its columns"):
            read_user_metrics(tmp_path, given)


def test_the_lines_of_a_log_are_read_again_with_corrected_expressions(tmp_path: Path) -> None:
    """The training has ended; an expression that matches nothing is not passed over."""
    printed = tmp_path / "state/printed"
    printed.mkdir(parents=True)
    # The second start went on from epoch 1.
    (printed / "000001.log").write_text("epoch 1 loss 0.5\nother\nepoch 2 loss 9\nepoch 3 loss 9\n")
    (printed / "000002.log").write_text("epoch 2 loss 0.25\n")
    (tmp_path / "state/metrics.csv").write_text("epoch,other\n1,7\n")
    right = {"log": r"epoch (?P<epoch>\d+) loss (?P<loss>\S+)"}
    assert metrics_of(tmp_path, right) == [{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": 0.25}]
    (tmp_path / "state/metrics.csv").write_text("epoch,loss\n9,9\n")
    assert metrics_of(tmp_path, right) == [{"epoch": 9, "loss": 9}]
    with pytest.raises(Refusal, match="no line of .*printed/.*log matches"):
        metrics_of(tmp_path, {"log": r"Epoch (?P<epoch>\d+) (?P<accuracy>\d+)"})
    with pytest.raises(Refusal, match='the group word matches "loss", which is no number'):
        metrics_of(tmp_path, {"log": r"epoch (?P<epoch>\d+) (?P<word>\w+)"})
    of_steps = {"log": r"step (?P<step>\d+) epoch (?P<epoch>\d+) loss (?P<loss>\S+)"}
    for numbers, anew in ((((1, 1), (2, 1), (3, 2), (3, 2)), False),
                          (((1, 1), (2, 1), (1, 2), (2, 2)), True)):  # fmt: skip
        lines = [f"step {step} epoch {epoch} loss {epoch}\n" for step, epoch in numbers]
        (printed / "000002.log").write_text("".join(lines))
        with pytest.raises(Refusal, match="step begins anew") if anew else nullcontext():
            assert [row["step"] for row in metrics_of(tmp_path, of_steps)] == [1, 2, 3]


def test_rows_by_an_expression_that_was_corrected_since_are_not_kept(tmp_path: Path) -> None:
    """Its groups have the same names: the training's loss would stand in one column with that of
    the validation.
    """
    folders = Folders(tmp_path)
    folders.printed.mkdir(parents=True)
    wrong = {"log": r"epoch (?P<epoch>\d+) train (?P<loss>\S+)"}
    right = {"log": r"epoch (?P<epoch>\d+) .* val (?P<loss>\S+)"}
    text = "epoch 1 train 9 val 1\nepoch 2 train 8 val 0.5\n"
    (folders.printed / "000001.log").write_text(text)
    rows = collected(folders, wrong)
    for line in text.splitlines():
        rows.take(line)
    rows.write()
    assert [row["loss"] for row in metrics_of(tmp_path, wrong)] == [9, 8]
    assert [row["loss"] for row in metrics_of(tmp_path, right)] == [1, 0.5]
    # The next attempt goes on after epoch 2.
    rows = collected(folders, right)
    assert [row["loss"] for row in read_metrics(folders.metrics)] == [1, 0.5]
    rows.take("epoch 3 train 7 val 0.25")
    rows.write()
    assert [row["loss"] for row in metrics_of(tmp_path, right)] == [1, 0.5, 0.25]
    # A launch that was killed has kept no log of the last one.
    assert [row["loss"] for row in collected(folders, right).in_order] == [1, 0.5, 0.25]


def test_rows_by_an_earlier_key_are_not_taken_for_those_of_another(tmp_path: Path) -> None:
    """Two tables and the lines of a log may have columns of the same names."""
    folders = Folders(tmp_path)
    for folder in (folders.work, folders.printed):
        folder.mkdir(parents=True)
    (folders.work / "old.csv").write_text("epoch,loss\n1,9\n2,8\n")
    (folders.work / "metrics.csv").write_text("epoch,loss\n1,0.5\n2,0.25\n")
    (folders.printed / "000001.log").write_text("epoch 1 loss 4\nepoch 2 loss 3\n")
    log = {"log": r"epoch (?P<epoch>\d+) loss (?P<loss>\S+)"}
    losses = {"old.csv": [9, 8], "log": [4, 3], "": [0.5, 0.25]}
    keys = {"old.csv": "old.csv", "log": log, "": None}
    for before, now in permutations(keys, 2):
        for name in (before, now):
            # The next attempt has the other key; or the results are only read again.
            rows = rows_of(Task(("./train",), tmp_path, {}, reads={"metrics": keys[name]}), folders)
            assert (rows is None) == (name != "log")
            found = [metrics_of(tmp_path, keys[each]) for each in (name, now)]
            assert [[row["loss"] for row in each] for each in found] == [losses[name], losses[now]]
            if name:
                write_metrics(folders.metrics, found[0])
            so_far = read_metrics(rows_so_far(tmp_path))
            assert [row["loss"] for row in so_far] == losses[name]
    # What a finished run has published counts, whatever is beside it.
    write_metrics(tmp_path / "metrics.csv", metrics_of(tmp_path, log))
    assert read_metrics(rows_so_far(tmp_path)) == metrics_of(tmp_path, log)


def test_a_count_that_begins_anew_is_refused_with_and_without_epochs(tmp_path: Path) -> None:
    """Most rows would be lost, and the last number be one of an epoch before."""
    folders = Folders(tmp_path)
    folders.printed.mkdir(parents=True)
    folders.work.mkdir()
    numbers = [(step, 4.75 - at / 4) for at, step in enumerate([1, 2, 3, 4] * 2 + [1, 2])]
    of_log = {"log": r"iter (?P<iter>\d+)/4 loss (?P<loss>\S+)"}
    log = folders.printed / "000001.log"
    log.write_text("".join(f"iter {step}/4 loss {loss}\n" for step, loss in numbers))
    with pytest.raises(Refusal, match="iter begins anew in each epoch"):
        metrics_of(tmp_path, of_log)
    # A summary at the end says nothing new, or has one line; a restart has a log of its own.
    log.write_text("iter 1/4 loss 3\niter 2/4 loss 2\niter 1/4 loss 3\niter 2/4 loss 9\n")
    (folders.printed / "000002.log").write_text("iter 1/4 loss 5\niter 2/4 loss 4\n")
    assert [row["loss"] for row in metrics_of(tmp_path, of_log)] == [5, 4]
    for count, given in (("step", None), ("step", "metrics.csv"), ("batch", "metrics.csv")):
        lines = [f"{step},{loss}\n" for step, loss in numbers]
        (folders.work / "metrics.csv").write_text(f"{count},loss\n" + "".join(lines))
        with pytest.raises(Refusal, match=f"{count} begins anew in each epoch"):
            metrics_of(tmp_path, given)


def started(run: Path, starts: int) -> Folders:
    """The folders of a program that was started so often."""
    folders = Folders(run)
    folders.work.mkdir()
    for _ in range(starts):
        note_start(folders)
    return folders


@pytest.mark.parametrize(("starts", "rows", "kept"), [
    # A summary at the end, or of three; a loss spike, after which the program has gone back.
    (2, [*range(10), 3], 10), (1, [*range(10), 9, 8, 7], 10), (1, [*range(6), *range(3, 10)], 10),
    # A restart that goes on.
    (2, [0, 1, 2, 3, 4, 5, 3, 4], 5),
])  # fmt: skip
def test_a_row_that_goes_back_alone_is_no_restart(
    tmp_path: Path, starts: int, rows: list[int], kept: int
) -> None:
    folders = started(tmp_path, starts)
    lines = "".join(f"{epoch},{at}\n" for at, epoch in enumerate(rows))
    (folders.work / "metrics.csv").write_text(f"epoch,loss\n{lines}")
    assert [row["epoch"] for row in metrics_of(tmp_path, "metrics.csv")] == [*range(kept)]


@pytest.mark.parametrize(("starts", "steps", "kept"), [
    # It logs every ten steps since its start, and goes on from 25, or from 5 and 25.
    (2, [10, 20, 30, 40, 50, 35, 45], [0, 1, 2, 5, 6]),
    (3, [10, 20, 30, 40, 15, 25, 35, 45, 55, 35, 45], [0, 4, 5, 9, 10]),
    # No start is known, or it has told of itself already.
    (1, [10, 20, 30, 40, 50, 35, 45], [0, 1, 2, 5, 3, 6, 4]),
    # A test of six batches, or rows that are late; the program may have started again unseen.
    (2, [10, 20, 30, 40, 3, 6, 9, 12, 15, 18], [4, 5, 6, 0, 7, 8, 9, 1, 2, 3]),
    (2, [10, 20, 50, 30, 40, 60], [0, 1, 3, 4, 2, 5]),
])  # fmt: skip
def test_a_start_may_have_other_counts_than_the_one_before(
    tmp_path: Path, starts: int, steps: list[int], kept: list[int]
) -> None:
    folders = started(tmp_path, starts)
    lines = "".join(f"{step},{at}\n" for at, step in enumerate(steps))
    (folders.work / "metrics.csv").write_text(f"step,loss\n{lines}")
    assert [row["loss"] for row in metrics_of(tmp_path, "metrics.csv")] == kept
    (folders.work / "m.jsonl").write_text("".join(
        json.dumps({"step": step, "loss": at}) + "\n" for at, step in enumerate(steps)
    ))  # fmt: skip
    assert [row["loss"] for row in metrics_of(tmp_path, "m.jsonl")] == kept


def test_a_step_that_is_the_same_in_every_epoch_is_refused(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    folders.printed.mkdir(parents=True)
    lines = [f"[0/9] epoch {epoch} loss {1 / epoch:.4f}\n" for epoch in range(1, 5)]
    (folders.printed / "000001.log").write_text("".join(lines))
    with pytest.raises(Refusal, match="step begins anew in each epoch"):
        metrics_of(
            tmp_path,
            {"log": r"\[(?P<step>\d+)/9\] epoch (?P<epoch>\d+) loss (?P<loss>\S+)"},
        )


def test_rows_of_an_abandoned_start_are_left_out(tmp_path: Path) -> None:
    """It had written five steps, and saved after the second; the next start ends after the 4th."""
    folders = started(tmp_path, 2)
    began = [at for at, _ in starts_of(folders)]
    steps = [1, 2, 3, 4, 5, 3, 4]
    (folders.work / "metrics.csv").write_text(
        "step,loss\n" + "".join(f"{step},{at}\n" for at, step in enumerate(steps))
    )
    # Validation has its own rows, by epochs, in the same column.
    rows = [{"step": 10 * step, "loss": at} for at, step in enumerate(steps)]
    rows[5:5] = [{"step": 1, "val": 7}, {"step": 2, "val": 8}]
    rows += [{"step": 1, "val": 9}]
    (folders.work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for start, run in ((0, steps[:5]), (1, steps[5:])):
        writer = FileWriter(str(folders.work / "tb"))
        for at, step in enumerate(run):
            for tag in ("loss", "rate"):
                scalar = Summary(value=[Summary.Value(tag=tag, simple_value=5 * start + at)])
                # In the first start before the second one, however long that took to note.
                moment = began[start] + at / 9 * (began[1] - began[0])
                writer.add_event(Event(step=step, wall_time=moment, summary=scalar))
        writer.close()
    for given in (None, "metrics.csv", {"tensorboard": "tb"}):
        found = metrics_of(tmp_path, given)
        assert [(row["step"], row["loss"]) for row in found] == [(1, 0), (2, 1), (3, 5), (4, 6)]
    found = metrics_of(tmp_path, "rows.jsonl")
    assert [row["step"] for row in found] == [1, 10, 20, 30, 40]
    assert (found[0]["val"], found[-1]["loss"]) == (9, 6)


def test_an_attempt_that_was_refused_before_its_program_began_is_no_start(tmp_path: Path) -> None:
    """As one with a missing package: a program that counts more often than it was started counts
    in each epoch.
    """
    folders = Folders(tmp_path / "run")
    counted = ["".join(f"{step},{start}.{step}\n" for step in range(4)) for start in range(3)]
    for has_started in (True, False, True):
        begin_again(folders.run, "a", [], [])
        (folders.work / "metrics.csv").write_text("step,loss\n" + "".join(counted[:2]))
        if has_started:
            note_start(folders)
    assert len(metrics_of(folders.run, None)) == 4
    (folders.work / "metrics.csv").write_text("step,loss\n" + "".join(counted))
    with pytest.raises(Refusal, match="step begins anew in each epoch"):
        metrics_of(folders.run, None)


@pytest.mark.parametrize("name", ["tb", "of_tfevents"])
def test_what_a_tensorboard_writer_has_purged_is_left_out(
    monkeypatch, tmp_path: Path, name: str
) -> None:
    """One that begins again with `purge_step`, before its first validation; a folder may have the
    name of an event file.
    """
    # Files of one second are read in the order of these numbers, as texts.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))
    folders = Folders(tmp_path)
    (folders.work / name).mkdir(parents=True)

    def write(moment: float, step: int, **values: float) -> None:
        writer = FileWriter(str(folders.work / name), filename_suffix=f".{moment}")
        if not values:
            log = SessionLog(status=SessionLog.START)
            writer.add_event(Event(step=step, wall_time=moment, session_log=log))
        for tag, value in values.items():
            scalar = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(step=step, wall_time=moment, summary=scalar))
        writer.close()

    write(1, 400, loss=2)
    write(2, 500, loss=1, val=3)
    write(3, 401)
    assert metrics_of(tmp_path, {"tensorboard": name}) == [{"step": 400, "loss": 2}]
    (folders.work / name / "events.out.tfevents.9.damaged").write_bytes(b"damaged" * 9)
    assert metrics_of(tmp_path, {"tensorboard": name}) == [{"step": 400, "loss": 2}]


@pytest.mark.parametrize(("saved", "shift", "before", "first", "told"), [
    # As XGBoost prints its rounds in every start; one that starts over, or counts on.
    (2, 9, [0, 1, 2, 3], [0, 1, 2, 3], "rows of 4 earlier counts are"),
    (0, 9, [0, 1, 2, 3], [0, 1, 2, 3], ""), (2, 9, [0, 1, 2, 3], [2, 3, 4], ""),
    # One row alone; one that was ended before it saved what its first row is of.
    (2, 9, [0], [0, 1, 2], "row of an earlier start is"), (0, 9, [0], [0], ""),
    (2, 0, [0], [0], ""),
    # Rows of each batch, that count on.
    (2, 9, [0, 0], [1, 1, 2, 2], ""),
])  # fmt: skip
@pytest.mark.parametrize("of_log", [False, True])
def test_rows_that_are_left_out_since_a_program_counts_from_the_beginning_are_told(
    tmp_path: Path, saved: int, shift: int, before: list[int], first: list[int], told: str,
    of_log: bool,
) -> None:  # fmt: skip
    folders = Folders(tmp_path)
    folders.work.mkdir()
    given = {"log": r"\[(?P<iter>\d+)\] loss (?P<loss>\S+)"} if of_log else "m.csv"
    for files, more, counts in ((0, 0, before), (saved, shift, first)):
        lines = [(count, more + number) for number, count in enumerate(counts)]
        note_start(folders)
        with acquire(folders.state, "job 1", print) as owner:
            owner.begin_at(7 * files, files)
        if isinstance(given, str):
            with (folders.work / given).open("a") as file:
                file.write("iter,loss\n")
                file.writelines(f"{count},{loss}.5\n" for count, loss in lines)
        else:
            rows = collected(folders, given)
            for count, loss in lines:
                rows.take(f"[{count}] loss {loss}.5")
            rows.write()
    # The results may be published again.
    for _ in range(2):
        metrics_of(tmp_path, given, lambda *again: note_anew(folders, *again))
    text = (
        "the program had saved something when it last started, and counted from 0 again: the "
        f"{told} left out; let it count on where it continues"
        f"{', unless it had saved before that row' * told.startswith('row of')}"
    )
    found = [(each.kind, each.text) for each in incidents.read(folders.state)]
    assert found == ([(incidents.ANEW, text)] if told else [])


def test_rows_are_left_out_of_columns_that_count_alone_too(tmp_path: Path) -> None:
    """Lightning counts those of a validation from nought, among rows of a training."""
    told: list[tuple[float, int]] = []
    starts = [(0.0, 1000.0), (0.0, 2000.0)]
    for number, (_, begun) in enumerate(starts):
        path = tmp_path / f"version_{number}/metrics.csv"
        path.parent.mkdir()
        rows = [f"{step},{number + step}.5," for step in (9, 19, 29)]
        path.write_text("\n".join(["step,loss,val_loss", *rows, "0,,0.5", "1,,0.25", ""]))
        os.utime(path, (begun + 1, begun + 1))
    found = read_user_metrics(
        tmp_path, "version_*/metrics.csv", starts, lambda *again: told.append(again)
    )
    assert [row["step"] for row in found] == [0, 1, 9, 19, 29]
    assert told == [(9, 3)]


def of_mmengine(epochs: range, interval: int) -> list[dict[str, float]]:
    """Its scalars.json: rows of training have a step, those of validation the epoch as `step`."""
    rows: list[dict[str, float]] = []
    for epoch in epochs:
        for step in range(20 * epoch - 20 + interval, 20 * epoch + 1, interval):
            rows.append({"loss": 1 / step, "time": 2, "epoch": epoch, "iter": step, "step": step})
        rows.append({"accuracy": epoch / 10, "time": 1 + epoch / 100, "step": epoch})
    return rows


@pytest.mark.parametrize("interval", [1, 5, 20])
@pytest.mark.parametrize("first", [0, 1])
def test_validation_that_counts_epochs_belongs_where_it_was_written(
    tmp_path: Path, interval: int, first: int
) -> None:
    """The accuracy after epoch 1 is not that of step 1, nor is a time of the validation."""
    rows = of_mmengine(range(1, 6), interval)
    if not first:
        rows = [row | {"epoch": row["epoch"] - 1} if "epoch" in row else row for row in rows]
    # The second start goes on after the third epoch.
    again = of_mmengine(range(4, 6), interval) if first else []
    files = {"0": rows[: 4 * len(rows) // 5 + 1], "1": again} if again else {"0": rows}
    for name, lines in files.items():
        (tmp_path / f"{name}.json").write_text("".join(json.dumps(row) + "\n" for row in lines))
        os.utime(tmp_path / f"{name}.json", (10 * int(name) + 1, 10 * int(name) + 1))
    found = read_user_metrics(tmp_path, "*.json", [(0, 0), (9, 9)][: len(files)])
    assert [row["step"] for row in found] == [*range(interval, 101, interval)]
    assert {row["step"]: row["accuracy"] for row in found if row["accuracy"] is not None} == {
        20 * epoch: epoch / 10 for epoch in range(1, 6)
    }
    assert {row["time"] for row in found} == {2}
    writer = FileWriter(str(tmp_path / "tb"))
    for at, row in enumerate(rows):
        for name in row.keys() - {"step"}:
            scalar = Summary(value=[Summary.Value(tag=name, simple_value=row[name])])
            writer.add_event(Event(step=int(row["step"]), wall_time=at, summary=scalar))
    writer.close()
    found = read_user_metrics(tmp_path, {"tensorboard": "tb"})
    assert [row["step"] for row in found if row["accuracy"] is not None] == [20, 40, 60, 80, 100]
    assert {row["time"] for row in found} == {2}


@pytest.mark.parametrize("first", [0, 1])
def test_the_epoch_may_be_named_after_its_validation(tmp_path: Path, first: int) -> None:
    """Its first row comes before any epoch, and is of no step."""
    rows: list[dict[str, float]] = []
    for step in range(30):
        rows.append({"step": step, "loss": 1 / (step + 1)})
        if step % 10 == 9:
            epoch = step // 10 + first
            rows += [{"step": epoch, "val_acc": step}, {"step": step, "epoch": epoch}]

    def read(table: list[dict[str, float]]) -> dict[float | None, float | None]:
        (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
        found = read_user_metrics(tmp_path, "m.jsonl", [(0, 0), (1, 1)])
        return {row["step"]: row["val_acc"] for row in found if row["val_acc"] is not None}

    assert read(rows) == {9: 9, 19: 19, 29: 29}
    # Ended before it named its last one.
    assert read(rows[:-1]) == {9: 9, 19: 19, 29: 29}
    # What is repeated after a restart has the columns of others.
    again = [row for row in rows if row["step"] == 0 and "loss" in row]
    trained = [row for row in rows if "val_acc" not in row]
    (validation,) = (row for row in rows if row.get("val_acc") == 29)
    assert read([*trained[:2], *again, *trained[1:], validation | {"step": 29}]) == {29: 29}
    shared = [row | {"loss": 3} if "val_acc" in row else row for row in rows]
    with pytest.raises(Refusal, match='rows with "val_acc" go back in step, and would replace'):
        read(shared)


def test_rows_that_may_count_other_units_are_refused_if_they_replace_numbers(
    tmp_path: Path,
) -> None:
    rows = of_mmengine(range(1, 6), 5)
    without = [{name: row[name] for name in row if name not in ("epoch", "iter")} for row in rows]
    of_one_name = [
        {"loss" if name == "accuracy" else name: row[name] for name in row} | {"other": 1}
        if "accuracy" in row
        else row
        for row in rows
    ]
    for table, line in (
        (without, '"accuracy" go back in step, and would replace or lose "time"; count as in'),
        (of_one_name, '"other" go back in step, and would replace or lose "loss"'),
    ):
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
        with pytest.raises(Refusal, match=line) as refused:
            read_user_metrics(tmp_path, "a.jsonl")
        assert len(str(refused.value)) <= 200
    header = ["step", "loss", "time", "accuracy"]
    lines = [",".join(str(row.get(name, "")) for name in header) + "\n" for row in without]
    (tmp_path / "metrics.csv").write_text(",".join(header) + "\n" + "".join(lines))
    with pytest.raises(Refusal, match='"accuracy" go back in step'):
        read_metrics(tmp_path / "metrics.csv", 0)


@pytest.mark.parametrize("rows", [
    # Late, of the same count; without a number of the others; of a program whose epoch is a step.
    [{"step": step, name: step} for step in (10, 20, 30) for name in ("loss", "val")],
    [{"step": step, name: step} for step, name in
     ((10, "loss"), (20, "loss"), (10, "val"), (30, "loss"), (20, "val"), (40, "loss"))],
    [{"step": step, "epoch": step, "loss": step} if name else {"step": step, "val": step}
     for step, name in ((1, 1), (2, 1), (1, 0), (3, 1), (2, 0), (4, 1), (3, 0))],
    # detectron2 writes what belongs to a step before after it.
    [{"iteration": step, "loss": step, "time": 1} if name else {"iteration": step, "AP": step}
     for step, name in ((19, 1), (39, 1), (38, 0), (59, 1), (58, 0), (79, 1))],
])  # fmt: skip
def test_rows_that_are_only_late_keep_their_count(tmp_path: Path, rows: list[dict]) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    count = next(iter(rows[0]))
    found = {row[count]: row for row in read_user_metrics(tmp_path, "a.jsonl")}
    for row in rows:
        assert found[row[count]].items() >= row.items()


def test_a_link_to_the_newest_attempt_is_no_attempt(tmp_path: Path) -> None:
    """Otherwise what the attempt before wrote of later epochs would be there, and be the end."""
    for number, epochs in enumerate((range(1, 6), range(3, 5))):
        path = tmp_path / f"version_{number}/m.csv"
        path.parent.mkdir()
        path.write_text("epoch,loss\n" + "".join(f"{at},{at + number}\n" for at in epochs))
        os.utime(path, (10 * number + 1, 10 * number + 1))
    for link, to in (("latest", "version_1"), ("zero", "version_0")):
        (tmp_path / link).symlink_to(to)
    found = read_user_metrics(tmp_path, "*/m.csv", [(0, 0), (9, 9)])
    assert [row["loss"] for row in found] == [1, 2, 4, 5]


def test_files_of_one_start_are_no_attempts(tmp_path: Path) -> None:
    for number in (0, 1):
        (tmp_path / f"fold_{number}").mkdir()
        path = tmp_path / f"fold_{number}/m.csv"
        path.write_text(f"epoch,acc\n1,0.5\n2,0.{6 + number}\n")
        os.utime(path, (10 * number, 10 * number))
    assert read_user_metrics(tmp_path, "fold_*/m.csv")[1] == {
        "epoch": 2, "fold_0/acc": 0.6, "fold_1/acc": 0.7,
    }  # fmt: skip
    # The second start has written the second one.
    found = read_user_metrics(tmp_path, "fold_*/m.csv", [(-1, -1), (9, 9)])
    assert found[1] == {"epoch": 2, "acc": 0.7}
    for name, start in (("train", 0), ("test", 10)):
        writer = FileWriter(str(tmp_path / "tb" / name))
        for step in (1, 2):
            scalar = Summary(value=[Summary.Value(tag="acc", simple_value=start + step)])
            writer.add_event(Event(step=step, wall_time=start + step, summary=scalar))
        writer.close()
    assert read_user_metrics(tmp_path, {"tensorboard": "tb"})[1] == {
        "step": 2, "train/acc": 2, "test/acc": 12,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("epoch,phase,loss\n1,train,3\n1,val,4\n", "phase"),
        ("epoch,data,loss\n1,c10,3\n1,c100,4\n2,c10,2\n2,c100,3\n", "data"),
        ("epoch,fold,acc\n1,0,3\n2,0,4\n1,1,3.5\n2,1,4.5\n", "fold"),
        ("rank,step,loss\n0,1,3\n1,1,4\n", "rank"),
        # Of a restart, which has gone on with the second epoch on another host.
        ("epoch,host,loss\n1,a,2\n2,a,2\n3,a,2\n2,b,1\n3,b,1\n", ""),
        # A time tells nothing apart, nor does what stands in columns of their own.
        ("epoch,at,loss\n1,9:15,3\n1,9:16,2\n2,9:17,1\n", None),
        ("epoch,phase,loss,val\n1,train,3,\n1,val,,4\n", None),
    ],
)
def test_rows_that_another_column_tells_apart_are_refused(
    tmp_path: Path, text: str, name: str | None
) -> None:
    (tmp_path / "m.csv").write_text(text)
    refused = pytest.raises(Refusal, match=f'differ in "{name}", and the last would replace')
    with refused if name else nullcontext():
        starts = [(0.0, 0.0), (1.0, 1.0)] if name == "" else []
        assert read_user_metrics(tmp_path, "m.csv", starts)[0]["loss"] in (2, 3)


def test_whether_a_column_counts_depends_on_no_result(tmp_path: Path) -> None:
    for numbers in ((0.1, 0.2, 0.3), (0.1, 0.3, 0.2)):
        lines = "".join(f"{number},1\n" for number in numbers)
        (tmp_path / "m.csv").write_text(f"accuracy,loss\n{lines}")
        assert list(read_user_metrics(tmp_path, "m.csv")[0]) == ["row", "accuracy", "loss"]


def test_the_first_group_with_the_name_of_a_count_counts(tmp_path: Path) -> None:
    """Not a loss that comes before it: rows with equal losses would replace each other."""
    rows = LogRows(
        [r"loss (?P<loss>\S+) \(epoch (?P<epoch>\d+), step (?P<step>\d+)\)"], tmp_path / "a.csv", []
    )
    for line in (
        "loss 0.5 (epoch 1, step 9)",
        "loss 0.7 (epoch 2, step 9)",
        "loss 0.5 (epoch 3, step 9)",
    ):
        rows.take(line)
    rows.write()
    assert (tmp_path / "a.csv").read_text().splitlines() == [
        "epoch,loss,step", "1,0.5,9", "2,0.7,9", "3,0.5,9",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "pattern",
    [r"epoch (?P<epoch>\d+) loss (?P<loss>\S+)", r"\x1b.*? (?P<epoch>\d+).*32m(?P<loss>.*)\x1b"],
)
def test_numbers_are_found_behind_colours(tmp_path: Path, pattern: str) -> None:
    """Detectron2 and loguru write them; an expression may know of them."""
    rows = LogRows([pattern], tmp_path / "a.csv", [])
    rows.take("\x1b[1mepoch\x1b[0m 1 loss \x1b[32m0.5\x1b[0m")
    rows.write()
    assert (tmp_path / "a.csv").read_text().splitlines() == ["epoch,loss", "1,0.5"]


def test_what_a_cursor_holds_apart_are_two_numbers(tmp_path: Path) -> None:
    rows = LogRows([r"step (?P<step>\d+) loss (?P<loss>\S+)"], tmp_path / "a.csv", [])
    rows.take("step 1 loss 2\x1b[20G99%")
    rows.take("step 2 loss \x1b[32m1.5\x1b[0m\x1b[1C5")
    rows.write()
    assert (tmp_path / "a.csv").read_text().splitlines() == ["step,loss", "1,2", "2,1.5"]


def test_of_a_long_command_the_words_that_differ_are_told() -> None:
    before = ["python", "train.py", "--epochs", "6", "--lr", "0.1"]
    assert apart(before, [*before[:3], "3", *before[4:]]) == ("6", "3")
    assert apart(before, before[:4]) == ("--lr 0.1", "nothing")
    assert apart(0.1, [0.1]) == (0.1, [0.1])
    assert apart(["a", "a"], ["a"]) == ("a", "nothing")


def test_lines_of_a_log_become_rows_and_those_after_a_restart_replace_earlier_ones(
    tmp_path,
) -> None:
    patterns = [
        # As in the docs; it takes the comma too.
        r"iter (?P<iter>\d+): loss (?P<loss>\S+)",
        r"step (?P<iter>\d+): val (?P<val>\S+)",
    ]
    before = [
        {"iter": 0.0, "loss": 3.0, "val": None},
        {"iter": 1.0, "loss": 2.5, "val": None},
        {"iter": 2.0, "loss": 2.0, "val": None},
    ]
    rows = LogRows(patterns, tmp_path / "metrics.csv", before)
    rows.write()
    assert not (tmp_path / "metrics.csv").exists()
    for line in (
        "step 1: val 4",
        "iter 1: loss 2.25, 3 ms",
        "iter 2: loss bad",
        "iter 3: loss nan",
    ):
        rows.take(line)
    rows.write()
    assert (tmp_path / "metrics.csv").read_text().splitlines() == [
        "iter,loss,val", "0,3,", "1,2.25,4", "3,nan,",
    ]  # fmt: skip
    # Late, or a summary at the end.
    rows.take("step 2: val 5")
    rows.write()
    assert [row["iter"] for row in read_metrics(tmp_path / "metrics.csv")] == [0, 1, 2, 3]


def test_a_line_without_a_count_belongs_to_the_newest_one(tmp_path) -> None:
    """As pytorch/examples' imagenet prints its validation, and minGPT its scores."""
    patterns = [r"Epoch: \[(?P<epoch>\d+)\].* (?P<loss>\S+)$", r" \* Acc@1 (?P<acc>\S+)"]
    lines = [" * Acc@1 9", "Epoch: [1][1/2] 3.5", "Epoch: [1][2/2] 3"]
    lines += [" * Acc@1 25", "Epoch: [2] 2"]
    rows = LogRows(patterns, tmp_path / "metrics.csv", [{"epoch": 0.0, "loss": 5.0, "acc": 8.0}])
    for line in lines:
        rows.take(line)
    rows.write()
    rows.end()
    rows.write()
    # The first one came before any count: it may be of weights that were loaded.
    assert (tmp_path / "metrics.csv").read_text().splitlines() == [
        "epoch,loss,acc", "0,5,8", "1,3,25", "2,2,",
    ]  # fmt: skip


def test_what_a_start_prints_without_a_count_belongs_to_the_row_before_it(tmp_path: Path) -> None:
    """A program that was killed in its last test only tests again."""
    patterns = [r"Epoch (?P<epoch>\d+) loss (?P<loss>\S+)", r"^Test: (?P<test>\S+)"]
    starts = [
        "Epoch 1 loss 3\nEpoch 2 loss 2\nTest: 0.5\n",
        "Test: 0.75\n7it [00:03, 2.33it/s]Test: 0.93\n",
    ]
    found: list[dict[str, float | None]] = []
    printed = Folders(tmp_path).printed
    printed.mkdir(parents=True)
    for number, text in enumerate(starts, 1):
        (printed / f"{number:06}.log").write_text(text)
        rows = LogRows(patterns, tmp_path / "metrics.csv", found)
        for line in text.splitlines():
            rows.hear(line)
        rows.end()
        rows.write()
        found = read_metrics(tmp_path / "metrics.csv")
    expected = [{"epoch": 1, "loss": 3, "test": None}, {"epoch": 2, "loss": 2, "test": 0.93}]
    assert found == metrics_of(tmp_path, {"log": patterns}) == expected


def test_one_expression_finds_a_line_behind_a_bar_and_both_at_once(tmp_path: Path) -> None:
    printed = Folders(tmp_path).printed
    printed.mkdir(parents=True)
    bar = " {0}%|#  | {0}/10 [00:01<00:01,  4.90it/s]"
    lines = [bar.format(1) + "epoch 1 loss 4", "epoch 2 loss 3", bar.format(3) + "epoch 3 loss 2"]
    (printed / "000001.log").write_text("\n".join([*lines, "epoch 4 loss 1"]))
    for pattern, losses in (
        (r"^epoch (?P<epoch>\d+) loss (?P<loss>\S+)", [4, 3, 2, 1]),
        (r" (?P<epoch>\d+)/10 .* loss (?P<loss>\S+)", [4, 2]),
        (r"^ *(?P<epoch>\d+)%.*,  (?P<rate>[\d.]+)it", [4.9, 4.9]),
    ):
        found = metrics_of(tmp_path, {"log": pattern})
        assert [list(row.values())[1] for row in found] == losses
    with pytest.raises(Refusal, match='the group word matches "loss", which is no number'):
        metrics_of(tmp_path, {"log": r"^epoch (?P<epoch>3) (?P<word>\w+)"})


def test_a_group_that_is_not_in_the_line_changes_nothing(tmp_path) -> None:
    patterns = [r"(?:epoch (?P<epoch>\d+) )?loss (?P<loss>\S+)(?: acc (?P<acc>\S+))?"]
    rows = LogRows(patterns, tmp_path / "metrics.csv", [])
    for line in ("epoch 1 loss .5 acc .9", "epoch 1 loss .4", "loss .3"):
        rows.take(line)
    assert rows.in_order == [{"epoch": 1, "loss": 0.3, "acc": 0.9}]


def test_a_number_that_the_end_of_a_long_line_cuts_is_none(tmp_path: Path) -> None:
    rows = LogRows([r"epoch (?P<epoch>\d+).* loss (?P<loss>\S+).*"], tmp_path / "metrics.csv", [])
    for epoch, number, behind in (
        (1, "0.125", ""), (2, "0.125", "\n"), (3, "0.125", " end"), (4, "0.125", "456"),
        (5, "0.5", " accuracy 1"),
    ):  # fmt: skip
        rows.take(f"epoch {epoch}{'loss ':>{MOST_LINE - 7 - len(number)}}{number}{behind}")
    found = {row["epoch"]: row["loss"] for row in rows.in_order}
    assert found == {1: 0.125, 2: 0.125, 3: 0.125, 5: 0.5}


def test_numbers_in_a_line_may_have_brackets_and_commas(tmp_path) -> None:
    patterns = [r"step (?P<step>\S+) loss (?P<loss>\S+) rate (?P<rate>\S+)"]
    rows = LogRows(patterns, tmp_path / "metrics.csv", [])
    for line in (
        "step 1 loss [0.5], rate 850",
        "step 2, loss 0.25. rate 1,234",
        "step 3 loss - rate 1,234,567.5",
        "step none loss 1 rate 2",
        "step 4 loss - rate 1,23",
    ):
        rows.take(line)
    found = [[row[name] for name in ("step", "loss", "rate")] for row in rows.in_order]
    # As in docs/your-own-program.md: a line that counts, and one that does not.
    patterns = [r"Epoch: \[(?P<epoch>\d+)\]", r"^ \* +Acc@1 (?P<val_accuracy>\S+)"]
    pair = LogRows(patterns, tmp_path / "metrics.csv", [])
    for line in ("Epoch: [1][1/2]", " * Acc@1 0.5", "Epoch: [2][1/2]", " * Acc@1 0,523"):
        pair.take(line)
    assert [row["val_accuracy"] for row in pair.in_order][:1] == [0.5]
    assert [row["epoch"] for row in pair.in_order] == [1, 2]
    assert pair.in_order[1]["val_accuracy"] is None
    assert found[:2] == [[1, 0.5, 850], [2, 0.25, 1234]]
    assert (found[2][::2], len(found)) == ([3, 1234567.5], 3)


def test_a_column_with_thousands_and_decimal_commas_is_refused(tmp_path: Path) -> None:
    """A loss that falls below one would have fallen to nothing from a thousand times as much."""
    printed = Folders(tmp_path).printed
    log = {"log": r"epoch (?P<epoch>\d+) loss (?P<loss>\S+)"}
    for path in (printed, tmp_path / "work"):
        path.mkdir(parents=True)
    for numbers, refused in (
        (["1,234", "0,987"], True),
        (["12,5", "1,125"], True),
        # What is a thousand, nobody knows; and these can only be that.
        (["1,234", "1,100"], False),
        (["1,234,567", "1,100.5", "0.5"], False),
    ):
        rows = list(enumerate(numbers, 1))
        lines = [f"epoch {epoch} loss [{number}],\n" for epoch, number in rows]
        for name, lines_of_start in (("000001", lines[:1]), ("000002", lines[1:])):
            (printed / f"{name}.log").write_text("".join(lines_of_start))
        table = "".join(f'{epoch},"{number}"\n' for epoch, number in rows)
        (tmp_path / "work/m.csv").write_text(f"epoch,loss\n{table}")
        objects = [json.dumps({"epoch": epoch, "loss": number}) + "\n" for epoch, number in rows]
        (tmp_path / "work/m.jsonl").write_text("".join(objects))
        for given in (log, "m.csv", "m.jsonl"):
            line = 'metrics: "loss" is .*, which has a decimal comma; .* points'
            with pytest.raises(Refusal, match=line) if refused else nullcontext():
                found = metrics_of(tmp_path, given)
                assert [row["loss"] for row in found] == [
                    float(number.replace(",", "")) for number in numbers
                ]


def test_lines_of_both_streams_are_heard_in_their_order(tmp_path: Path) -> None:
    """A program may print the epoch, and its progress bar the loss, to stderr."""
    program = (
        "import sys\n"
        "for epoch in range(200):\n"
        "    print('Epoch', epoch, flush=True)\n"
        "    print('\\r 50%|#  | 1/2 [00:01<00:01]', file=sys.stderr, end='')\n"
        "    bar = f'\\r100%|### | 2/2 [00:02<00:00, loss={epoch}]'\n"
        "    print(bar, file=sys.stderr, end='')\n"
        "    print('', file=sys.stderr) if epoch % 2 else print('printed', flush=True)\n"
    )
    heard: list[str] = []
    with (tmp_path / "log").open("w") as log:
        output = Output(log, log, heard=heard.append, together=True)
        run_all([Command((sys.executable, "-c", program))], output, Stop(), 1)
    expected = []
    for epoch in range(200):
        bar = f"100%|### | 2/2 [00:02<00:00, loss={epoch}]"
        expected += [f"Epoch {epoch}", bar, *["printed"] * (epoch % 2 == 0)]
    assert heard == expected
    assert "".join(output.errors) == "".join(heard)
    # Padded, as tqdm does behind a shorter one; with brackets of its own.
    for line in (
        "100%|#| 3/3 [00:01<00:00, loss=5]   ",
        "1%|#| 1/9 [0:1<0:2, a=[1], b=2]",
        "Epoch 3 [00:12, loss=0.5] accuracy 0.7",
    ):
        heard.clear()
        with (tmp_path / "log").open("w") as log:
            output = Output(log, log, heard=heard.append, together=True)
            run_all([Command(("printf", "%s\\n", line))], output, Stop(), 1)
        assert heard == [line]


def test_rows_without_the_count_add_to_those_of_their_epoch(tmp_path: Path) -> None:
    """As of a program that logs training by step and validation by epoch."""
    lines = [
        {"parameters": 7}, {"epoch": 1, "step": 50, "loss": 3, "phase": "train"},
        {"epoch": 1, "step": 100, "loss": 2}, {"epoch": 2, "step": 150, "loss": 1.5},
        {"epoch": 1, "val": 0.8}, {"val": 0.9, "loss": 9},
    ]  # fmt: skip
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_user_metrics(tmp_path, "log.jsonl")
    assert [[row[key] for key in ("step", "epoch", "loss")] for row in found] == [
        [50, 1, 3], [100, 1, 2], [150, 2, 1.5],
    ]  # fmt: skip
    assert [row["val"] for row in found][1:] == [0.8, 0.9]
    assert "parameters" not in found[0]


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ([r"epoch (?P<epoch>\d+)", r"acc (?P<acc>\S+)"], None),
        ([r"epoch (?P<epoch>\d+)", r"acc (\S+)"], '"acc (\\\\S+)" has no named group'),
    ],
)
def test_expressions_without_names_are_refused(log: list[str], line: str | None) -> None:
    if line is None:
        program(program="t.py", metrics={"log": log})
        return
    with pytest.raises(Refusal) as refused:
        program(program="t.py", metrics={"log": log})
    assert line in str(refused.value)


def test_what_a_training_that_diverged_has_come_to_is_no_number(tmp_path: Path) -> None:
    """Its last loss that was one is of a time before; an empty cell says nothing."""
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,loss,val\n1,2.5,7\n2,nan,\n3,NaN,\n")
    rows = read_metrics(path)
    found = newest(rows)
    assert (math.isnan(found["loss"]), found["val"]) == (True, 7)
    write_metrics(path, rows)
    assert path.read_text() == "epoch,loss,val\n1,2.5,7\n2,nan,\n3,nan,\n"


def test_values_of_a_program_are_compared_as_they_are_written() -> None:
    assert same(1, 1.0, as_written=False)
    assert not same(1, True, as_written=True)
    assert not same([1], [1.0], as_written=True)
    assert same({"a": 1}, {"a": 1}, as_written=True)
    assert differences({"run": {"amp": 1}}, {"run": {"amp": True}})
    for values in ([1, 1.0], [True, 1], [0, False]):
        given = {"experiment": "x", "program": "t.py"}
        with pytest.raises(Refusal, match="lr: .* has one value in two forms"):
            Experiment.from_config(given | {"parameters": {"lr": values}})
        with pytest.raises(Refusal, match="lr: .* has one value in two forms"):
            Experiment.from_config(given | {"runs": [{"lr": each} for each in values],
                                            "parameters": {"lr": 9}})  # fmt: skip
    # The folders of other seeds have names of their own.
    runs = [{"lr": each, "seed": seed} for seed, each in enumerate([None, "none"])]
    with pytest.raises(Refusal, match="lr: .* has one value in two forms"):
        Experiment.from_config(given | {"runs": runs, "parameters": {"lr": 9}})


def test_the_arguments_of_an_evaluation_are_a_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "ev.py").write_text("")
    given = {"experiment": "x", "command": ["true"], "evaluate": ["ev.py", "0.5"]}

    def sha256(**changes: Any) -> str:
        return Experiment.from_files(given | changes, [tmp_path]).evaluation_sha256

    first = sha256()
    assert sha256() == first
    assert sha256(evaluate=["ev.py", "0.9"]) != first
    (tmp_path / "ev.py").write_text("1")
    assert sha256() != first
    assert sha256(evaluate=None) == ""


@pytest.mark.parametrize("given", [
    {"command": ["echo", "a\0"]}, {"command": ["true"], "parameters": {"a": "\ud800"}},
    {"command": ["true"], "evaluate": ["true", "\0"]},
])  # fmt: skip
def test_what_no_command_line_can_hold_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match="has a character that no command line can hold"):
        Experiment.from_config({"experiment": "x"} | given)


def test_an_output_that_would_be_an_option_is_refused() -> None:
    given = {"experiment": "x", "command": ["true"], "outputs": ["-model.pt"]}
    with pytest.raises(Refusal, match='outputs: "-model.pt" is not a path'):
        Experiment.from_config(given)
