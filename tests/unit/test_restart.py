"""`launch --restart`: after a failure the ranks start again in the same launch. A rank that hangs
is named.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

from programs import program
from trainings import Training, attempts, result
from waiting import until

# Each starts Python and torch several times.
pytestmark = pytest.mark.faults
PROCESSES = 2
HUNG = 10  # seconds that the others wait for a rank that hangs


def test_asked_to_stop_between_two_starts_it_says_what_to_do(tmp_path, digits) -> None:
    """The signal comes before the ranks have begun, or while they load torch."""
    training = Training(tmp_path / "run", digits, processes=PROCESSES, launch=["--restart"])
    training.reach(3)
    os.kill(training.find("train.py")[1], signal.SIGKILL)
    until(lambda: "starting again" in training.said)
    os.kill(training.process.pid, signal.SIGTERM)
    assert training.end() in (1, 75), training.said
    *_, last = training.said.splitlines()
    assert last.startswith("launch: "), last
    assert "run the same command again" in last


def test_a_training_that_gets_further_in_every_start_is_not_given_up(
    tmp_path, digits, reference
) -> None:
    """However often it is killed, and however soon."""
    training = Training(
        tmp_path / "run", digits, processes=PROCESSES,
        launch=["--restart", "--state", tmp_path / "run/state"],
    )  # fmt: skip
    for kills in range(1, 3):
        training.reach(2 * kills)
        os.kill(training.await_start("train.py")[-1], signal.SIGKILL)
        until(lambda wanted=kills: training.said.count("starting again") == wanted)
    assert training.end() == 0, training.said
    assert result(training.output) == reference(PROCESSES)
    assert len(attempts(training.output)) == 3
    assert re.search(
        r"launch: train failed: rank \d on \S+ was ended by SIGKILL.*; "
        r"starting again, with what was saved \(start 2 of this job\)",
        training.said,
    )
    # The logs of the failed ranks stay, beside those of the new ones.
    kept = {path.name for path in (training.logs / "ranks/start=1").iterdir()}
    assert {"rank=0.log", "rank=1.log"} <= kept
    assert (training.logs / "ranks/rank=1.log").is_file()


def test_a_stopped_rank_is_named_and_replaced(tmp_path, digits, reference) -> None:
    options = ["--restart", "--timeout", HUNG]
    training = Training(tmp_path / "run", digits, processes=PROCESSES, launch=options)
    training.reach(3)
    since = time.monotonic()
    stopped = training.find("train.py")[1]
    os.kill(stopped, signal.SIGSTOP)
    until(lambda: "starting again" in training.said)
    print(f"named {time.monotonic() - since - HUNG:.1f} s after the time-out")
    assert training.end() == 0, training.said
    assert result(training.output) == reference(PROCESSES)
    assert re.search(
        r"rank \d on \S+ hung \(stopped by a signal, in [\w.]+ \(\S+:\d+\)\), and the others "
        r"waited for it; its own log is \S+; starting again",
        training.said,
    ), training.said


def test_a_rank_that_recovers_is_no_failure(tmp_path, digits, reference) -> None:
    options = ["--restart", "--timeout", 30]
    training = Training(tmp_path / "run", digits, processes=PROCESSES, launch=options)
    training.reach(2)
    stopped = training.find("train.py")[1]
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(5)
    os.kill(stopped, signal.SIGCONT)
    assert training.end() == 0, training.said
    assert result(training.output) == reference(PROCESSES)
    assert len(attempts(training.output)) == 1


def test_a_suspended_training_continues(tmp_path, digits, reference) -> None:
    """As a scheduler suspends a job: all of its processes, for longer than they wait for each
    other.
    """
    options = ["--restart", "--timeout", HUNG]
    training = Training(tmp_path / "run", digits, processes=PROCESSES, launch=options)
    training.reach(2)
    family = training.find("")
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(HUNG + 10)
    for pid in reversed(family):
        os.kill(pid, signal.SIGCONT)
    assert training.end() == 0, training.said
    assert result(training.output) == reference(PROCESSES)


def test_what_fails_without_progress_is_not_repeated(tmp_path, digits) -> None:
    """A refusal would come again, and so would a failure at the same place."""
    training = Training(
        tmp_path / "run", digits, processes=PROCESSES, launch=["--restart"], learning_rate=1e300
    )
    assert training.end() == 1
    assert "starting again" not in training.said
    training = Training(tmp_path / "other", digits, processes=PROCESSES, launch=["--restart"])
    training.await_start("train.py")
    until(lambda: len(training.find("train.py")) == 2)
    os.kill(training.find("train.py")[0], signal.SIGKILL)
    assert training.end() == 1
    assert "starting again" not in training.said


def launched_program(
    script: Path, output: Path, nodes: int, *options: object
) -> subprocess.CompletedProcess[str]:
    """A program of the user's, one process a node, run to its end."""
    return program(
        "launch", "--nodes", nodes, *options,
        "--output", output, "--", sys.executable, script,
    )  # fmt: skip


