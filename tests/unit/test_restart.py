"""`launch --restart`: after a failure the ranks start again in the same launch. A rank that hangs
is named.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
import pytest

from manynodes.base.timeouts import START_UP, SUPERVISE_GRACE
from manynodes.checkpointing import incidents
from programs import SCRIPTS, program
from simulated.nccl_texts import WATCHDOG
from trainings import CONNECTED, Training, attempts, complete_on_ranks, result
from waiting import until

# Each starts Python and torch several times.
pytestmark = pytest.mark.faults
PROCESSES = 2
HUNG = 10  # seconds that the others wait for a rank that hangs
# The faults that several GPUs tell of in another way, or not at all.
connections = pytest.mark.parametrize("connection", CONNECTED)


def test_asked_to_stop_between_two_starts_it_says_what_to_do(tmp_path, digits) -> None:
    """The signal comes before the ranks have begun, or while they load torch."""
    training = Training(tmp_path / "run", digits, processes=PROCESSES, launch=["--restart"])
    training.reach(3)
    os.kill(training.find("train.py")[1], signal.SIGKILL)
    until(lambda: "starting again" in training.said, training.process)
    os.kill(training.process.pid, signal.SIGTERM)
    assert training.end() in (1, 75), training.said
    *_, last = training.said.splitlines()
    assert last.startswith("launch: "), last
    assert "run the same command again" in last


@connections
def test_paused_killed_stopped_and_suspended_a_training_goes_on(
    tmp_path, digits, reference, connection: str
) -> None:
    """It is not given up while it gets further in every start."""
    pause = 5
    # Longer than what a rank has that hears of nothing, which is asserted below.
    patience = SUPERVISE_GRACE + pause
    training = Training(
        tmp_path / "run", digits, processes=PROCESSES, environment=CONNECTED[connection],
        launch=["--restart", "--timeout", patience, "--state", tmp_path / "run/state"],
    )  # fmt: skip

    def again() -> int:
        return training.said.count("starting again")

    # A rank that recovers is no failure.
    training.reach(1)
    paused = training.find("train.py")[1]
    os.kill(paused, signal.SIGSTOP)
    time.sleep(pause)
    os.kill(paused, signal.SIGCONT)
    training.reach(3)
    assert again() == 0
    # However often it is killed, and however soon.
    for kills in range(1, 3):
        os.kill(training.find("train.py")[-1], signal.SIGKILL)
        seconds = until(lambda wanted=kills: again() == wanted, training.process)
        # The other rank ends by itself: after 10 s where all took eight times as long (measured).
        assert seconds < SUPERVISE_GRACE
        # In this start: the last one may have printed some epochs more. The first is saved when the
        # second is printed, and this start with it.
        training.reach(training.epochs[-1] + 2)
    # A stopped rank is named and replaced.
    os.kill(training.find("train.py")[1], signal.SIGSTOP)
    since = time.monotonic()
    until(lambda: again() == 3, training.process)
    print(f"named {time.monotonic() - since - patience:.1f} s after the time-out")
    training.reach(training.epochs[-1] + 2)
    # As a scheduler suspends a job: all of its processes, for longer than they wait for each other.
    family = training.find("")
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    assert training.epochs[-1] < 16
    time.sleep(patience + 10)
    for pid in reversed(family):
        os.kill(pid, signal.SIGCONT)
    assert training.end() == 0, training.said
    assert result(training.output) == reference(PROCESSES)
    # A suspension may be told as a failure.
    assert len(attempts(training.output)) == 1 + again()
    assert re.search(
        r"launch: train failed: rank \d on \S+ was ended by SIGKILL.*; "
        r"starting again, with what was saved \(start 2 of this job\)",
        training.said,
    )
    assert re.search(
        r"rank \d on \S+ hung \(stopped by a signal, in \S+ \(\S+:\d+\)\), and the others "
        r"waited for it; its own log is \S+; starting again",
        training.said,
    ), training.said
    # The logs of the failed ranks stay, beside those of the new ones.
    kept = {path.name for path in (training.logs / "ranks/start=1").iterdir()}
    assert {"rank=0.log", "rank=1.log"} <= kept
    assert (training.logs / "ranks/rank=1.log").is_file()


# Raises or hangs on one rank, once, when a file says so.
FAULTY = """
import os
import time
from pathlib import Path

