"""What `watch` reads: the state of a run from its files, with a rank that is slow and a job that
waits.
"""

import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from rich.live import Live

import watch
from classifier.pixels.batches import batch_sizes
from classifier.training.loop import Training
from classifier.training.timing import LOOKS, SECONDS, Clock, SlowHosts, slowness
from manynodes.base import failure
from manynodes.base.failure import Again, Failure, Kind
from manynodes.base.timeouts import BETWEEN
from manynodes.checkpointing import incidents
from manynodes.checkpointing.owner import acquire
from manynodes.experiment.config import Experiment
from manynodes.reporting import measures
from manynodes.reporting.progress import (
    JOBS,
    RECORD,
    Progress,
    in_words,
    is_over,
    read_all,
    read_rows,
    since_save,
    time_left,
)
from manynodes.reporting.results import Missing, why_missing
from manynodes.reporting.sums import of_files
from manynodes.schedulers import registry
from programs import ABOUT, SCRIPTS
from session.queue import Queue
from waiting import until

EXPERIMENT = Experiment.from_config({"experiment": "study", "epochs": 8, "seed": [0, 1]})
FIRST, SECOND = EXPERIMENT.runs
NOW = time.time


def look(folder: Path) -> dict[str, Progress]:
    return {each.run: each for each in read_all(EXPERIMENT, folder)}


def test_a_running_training_tells_its_step_loss_and_rate(tmp_path) -> None:
    run = tmp_path / FIRST
    run.mkdir()
    (run / "metrics.csv").write_text(
        "epoch,train_loss,images_per_second,seconds\n1,2.0,100.0,10.0\n2,1.5,100.0,10.0\n"
    )
    live = {"epoch": 2, "step": 5, "steps": 10, "loss": 1.25, "images_per_second": 98.0}
    with acquire(run / "state", "me", print) as owner:
        owner.live = lambda: live | {"slow": "n2 is 1.6 times slower"}
        until((run / "state/live.json").exists)
        found = look(tmp_path)[FIRST]
        assert (found.state, found.epoch, found.step, found.steps) == ("running", 2, 5, 10)
        assert found.numbers.startswith("loss 1.25, 98 images/s, n2 is 1.6 times slower, train_")
        # Six epochs of 10 s each, of which half of the first is done.
        assert found.left == pytest.approx(55)
        # Half of a file, or one of somebody else's.
        large = f'{{"epoch": 2, "step": 1, "steps": 2, "loss": 1{"0" * 400}}}'
        for text in ('{"epoch": 2, "st', '{"epoch": -1}', large, ""):
            owner.live = None
            time.sleep(0.01)
            (run / "state/live.json").write_text(text)
            assert look(tmp_path)[FIRST].state == "running"


@pytest.mark.parametrize(("counts", "left"), [
    ([1], 99 * 10), ([1, 2], 98 * 10), ([10], 90), ([10, 20], 80), ([0, 1, 2], 98 * 10),
    # Of the last three rows, 30 s for 30 - 5 counts.
    ([1, 5, 10, 20, 30], 70 * 30 / 25),
    # Where they began is unknown, or they do not count.
    ([0], None), (["x", 1], None), ([30, 30], None), ([40, 1], None), ([], None),
])  # fmt: skip
def test_the_time_that_is_left_follows_the_counts_that_the_rows_cover(
    counts: list[int | str], left: float | None
) -> None:
    rows = [{"step": str(count), "seconds": "10.0"} for count in counts]
    assert time_left(rows, 100) == (left if left is None else pytest.approx(left))
    assert time_left(rows, None) is None