def test_a_program_that_always_saves_and_fails_is_given_up(tmp_path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import launched, secrets\n"
        "launched.state.mkdir(parents=True, exist_ok=True)\n"
        "(launched.state / 'file').write_text(secrets.token_hex(8))\n"
        "raise ValueError('never')\n"
    )
    done = launched_program(script, tmp_path / "run", 1, "--restart")
    assert done.returncode == 1
    assert done.stderr.count("starting again, with what was saved") == 2
    assert re.search(
        r"ValueError: never; its own log is \S+; the last 3 starts lasted less than 60 s each",
        done.stderr,
    )


@pytest.mark.parametrize("fruitless", [2, 3])
def test_a_program_that_has_saved_is_given_up_after_three_starts_that_save_nothing(
    tmp_path, fruitless: int
) -> None:
    """As where something ends it again and again before it has begun."""
    starts, script = tmp_path / "starts", tmp_path / "program.py"
    script.write_text(
        "import os, signal, launched\n"
        f"with open('{starts}', 'a+') as file:\n"
        "    file.write('x'); file.seek(0); start = len(file.read())\n"
        f"if 2 <= start < {2 + fruitless}: os.kill(os.getpid(), signal.SIGKILL)\n"
        "with open('metrics.csv', 'a') as file: file.write(f'epoch,loss\\n{start},1\\n')\n"
        "launched.state.mkdir(parents=True, exist_ok=True)\n"
        "(launched.state / 'file').write_text(str(start))\n"
        "if start == 1: raise ValueError('once')\n"
    )
    done = launched_program(script, tmp_path / "run", 1, "--restart")
    assert done.stderr.count("starting again, with what was saved") == 3
    assert done.returncode == (fruitless == 3), done.stderr
    assert ("; the last 3 starts saved nothing new" in done.stderr) == (fruitless == 3)


def test_a_deadlock_in_a_user_s_program_is_named_with_its_stack(tmp_path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        dedent("""
        import threading
        from datetime import timedelta
        import torch
        import torch.distributed as dist
        import launched

        dist.init_process_group("gloo", timeout=timedelta(seconds=launched.timeout))
        number = torch.ones(1)
        dist.all_reduce(number)


        def load_next_file():
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()


        if launched.rank == 1:
            load_next_file()
        dist.all_reduce(number)
        """)
    )
    done = launched_program(script, tmp_path / "run", 2, "--cpus", 2, "--timeout", HUNG)
    assert done.returncode == 1
    assert re.search(
        r"program failed: rank 1 on \S+ hung \(in load_next_file \(\S*program\.py:\d+\)\), and the "
        r"others waited for it",
        done.stderr,
    ), done.stderr
    assert re.search(r"rank 1 on \S+ \| <module> \(\S*program\.py:\d+\)", done.stderr)


def test_a_rank_that_has_ended_while_another_waits_for_it_is_named(tmp_path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, launched, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "if launched.rank == 1: os._exit(0)\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    done = launched_program(script, tmp_path / "run", 2, "--cpus", 2)
    assert done.returncode == 1
    line = r"program failed: rank 1 on \S+ ended with status 0 while rank 0 on \S+ waited for it"
    assert re.search(line, done.stderr), done.stderr