from torch import nn

FAULT = Path({fault!r})


def load_next_file():
    time.sleep(1e9)


class Net(nn.Module):
    def __init__(self, classes, channels, size):
        super().__init__()
        pixels = channels * size[0] * size[1]
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(pixels, classes))

    def forward(self, images):
        if os.environ["RANK"] == "1" and FAULT.exists():
            raises = FAULT.read_text() == "raise"
            FAULT.unlink()
            if raises:
                raise ValueError("mine")
            load_next_file()
        return self.layers(images)
"""


@pytest.fixture(scope="module")
def faulty(digits, tmp_path_factory) -> Path:
    """A folder with the network, and the output of its training without a fault."""
    folder = tmp_path_factory.mktemp("faulty")
    network = folder / "nets.py"
    network.write_text(FAULTY.format(fault=str(folder / "fault")))
    own = {"model": f"{network}:Net", "learning_rate": 0.01}
    complete_on_ranks(folder / "alone", digits, PROCESSES, **own)
    return folder


@connections
def test_a_rank_that_raises_or_hangs_in_its_network_is_named_and_replaced(
    tmp_path, digits, faulty, connection: str
) -> None:
    """With NCCL, the others are not told that it is gone, and do not hear of a signal."""
    own = {"model": f"{faulty}/nets.py:Net", "learning_rate": 0.01}
    # Of another connection, if that one failed.
    (faulty / "fault").unlink(missing_ok=True)
    training = Training(
        tmp_path / "run", digits, processes=PROCESSES, environment=CONNECTED[connection],
        launch=["--restart", "--timeout", HUNG], **own,
    )  # fmt: skip
    for number, what in enumerate(("raise", "hang"), 1):
        training.reach(4 * number)
        (faulty / "fault").write_text(what)
        until(
            lambda wanted=number: training.said.count("starting again") == wanted, training.process
        )
    assert training.end() == 0, training.said
    assert result(training.output) == result(faulty / "alone")
    raised, hung = (line for line in training.said.splitlines() if "starting again" in line)
    assert re.search(r"train failed: rank 1 on \S+: ValueError: mine; ", raised), raised
    assert re.search(r"rank 1 on \S+ hung \(in load_next_file \(\S+nets\.py:\d+\)\)", hung), hung
    waited = (training.logs / "ranks/start=2/rank=0.log").read_text()
    assert (WATCHDOG[0] in waited) == (connection == "nccl"), waited


@connections
def test_what_fails_without_progress_is_not_repeated(tmp_path, digits, connection: str) -> None:
    """It would fail at the same place again. A refusal: test_vote.py."""
    training = Training(
        tmp_path / "run", digits, processes=PROCESSES, environment=CONNECTED[connection],
        launch=["--restart"],
    )  # fmt: skip
    training.await_start("train.py")
    until(lambda: len(training.find("train.py")) == 2)
    os.kill(training.find("train.py")[0], signal.SIGKILL)
    assert training.end() == 1
    assert "starting again" not in training.said


def launched_program(
    script: Path, output: Path, *options: object, **how: Any
) -> subprocess.CompletedProcess[str]:
    """A program of the user's, run to its end."""
    command = [*options, "--output", output, "--", sys.executable, script]
    return program("launch", *command, **how)


# Without torchrun, which imports torch at every start.
ALONE = ["--launcher", "none"]