def test_a_job_that_waits_is_shown_with_the_scheduler_s_reason(tmp_path) -> None:
    (tmp_path / JOBS).write_text(
        json.dumps(
            {FIRST: {"job": "12", "state": "PENDING (Resources)", "waits": True,
                     "since": "10:11:12"},
             SECOND: {"job": "13", "state": "COMPLETING", "waits": False, "since": "10:11:12"}}
        )
    )  # fmt: skip
    found = look(tmp_path)
    assert found[FIRST].state == "waiting"
    assert found[FIRST].reason == "job 12: PENDING (Resources) since 10:11:12"
    (tmp_path / JOBS).write_text("{")
    assert look(tmp_path)[FIRST].reason == ""


def test_a_command_forgets_no_job_of_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a killed one, whose job would begin beside that of the next command."""

    def queue(executor: str) -> Queue:
        settings = SimpleNamespace(lock=True)
        plugin = SimpleNamespace(name=executor)
        workflow = SimpleNamespace(executor_plugin=plugin, execution_settings=settings)
        return Queue(workflow, EXPERIMENT, tmp_path)

    def job(run: str) -> SimpleNamespace:
        return SimpleNamespace(is_group=lambda: False, log=["a.log"],
                               rule=SimpleNamespace(name="train"),
                               wildcards=SimpleNamespace(run=run))  # fmt: skip

    def noted() -> dict[str, str]:
        found = json.loads((tmp_path / JOBS).read_text()) if (tmp_path / JOBS).exists() else {}
        return {name: entry["job"] for name, entry in found.items()}

    waits = {"job": "4711", "state": "PENDING", "waits": True, "since": "10:11:12"}
    (tmp_path / JOBS).write_text(json.dumps({"other": waits}))
    for executor in ("local", "touch", "dryrun"):
        here = queue(executor)
        here.refuse_left([FIRST])
        here.end()
        assert noted() == {"other": "4711"}
    # Of two that live, each has its own.
    one, two = queue("slurm"), queue("slurm")
    queued = {"4711", "12", "13"}
    asked = SimpleNamespace(unended=lambda jobs: [each for each in jobs if each in queued])
    monkeypatch.setattr(registry, "of_executor", lambda _: asked)
    for each, run, number in ((one, FIRST, "12"), (two, SECOND, "13")):
        each.refuse_left([run])
        each.tell_state(job(run), number, "PENDING", True)
    one.tell_state(job(FIRST), "12", "RUNNING", False)
    assert noted() == {"other": "4711", FIRST: "12", SECOND: "13"}
    two.end()
    assert noted() == {"other": "4711", FIRST: "12"}
    # What the scheduler does not know any more is over.
    queued.clear()
    last = queue("slurm")
    last.refuse_left([SECOND])
    last.end()
    assert noted() == {}


def test_a_host_is_slow_by_the_median_of_the_hosts() -> None:
    hosts = ["n1", "n1", "n2", "n2", "n3", "n3"]
    assert slowness(hosts, [1, 1, 2, 2, 1, 1]) == {"n1": 1, "n2": 2, "n3": 1}
    # Of two hosts, the faster one is the median; a single one cannot be slow.
    assert slowness(["n1", "n2"], [1, 1.5]) == {"n1": 1, "n2": 1.5}
    assert slowness(["n1", "n1"], [1, 3]) == {}
    assert slowness(["n1", "n2"], [0, 0]) == {}


def test_a_slow_host_is_named_once_after_some_epochs_and_forgotten_when_it_recovers() -> None:
    watch = SlowHosts(["n1", "n2", "n3"])
    slow, well = [0.010, 0.016, 0.011], [0.010, 0.012, 0.011]
    assert [watch.add(slow, SECONDS) for _ in range(LOOKS - 1)] == [[]] * (LOOKS - 1)
    # An epoch that is too short is looked at with the next one.
    assert watch.add(slow, SECONDS / 2) == []
    (line,) = watch.add(slow, SECONDS / 2)
    assert line == (
        "n2 computes 1.5 times slower than the median of the hosts (16.0 ms a forward "
        "pass), and all others wait for it in every step"
    )
    assert watch.live() == {"slow": "n2 is 1.5 times slower"}
    assert watch.add(slow, SECONDS) == []
    assert watch.add(well, SECONDS) == []
    assert watch.live() == {}
    # A single slow look is no slow host.
    assert watch.add(slow, SECONDS) == []
    assert watch.live() == {}


def test_what_is_live_counts_the_images_of_batches_as_they_are(monkeypatch) -> None:
    """A real training object, of which only what the method uses is there."""
    run = Experiment.from_config({"experiment": "x", "global_batch_size": 1000}).runs["run"]
    training = Training.__new__(Training)
    training.run, training.epoch, training.step = run, 0, 1
    training.sizes = batch_sizes(1437, run.global_batch_size)  # 719 and 718
    training.totals = torch.tensor([2.0 * 719, 0.0], dtype=torch.float64)
    training.epoch_began = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: 110.0)
    assert training.live() == {
        "epoch": 0, "step": 1, "steps": 2, "images_per_second": 71.9, "loss": 2.0
    }  # fmt: skip


def test_the_clock_counts_the_forward_pass_and_the_wait_for_pixels() -> None:
    clock = Clock(torch.device("cpu"))

    def slow_batches():
        for number in range(3):
            time.sleep(0.02)
            yield number

    for _ in clock.inputs(slow_batches()):
        with clock.forward_pass():
            time.sleep(0.01)
    forward, waiting = clock.per_step()
    assert forward >= 0.01
    assert waiting >= 0.02
    clock.reset()
    assert clock.per_step() == (0.0, 0.0)


def test_a_run_is_interrupted_if_it_has_no_record(tmp_path) -> None:
    assert why_missing("run", tmp_path) == Missing("run", "not started")
    (tmp_path / "train.log").write_text("[node 0] epoch 1/4\n")
    assert why_missing("run", tmp_path).reason == "interrupted; run the same command again"
    failure.write(tmp_path, "train", Failure("n2 is lost", log="logs/rank=1.log"))
    assert why_missing("run", tmp_path) == Missing(
        "run", "train: n2 is lost; its own log is logs/rank=1.log", str(tmp_path / "train.log")
    )
    # It was to go on, and then nothing more is known.
    failure.write(tmp_path, "train", Failure("rank 1 was killed", again=Again.HERE))
    assert why_missing("run", tmp_path).reason == "interrupted; run the same command again"


def test_a_run_whose_ranks_start_again_or_whose_program_has_ended_runs(tmp_path) -> None:
    run = tmp_path / FIRST
    with acquire(run / "state", "me", print):
        pass
    assert look(tmp_path)[FIRST].state == "running"
    for again in (Again.HERE, Again.REQUEUED):
        failure.write(run, "train", Failure("rank 1 was killed", again=again))
        assert look(tmp_path)[FIRST].state == "running"
        found = read_all(EXPERIMENT, tmp_path, NOW() + BETWEEN + 1)[0]
        assert (found.state, found.reason) == ("interrupted", "train: rank 1 was killed")


@pytest.mark.parametrize(
    ("kind", "state"),
    [(kind, "interrupted" if kind == Kind.PREEMPTED else "failed") for kind in Kind],
)
def test_a_record_decides_the_state_whatever_its_words(tmp_path, kind: Kind, state: str) -> None:
    run = tmp_path / FIRST
    failure.write(run, "train", Failure("was preempted; run the same command again", kind))
    assert look(tmp_path)[FIRST].state == state
    # Of another training, which was to replace its results; or of its evaluation.
    (run / "run.json").write_text("{}")
    assert look(tmp_path)[FIRST].state == state
    with acquire(run / "state", "me", print):
        assert look(tmp_path)[FIRST].state == "running"


def test_a_failure_before_the_end_of_a_finished_training_does_not_count(tmp_path) -> None:
    """Such as one that a backup has brought back."""
    experiment = Experiment.from_config({"experiment": "one", "program": "t.py"})
    run = tmp_path / "run"
    failure.write(run, "train", Failure("rank 0 ended with status 1"))
    for ended, state in (
        ("2000-01-01T00:00:00+00:00", "failed"),
        ("2999-01-01T00:00:00+00:00", "done"),
    ):
        (run / "run.json").write_text(json.dumps(ABOUT | {"ended": ended}))
        assert read_all(experiment, tmp_path)[0].state == state


def test_what_a_program_removes_meanwhile_ends_no_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("new", "old"):
        (tmp_path / "saved" / name).mkdir(parents=True)
        (tmp_path / "saved" / name / "a.pt").touch()
    os.utime(tmp_path / "saved/new/a.pt", (100, 100))
    real = os.scandir

    def removed_after_it_was_listed(path: object) -> object:
        if Path(str(path)).name == "old":
            shutil.rmtree(str(path), ignore_errors=True)
        return real(path)

    monkeypatch.setattr(os, "scandir", removed_after_it_was_listed)
    assert since_save(tmp_path, True, 110) == 10


def test_a_watch_ends_with_the_last_run_whether_it_failed_or_not(tmp_path) -> None:
    found = read_all(EXPERIMENT, tmp_path)
    assert not is_over(found, tmp_path)
    failed = [replace(each, state="failed") for each in found]
    assert is_over(failed, tmp_path)
    # A command follows the jobs of the runs, which may be requeued.
    (tmp_path / JOBS).write_text("{}")
    assert not is_over(failed, tmp_path)
    assert is_over([replace(each, state="done") for each in found], tmp_path)


def test_a_finished_run_with_a_file_that_cannot_be_read_says_so_beside_the_others(
    tmp_path, monkeypatch
) -> None:
    for name in ("run.json", "evaluation.json", "predictions.csv"):
        (tmp_path / FIRST / name).mkdir(parents=True)
    # The other files are as they should be.
    monkeypatch.setattr(
        measures, "read_finished", lambda _, folder: of_files(folder, ["predictions.csv"], 9)
    )
    found = look(tmp_path)
    assert found[FIRST].state == "done"
    assert found[FIRST].reason.endswith("predictions.csv: is not a regular file")
    assert found[SECOND].state == "waiting"


@pytest.mark.parametrize(
    "metrics", ["rows.csv", {"log": r"^Epoch (?P<epoch>\d+) loss (?P<loss>\S+)"}]
)
def test_numbers_that_a_program_writes_in_its_own_way_are_seen_while_it_runs(
    tmp_path, metrics: object
) -> None:
    script, seen = tmp_path / "program.py", tmp_path / "seen"
    script.write_text(
        "import os, sys, time\n"
        "print('Epoch 3 loss 0.5', flush=True)\n"
        "open('rows.csv', 'w').write('epoch,loss\\n3,0.5\\n')\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.1)\n"
    )
    command = [sys.executable, SCRIPTS / "launch.py", "--output", tmp_path / "run", "--reads",
               json.dumps({"metrics": metrics}), "--", sys.executable, script, seen]  # fmt: skip
    experiment = Experiment.from_config({"experiment": "x", "program": str(script)})
    with subprocess.Popen(list(map(str, command))) as launch:
        until(lambda: read_all(experiment, tmp_path)[0].epoch == 3 or launch.poll() is not None)
        found = read_all(experiment, tmp_path)[0]
        seen.touch()
    assert launch.returncode == 0
    assert (found.state, found.counts, found.numbers) == ("running", "epoch", "loss 0.5")


def test_a_table_is_seen_as_it_is_read_when_the_program_has_ended(tmp_path) -> None:
    """With a byte order mark, blanks around its names, and names that are there again."""
    config = {"experiment": "x", "program": "p.py", "parameters": {"epochs": 4}}
    metrics = tmp_path / "run" / "work" / "metrics.csv"
    metrics.parent.mkdir(parents=True)
    rows = "epoch, loss,seconds\n1,0.9,10\n2,0.8,10\nepoch, loss,seconds\n3,0.7,10\n"
    metrics.write_text(rows, encoding="utf-8-sig")
    (found,) = read_all(Experiment.from_config(config), tmp_path)
    read = read_rows(metrics)
    assert read == [{"epoch": str(epoch), "loss": str(1 - epoch / 10), "seconds": "10"}
                    for epoch in (1, 2, 3)]  # fmt: skip
    assert (found.counts, found.epochs, time_left(read, found.epochs)) == ("epoch", 4, 10)


def test_a_program_that_counts_beyond_its_parameter_has_no_end(tmp_path) -> None:
    """As one that goes on from the epochs of another training."""
    config = {"experiment": "x", "program": "p.py", "parameters": {"epochs": 10}}
    work = tmp_path / "run" / "work"
    work.mkdir(parents=True)
    (work / "metrics.csv").write_text("epoch,seconds\n101,10\n102,10\n103,10\n")
    with acquire(tmp_path / "run" / "state", "me", print):
        (found,) = read_all(Experiment.from_config(config), tmp_path)
    assert (found.state, found.epoch, found.epochs, found.left) == ("running", 103, None, None)


def test_a_terminal_that_cannot_redraw_gets_lines(tmp_path) -> None:
    (tmp_path / RECORD).write_text(json.dumps({"experiment": "study", "epochs": 8, "seed": [0, 1]}))
    for name in EXPERIMENT.runs:
        failure.write(tmp_path / name, "train", Failure("n2 is lost"))
    ours, its = pty.openpty()
    command = [sys.executable, str(SCRIPTS / "watch.py"), str(tmp_path)]
    subprocess.run(command, stdout=its, check=True, env=os.environ | {"TERM": "dumb"})
    os.close(its)
    assert f"{FIRST}: failed: train: n2 is lost" in os.read(ours, 65536).decode()
    os.close(ours)


def test_interruptions_are_counted_without_the_one_that_it_is_in(tmp_path) -> None:
    run = tmp_path / FIRST
    with acquire(run / "state", "me", print):
        for _ in range(2):
            incidents.add(run / "state", incidents.INTERRUPTION, "n2 is lost")
        incidents.add(run / "state", incidents.SLOW, "n2 is slow")
        assert look(tmp_path)[FIRST].interruptions == 2
    failure.write(run, "train", Failure("n2 is lost", Kind.LOST))
    found = look(tmp_path)[FIRST]
    assert (found.state, found.interruptions) == ("failed", 1)
    assert look(tmp_path)[SECOND].interruptions == 0


def test_a_small_terminal_shows_first_what_needs_a_look() -> None:
    def lines(found: list[Progress], height: int = 24) -> list[str]:
        console = Console(file=io.StringIO(), width=80, height=height)
        console.print(watch.view("x", found, console))
        return console.file.getvalue().splitlines()

    found = [Progress(f"run{number}", "waiting") for number in range(36)]
    found[30] = Progress("run30", "failed", reason="train: rank 1 is lost")
    found[35] = Progress("run35", "running", where="n2", epoch=3)
    shown = lines(found)
    assert len(shown) <= 24
    assert shown[0].strip() == "x: 1 failed, 1 running, 34 waiting"
    assert [line.split()[:2] for line in shown[4:6]] == [["run30", "failed"], ["run35", "running"]]
    assert [line.strip() for line in shown[-2:]] == [
        "and 20 waiting", "run30: train: rank 1 is lost",
    ]  # fmt: skip
    # Without an empty column.
    assert shown[2].split() == ["run", "state", "host", "epoch"]
    assert sum(line.startswith("  run") and "state" not in line for line in lines(found, 60)) == 36


@pytest.mark.parametrize("name", ["learning_rate~0.{}_nodes~1_seed~0", "a_long_name_{}" * 8])
@pytest.mark.parametrize(("width", "height"), [(40, 10), (80, 24), (120, 30), (200, 50)])
@pytest.mark.parametrize("runs", [7, 60])
def test_what_needs_a_look_is_on_the_screen_however_long_the_rows_are(
    name: str, width: int, height: int, runs: int
) -> None:
    """`Live` shows the first lines of what is too high."""
    numbers = "train_loss 1.234, val_loss 1.432, val_accuracy 0.5123, images_per_second 12345"
    at = Progress("", "running", where="gpu-node-017", epoch=3, epochs=90, numbers=numbers,
                  left=5000.0, saved=120.0, step=100, steps=390)  # fmt: skip
    found = [replace(at, run=name.replace("{}", str(number))) for number in range(runs)]
    failed = name.replace("{}", "x")
    found.append(Progress(failed, "failed", epoch=2, reason="train: out of memory [red]"))
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True,
                      color_system=None)  # fmt: skip
    with Live(console=console, auto_refresh=False) as live:
        live.update(watch.view("x", found, console), refresh=True)
        shown = console.file.getvalue()
    lines = shown.split("x: 1 failed", 1)[1].splitlines()
    assert len(lines) < height
    assert "train:outofmemory[red]" in "".join(lines).replace(" ", "")
    # Each row is a line where it can be, and no number is cut off in its name.
    if width >= 80 and name.startswith("learning"):
        assert any(failed in line and "failed" in line for line in lines)
        assert sum(line.startswith("  learning") for line in lines) >= min(runs + 1, height - 9)
        assert width == 80 or "train_loss 1.234" in shown
    assert "train_loss…" not in shown


@pytest.mark.parametrize(
    ("name", "runs", "height"),
    [("lr~0.1_weight_decay~0.0005_seed~{}", 1, 24), ("learning_rate~0.1_seed~{}", 3, 24),
     ("learning_rate~0.1_weight_decay~0.0005_seed~{}", 3, 50)],
)  # fmt: skip
def test_all_that_is_known_of_runs_is_shown_if_there_is_room_below(
    name: str, runs: int, height: int
) -> None:
    """In several lines each, on a narrow terminal."""
    numbers = "train_loss 1.234, val_loss 1.432, val_accuracy 0.5123"
    at = Progress("", "running", where="node-017", epoch=3, epochs=90, numbers=numbers,
                  left=5000.0, saved=120.0, step=100, steps=390)  # fmt: skip
    found = [replace(at, run=name.format(number)) for number in range(runs)]
    console = Console(file=io.StringIO(), width=80, height=height)
    console.print(watch.view("x", found, console))
    shown = console.file.getvalue()
    assert len(shown.splitlines()) < height
    for known in ("node-017", "train_los", "0.5123", "83 min", "2 min ago"):
        assert shown.count(known) == runs
    # Otherwise each is a line, with a number.
    console = Console(file=io.StringIO(), width=80, height=24)
    console.print(watch.view("x", [replace(at, run=f"seed~{each}") for each in range(60)], console))
    assert console.file.getvalue().count("train_loss 1.234") == 17


def test_the_loss_is_shown_beside_known_numbers() -> None:
    row = {"step": "3", "lr": "0.1", "loss": "0.6667", "val_accuracy": "0.75"}
    assert in_words(row) == "val_accuracy 0.75, loss 0.6667, lr 0.1"


def test_a_program_without_data_has_begun_with_its_preflight(tmp_path) -> None:
    (tmp_path / FIRST).mkdir()
    (tmp_path / FIRST / "preflight.log").touch()
    assert [look(tmp_path)[name].state for name in (FIRST, SECOND)] == ["staging", "waiting"]


def test_an_interrupted_start_of_watch_leaves_no_traceback(tmp_path) -> None:
    # In the place of a package that it imports.
    (tmp_path / "rich.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "watch.py"), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")
