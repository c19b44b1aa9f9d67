"""What `watch` reads: the state of a run from its files, with a rank that is slow and a job that
waits.
"""

import json
import time
from pathlib import Path

import pytest
import torch

from ddp.checkpointing import incidents
from ddp.checkpointing.owner import acquire
from ddp.experiment.config import Experiment
from ddp.reporting.progress import BETWEEN, JOBS, Progress, read_all
from ddp.reporting.results import Missing, why_missing
from ddp.training.timing import LOOKS, SECONDS, Clock, SlowHosts, slowness
from waiting import until

EXPERIMENT = Experiment.from_config({"experiment": "study", "epochs": 8, "seed": [0, 1]})
FIRST, SECOND = EXPERIMENT.runs
NOW = time.time


def look(folder: Path) -> dict[str, Progress]:
    return {each.run: each for each in read_all(EXPERIMENT, folder)}


def test_a_running_training_tells_its_step_loss_and_rate(tmp_path) -> None:
    run = tmp_path / FIRST
    run.mkdir()
    (run / "history.csv").write_text(
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


def test_a_job_that_waits_is_shown_with_the_scheduler_s_reason(tmp_path) -> None:
    (tmp_path / JOBS).write_text(
        json.dumps(
            {FIRST: {"job": "12", "state": "PENDING (Resources)", "since": "10:11:12"},
             SECOND: {"job": "13", "state": "COMPLETING", "since": "10:11:12"}}
        )
    )  # fmt: skip
    found = look(tmp_path)
    assert found[FIRST].state == "waiting"
    assert found[FIRST].reason == "job 12: PENDING (Resources) since 10:11:12"
    (tmp_path / JOBS).write_text("{")
    assert look(tmp_path)[FIRST].reason == ""


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


def test_a_run_is_interrupted_if_its_log_has_no_reason(tmp_path) -> None:
    assert why_missing("run", tmp_path) == Missing("run", "not started")
    (tmp_path / "train.log").write_text("[node 0] epoch 1/4\n")
    assert why_missing("run", tmp_path).reason == "interrupted; run the same command again"
    (tmp_path / "train.log").write_text("[node 0] epoch 1/4\nlaunch: n2 is lost\n")
    assert why_missing("run", tmp_path).reason == "train: n2 is lost"


def test_a_run_whose_ranks_start_again_or_whose_program_has_ended_runs(tmp_path) -> None:
    run = tmp_path / FIRST
    with acquire(run / "state", "me", print):
        pass
    assert look(tmp_path)[FIRST].state == "running"
    (run / "train.log").write_text(
        "launch: rank 1 on n2 was ended by SIGKILL; starting again from what was saved (start 2 of "
        "this job)\n[node 0] epoch 2/8\n"
    )
    assert look(tmp_path)[FIRST].state == "running"
    now = NOW() + BETWEEN + 1
    assert read_all(EXPERIMENT, tmp_path, now)[0].state == "interrupted"
    with (run / "train.log").open("a") as log:
        log.write("launch: rank 1 on n2 was ended by SIGKILL\n")
    assert look(tmp_path)[FIRST].state == "failed"


def test_interruptions_are_counted_without_the_one_that_it_is_in(tmp_path) -> None:
    run = tmp_path / FIRST
    with acquire(run / "state", "me", print):
        for _ in range(2):
            incidents.add(run / "state", incidents.INTERRUPTION, "n2 is lost")
        incidents.add(run / "state", incidents.SLOW, "n2 is slow")
        assert look(tmp_path)[FIRST].interruptions == 2
    (run / "train.log").write_text("launch: n2 is lost\n")
    found = look(tmp_path)[FIRST]
    assert (found.state, found.interruptions) == ("failed", 1)
    assert look(tmp_path)[SECOND].interruptions == 0