def test_a_program_that_always_saves_and_fails_is_given_up(tmp_path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import launched, secrets\n"
        "launched.state.mkdir(parents=True, exist_ok=True)\n"
        "(launched.state / 'file').write_text(secrets.token_hex(8))\n"
        "raise ValueError('never')\n"
    )
    done = launched_program(script, tmp_path / "run", *ALONE, "--restart")
    assert done.returncode == 1
    assert done.stderr.count("starting again, with what was saved") == 2
    assert re.search(
        r"ValueError: never; its own log is \S+; the last 3 starts lasted less than 60 s each",
        done.stderr,
    )
    # These logs are gone when the report of the run is read.
    noted = incidents.read(tmp_path / "run/state")
    assert len(noted) == 3
    assert all("ValueError: never; " in each.text and "/logs/" not in each.text for each in noted)


def test_a_file_that_a_program_writes_is_none_of_its_code(tmp_path) -> None:
    script, written = tmp_path / "program.py", tmp_path / "last.txt"
    written.write_text("0")
    script.write_text(
        "import launched, pathlib, sys\n"
        "file = pathlib.Path(sys.argv[1])\n"
        "file.write_text(str(int(file.read_text()) + 1))\n"
        "(launched.state / 'file').write_text(file.read_text())\n"
        "sys.exit(file.read_text() == '1')\n"
    )
    done = program(
        "launch", *ALONE, "--restart", "--output", tmp_path / "run",
        "--", "python", script, written,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "starting again, with what was saved (start 2" in done.stderr


def test_a_program_whose_files_change_meanwhile_is_not_started_again(tmp_path) -> None:
    """What it would save would be of two programs, and the record would name one."""
    script, module = tmp_path / "program.py", tmp_path / "beside.py"
    module.write_text("VALUE = 1\n")
    script.write_text(
        "import beside, launched\n"
        "launched.state.mkdir(parents=True, exist_ok=True)\n"
        "(launched.state / 'file').write_text('saved')\n"
        f"open('{module}', 'w').write('VALUE = 2\\n')\n"
        "raise ValueError('never')\n"
    )
    done = launched_program(script, tmp_path / "run", *ALONE, "--restart")
    assert done.returncode == 1
    assert "starting again" not in done.stderr
    assert "; its files or its image have changed since it began" in done.stderr
    done = launched_program(script, tmp_path / "other", *ALONE, "--code", "0" * 64)
    assert done.returncode == 1
    assert "changed since this command began; run the same command again" in done.stderr


def test_a_program_that_was_edited_while_it_ran_is_told(tmp_path) -> None:
    """It reads late what it imports, or what an interpreter reads line by line."""
    script, module = tmp_path / "program.py", tmp_path / "beside.py"
    module.write_text("VALUE = 1\n")
    script.write_text(
        "import launched\n"
        f"open('{module}', 'w').write('VALUE = 2\\n')\n"
        "import beside\n"
        "launched.result(value=beside.VALUE)\n"
    )
    for edited in (True, False):
        run = tmp_path / f"{edited}"
        done = launched_program(script, run, *ALONE)
        assert done.returncode == 0, done.stderr
        line = "changed while it ran: what it read late may be of the new ones; --config replace="
        assert (line in done.stderr) == edited
        kinds = [each.kind for each in incidents.read(run / "state")]
        assert kinds == [incidents.EDITED] * edited


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
    done = launched_program(script, tmp_path / "run", *ALONE, "--restart")
    assert done.stderr.count("starting again, with what was saved (start 2 of this job)") == 1
    for start in (3, 4):
        again = f"nothing new was saved in this start; starting again (start {start} of this job)"
        assert done.stderr.count(again) == 1, done.stderr
    assert done.stderr.count("starting again") == 3
    assert done.returncode == (fruitless == 3), done.stderr
    assert ("; the last 3 starts saved nothing new" in done.stderr) == (fruitless == 3)


@pytest.mark.parametrize("alone", [True, False], ids=["report", "rows"])
def test_a_program_that_begins_anew_each_time_is_given_up(tmp_path, alone: bool) -> None:
    """However long its starts are: here none counts as short, and three are enough."""
    script, driver = tmp_path / "program.py", tmp_path / "launch_long.py"
    script.write_text(
        dedent("""
        import os, pathlib, time

        if report := os.environ.get("LAUNCH_REPORT"):
            pathlib.Path(report).write_text('{"saved": "epoch 2"}')
        for epoch in (1, 2):
            if state := os.environ.get("LAUNCH_STATE"):
                pathlib.Path(state, f"epoch{epoch}.pt").write_text("weights")
                with open("metrics.csv", "a") as file:
                    print(epoch, time.time(), sep=",", file=file)
        raise ValueError("bad row in epoch 3")
        """)
    )
    driver.write_text(
        f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\n"
        "import launch\nfrom manynodes.launching import restarts\n"
        "restarts.SHORT, restarts.MOST_ALIKE = 0, 3\nlaunch.main()\n"
    )
    output = [] if alone else ["--output", tmp_path / "run"]
    command = [sys.executable, driver, *ALONE, "--restart", *output, "--"]
    command += [script] if alone else [sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("starting again, with what was saved") == 3, done.stderr
    assert re.search(
        r"ValueError: bad row in epoch 3; .*the last 3 starts failed in this way and got no "
        r"further; does it continue from what it has saved\?$",
        done.stderr,
        re.MULTILINE,
    ), done.stderr


def test_shortly_before_the_deadline_of_the_shell_nothing_is_started_again(tmp_path) -> None:
    """A failure is told, and not that the deadline of a further start is over."""
    script, log = tmp_path / "program.py", tmp_path / "logs/log.txt"
    script.write_text(
        "import os, sys, pathlib\n"
        "pathlib.Path(os.environ['LAUNCH_REPORT']).write_text('{\"saved\": \"step 7\"}')\n"
        "sys.exit(3)\n"
    )
    for seconds, again in ((START_UP - 10, 0), (1000 * START_UP, 2)):
        deadline = os.environ | {"LAUNCH_STOP_AT": str(time.time() + seconds)}
        done = program("launch", *ALONE, "--restart", "--log", log, "--", script, env=deadline)
        assert done.returncode == 1
        assert done.stderr.count("starting again") == again, done.stderr
        found = json.loads((tmp_path / "logs/failure.json").read_text())
        assert re.fullmatch(r"node 0 on \S+ ended with status 3", found["reason"])


def test_a_killed_supervisor_is_replaced_if_the_program_has_written_a_snapshot(tmp_path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, signal, time\n"
        "if not os.path.exists('last.pt'):\n"
        "    open('last.pt', 'w').close()\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
        "    time.sleep(60)\n"
    )
    reads = ["--reads", json.dumps({"snapshots": ["last.pt"]})]
    done = launched_program(script, tmp_path / "run", "--restart", *reads)
    killed = r"supervise.py of rank 0 on \S+ was ended by SIGKILL;.* starting again, with what was"
    assert re.search(killed, done.stderr), done.stderr
    assert done.returncode == 0, done.stderr


def test_a_program_that_is_killed_in_its_last_test_repeats_only_that(tmp_path) -> None:
    script, run = tmp_path / "program.py", tmp_path / "run"
    script.write_text(
        "import os, signal, launched\n"
        "if not (launched.state / 'last.pt').exists():\n"
        "    print('Epoch 1 loss 0.5', flush=True)\n"
        "    launched.save(launched.state / 'last.pt', lambda path: open(path, 'w').close())\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "print('Test accuracy: 0.93')\n"
    )
    log = [r"Epoch (?P<epoch>\d+) loss (?P<loss>\S+)", r"Test accuracy: (?P<test>\S+)"]
    reads = ["--reads", json.dumps({"metrics": {"log": log}})]
    done = launched_program(script, run, *ALONE, "--restart", *reads)
    assert done.returncode == 0, done.stderr
    assert (run / "state/metrics.csv").read_text() == "epoch,loss,test\n1,0.5,0.93\n"
    # What a killed rank had printed is no reason of its end.
    assert "Epoch 1" not in done.stderr
    assert not re.search(r"^(rank|node) 0 on \S+ \|", done.stderr, re.MULTILINE)


# With NCCL's files of what each rank waits for, all ranks end at once.
DUMPS = CONNECTED["nccl"] | {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


@pytest.mark.parametrize("environment", [*CONNECTED.values(), DUMPS], ids=[*CONNECTED, "dumps"])
def test_a_deadlock_in_a_user_s_program_is_named_with_its_stack(
    tmp_path, environment: dict[str, str]
) -> None:
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
        print(number)
        """)
    )
    done = launched_program(
        script, tmp_path / "run", "--nproc-per-node", 2, "--cpus", 2, "--timeout", HUNG,
        env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 1
    assert re.search(
        r"program failed: rank 1 on \S+ hung \(in load_next_file \(\S*program\.py:\d+\)\), and the "
        r"others waited for it",
        done.stderr,
    ), done.stderr
    assert re.search(r"rank 1 on \S+ \| <module> \(\S*program\.py:\d+\)", done.stderr)


@connections
def test_a_rank_that_has_ended_while_another_waits_for_it_is_named(
    tmp_path, connection: str
) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, launched, torch, torch.distributed as dist\n"
        "from datetime import timedelta\n"
        "dist.init_process_group('gloo', timeout=timedelta(seconds=launched.timeout))\n"
        "dist.all_reduce(torch.ones(1))\n"
        "if launched.rank == 1: os._exit(0)\n"
        "number = torch.ones(1)\n"
        "dist.all_reduce(number)\n"
        "print(number + 1)\n"
    )
    done = launched_program(
        script, tmp_path / "run", "--nproc-per-node", 2, "--cpus", 2, "--timeout", HUNG,
        env=os.environ | CONNECTED[connection],
    )  # fmt: skip
    assert done.returncode == 1
    line = r"program failed: rank 1 on \S+ ended with status 0 while rank 0 on \S+ waited for it"
    assert re.search(line, done.stderr), done.stderr


def test_a_rank_that_goes_on_long_after_another_has_ended_is_told_and_not_ended(tmp_path) -> None:
    """It may hang, or have the last test to do."""
    log = tmp_path / "log.txt"
    script = tmp_path / "program.py"
    script.write_text(
        "import os, sys, time\n"
        "while os.environ['RANK'] == '0' and 'goes on' not in open(sys.argv[1]).read():\n"
        "    time.sleep(0.2)\n"
    )
    done = program(
        "launch",
        "--nproc-per-node",
        2,
        "--cpus",
        2,
        "--timeout",
        1,
        "--log",
        log,
        "--",
        script,
        log,
    )
    assert done.returncode == 0, done.stderr
    ended = (
        r"launch: warning: rank 1 on \S+ ended with status 0 more than 1 s ago, and rank 0 goes on"
    )
    assert re.search(ended, done.stderr)


def is_rank_0(process: psutil.Process, script: Path) -> bool:
    # What looks where a rank is may have ended.
    with suppress(psutil.Error):
        return str(script) in process.cmdline()[1:2] and process.environ()["RANK"] == "0"
    return False


def test_a_rank_that_has_gone_on_until_it_is_ended_is_named_with_its_place(tmp_path) -> None:
    log, script = tmp_path / "log.txt", tmp_path / "program.py"
    script.write_text(
        "import os, time\n"
        "def tests():\n"
        "    while os.environ['RANK'] == '0': time.sleep(1)\n"
        "tests()\n"
    )
    options = ["--nproc-per-node", "2", "--cpus", "2", "--timeout", "1", "--log", str(log)]
    command = [sys.executable, str(SCRIPTS / "launch.py"), *options, "--", str(script)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as launch:
        until(lambda: log.exists() and "goes on" in log.read_text())
        (parent,) = [
            process.parent()
            for process in psutil.Process(launch.pid).children(recursive=True)
            if is_rank_0(process, script)
        ]

        def looks() -> float:
            return parent.cpu_times().children_user + parent.cpu_times().children_system

        # What looks where it is has ended once more.
        before = looks()
        until(lambda: looks() > before)
        launch.terminate()
        _, said = launch.communicate()
    place = r"rank 0 on \S+ was in tests \(\S+/program\.py:3\), after rank 1 on \S+ had ended"
    assert re.search(place, said), said
