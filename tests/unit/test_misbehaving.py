"""Programs of the user's that misbehave, started as the rule starts them, on two nodes."""

import errno
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import supervise
from manynodes.base import processes
from manynodes.base.errors import Refusal
from manynodes.launching import agents
from manynodes.launching import logs as logs_of_launch
from manynodes.programs.folders import Folders
from manynodes.schedulers.base import Command
from programs import SCRIPTS, program, python
from waiting import given_enough, until, until_none

RANK = "import os, sys, time, signal; rank = int(os.environ['RANK']);"


class Program:
    """A program on two processes, on one node unless told otherwise, through launch."""

    def __init__(
        self, folder: Path, text: str, command: list[str] | None = None, nodes: int = 1,
        launcher: str = "torchrun", **more: str,
    ):  # fmt: skip
        self.output = folder / "run"
        script = folder / "program.py"
        script.write_text(dedent(text))
        run = {"nodes": nodes, "nproc_per_node": 2 // nodes}
        words = [
            sys.executable, SCRIPTS / "launch.py", "--launcher", launcher, "--nodes", nodes,
            "--cpus", 2, "--nproc-per-node", 2 // nodes,
            "--log", self.output / "train.log",
            "--output", self.output, "--run", json.dumps(run), "--",
            *(command or ["{python}", script]),
        ]  # fmt: skip
        self.output.mkdir(exist_ok=True)
        self.said = (folder / "said.txt").open("w+b")
        self.process = subprocess.Popen(
            [*map(str, words)], stdout=self.said, stderr=subprocess.STDOUT, env=os.environ | more
        )

    @property
    def text(self) -> str:
        return Path(self.said.name).read_text(errors="replace")

    def await_file(self, name: str) -> Path:
        path = self.output / "work" / name
        until(path.exists)
        return path

    def end(self) -> int:
        """Its status; nothing of it is left."""
        status = self.process.wait()
        until_none(self.left)
        return status

    def left(self) -> list[psutil.Process]:
        """Living processes that know the folder of the run."""
        found = []
        for process in psutil.process_iter():
            try:
                known = str(self.output) in process.environ().get("LAUNCH_RESULTS", "")
                if known and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found


def test_the_colours_of_an_error_are_not_told(tmp_path: Path) -> None:
    """Python 3.13 and later write them with FORCE_COLOR."""
    done = launched(
        tmp_path,
        """
        import sys
        sys.stderr.write(
            'Traceback (most recent call last):\\n  File \x1b[35m"a.py"\x1b[0m, line \x1b[35m1'
            '\x1b[0m, in \x1b[35m<module>\x1b[0m\\n    \x1b[1;31mload()\x1b[0m\\n'
            '\x1b[1;35mValueError\x1b[0m: \x1b[35mno file\x1b[0m\\n')
        sys.exit(1)
        """,
        "--output", tmp_path / "run", capture_output=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "ValueError: no file" in done.stderr
    assert "\x1b" not in done.stderr.splitlines()[-1]


def test_a_long_error_is_told_with_its_name_and_its_end(tmp_path: Path) -> None:
    """As of `load_state_dict`, which names every key."""
    script = tmp_path / "long.py"
    script.write_text("raise RuntimeError('Missing: ' + 'key ' * 4000 + 'the last')\n")
    done = program("launch", "--output", tmp_path / "run", "--", "{python}", script)
    assert done.returncode == 1
    assert "RuntimeError: Missing: key " in done.stderr.splitlines()[-1]
    assert " the last" in done.stderr.splitlines()[-1]


def test_a_folder_to_start_in_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "one.py").touch()
    where = ["--output", tmp_path / "run", "--directory", tmp_path / "nosuch"]
    done = program("launch", *where, "--", "{python}", tmp_path / "one.py")
    assert done.returncode == 1
    line = f"{tmp_path}/nosuch is no folder; correct directory (launch alone: --directory)"
    assert line in done.stderr.splitlines()[-1]


def test_a_program_finds_what_the_contract_promises(tmp_path) -> None:
    program = Program(tmp_path, nodes=2, text=f"""
        {RANK}
        import json, launched, pathlib
        assert pathlib.Path.cwd() == launched.results
        assert launched.parameters()["nodes"] == 2
        assert "LAUNCH_SECRET" not in os.environ and "LAUNCH_REPORT" not in os.environ
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
        pathlib.Path(f"rank{{rank}}.json").write_text(json.dumps([os.environ[n] for n in names]))
    """)  # fmt: skip
    assert program.end() == 0, program.text
    ranks = [json.loads((program.output / f"work/rank{n}.json").read_text()) for n in range(2)]
    assert [rank[:3] for rank in ranks] == [["0", "0", "2"], ["1", "0", "2"]]
    assert ranks[0][3:] == ranks[1][3:]


def test_a_crash_is_named_by_its_signal_and_python_tells_where(tmp_path) -> None:
    text = """
        import faulthandler, os, signal
        faulthandler.enable()
        os.kill(os.getpid(), signal.SIGSEGV)
        """
    done = launched(tmp_path, text, "--output", tmp_path / "run", capture_output=True)
    assert done.returncode == 1
    line = r"node 0 on \S+ was ended by SIGSEGV in <module> \(program\.py:4\);"
    assert re.search(line, done.stderr), done.stderr


@pytest.mark.faults
def test_daemons_do_not_outlive_the_program(tmp_path) -> None:
    """Neither those of a finished one nor those of one that was killed."""
    fork = """
        import os, time
        def daemon():
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.closerange(0, 100)
                    time.sleep(1e9)
                os._exit(0)
            os.wait()
        daemon()
        open("ready" + os.environ["RANK"], "w").close()
        """
    program = Program(tmp_path, fork)
    assert program.end() == 0, program.text
    (tmp_path / "other").mkdir()
    program = Program(tmp_path / "other", dedent(fork) + "time.sleep(1e9)\n")
    program.await_file("ready0")
    program.await_file("ready1")
    until(lambda: len(program.left()) >= 4, program.process)
    program.process.send_signal(signal.SIGTERM)
    assert program.end() == 75


@pytest.mark.faults
def test_an_error_is_named_with_rank_host_and_log_and_a_rank_that_ignores_sigterm_is_killed(
    tmp_path,
) -> None:
    program = Program(
        tmp_path,
        f"""
        {RANK}
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"ready{{rank}}", "w").close()
        if rank == 1:
            while not os.path.exists("ready0"):
                time.sleep(0.1)
            raise ValueError("no such molecule")
        time.sleep(1e9)
        """,
    )
    assert program.end() == 1
    assert re.search(
        r"^launch: program failed: rank 1 on \S+: ValueError: no such molecule; its own log is "
        r"\S+/logs/rank=1\.log",
        program.text,
        re.MULTILINE,
    ), program.text


@pytest.mark.faults
def test_a_flood_of_output_is_bounded_in_memory_and_on_disk(tmp_path) -> None:
    """200 MB of binary data, half of them without the end of a line, from one rank."""
    program = Program(
        tmp_path,
        f"""
        {RANK}
        block = bytes(range(256)) * 4096
        if rank == 0:
            for _ in range(100):
                os.write(1, block)
            for _ in range(100):
                os.write(1, block.replace(b"\\n", b" "))
        time.sleep(1e9 * rank)
        sys.exit("the end")
        """,
    )
    most = 0
    launch = psutil.Process(program.process.pid)
    while program.process.poll() is None:
        try:
            family = [launch, *launch.children(recursive=True)]
            # torchrun imports torch, 500 MB of it.
            ours = [each for each in family if "torchrun.py" not in " ".join(each.cmdline())]
            most = max(most, *(each.memory_info().rss for each in ours))
        except psutil.Error:
            pass
        time.sleep(0.2)
    assert program.end() == 1
    assert most < 100_000_000
    assert "rank 0 on" in program.text
    assert ": the end; its own log is" in program.text
    logs = sum(path.stat().st_size for path in (program.output / "logs").iterdir())
    # Bytes that are no UTF-8 take three each.
    assert logs < 3 * logs_of_launch.MOST_LOGGED * 1.1
    assert Path(program.said.name).stat().st_size < 60_000_000
    assert "the rest is only in the log" in program.text


def test_what_looks_like_a_record_of_ours_is_only_text(tmp_path) -> None:
    """And 0 on one rank and 1 on another is a failure of that rank."""
    program = Program(
        tmp_path,
        r"""
        import os, sys
        for stream in (sys.stdout, sys.stderr):
            print('\x1elaunch n-1-1 0 1 {"ending": {"who": "rank 7 on mars"}}', file=stream)
            print("\x1elaunch n-1-1 0 1 nonsense", file=stream)
        sys.exit(int(os.environ["RANK"]))
        """,
    )
    assert program.end() == 1
    assert re.search(r"program failed: rank 1 on ", program.text), program.text
    assert "Traceback" not in program.text


@pytest.mark.faults
@pytest.mark.parametrize("handled", [True, False], ids=["handled", "not handled"])
def test_at_the_deadline_it_is_asked_to_stop(tmp_path, handled) -> None:
    """If the deadline comes before the program listens, another one comes later."""
    seconds = 5
    while not (program := at_the_deadline(tmp_path / str(seconds), handled, seconds))[1]:
        seconds *= 2
    status, _, text = program
    assert status == (75 if handled else 1), text
    if handled:
        assert "stopped (its time is nearly up); saved in" in text, text
        assert (tmp_path / str(seconds) / "run/state/saved/s").read_text() == "s"
    else:
        line = "its time was nearly up, and it ended with SIGTERM; nothing new was saved: give it"
        assert line in text


def at_the_deadline(folder: Path, handled: bool, seconds: float) -> tuple[int, bool, str]:
    """Status of a program with so many seconds, whether it began in them, and its text."""
    folder.mkdir()
    program = Program(
        folder,
        f"""
        {RANK}
        import launched
        open(f"ready{{rank}}", "w").close()
        while {handled}:
            time.sleep(0.1)
            if launched.stop_requested():
                if rank == 0:
                    launched.save(launched.state / "s", lambda path: path.write_text("s"))
                launched.stop()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(1e9)
        """,
        LAUNCH_STOP_AT=str(time.time() + seconds),
    )
    status = program.end()
    ready = [program.output / f"work/ready{rank}" for rank in (0, 1)]
    return status, all(path.exists() for path in ready), program.text


@pytest.mark.faults
def test_another_command_than_python_may_close_its_output(tmp_path) -> None:
    command = "exec >&- 2>&-; sleep 2; echo $RANK > {results}/rank.$RANK"
    program = Program(tmp_path, "", command=["sh", "-c", command])
    assert program.end() == 0, program.text
    assert (program.output / "work/rank.1").read_text() == "1\n"


def test_a_signal_may_come_while_another_is_handled() -> None:
    """At every line of the handler, and of what it calls."""
    code = """
    import signal, sys
    from manynodes.launching.agents import stop_when_signalled

    def interrupt(frame, event, _):
        handling = handling_of(frame)
        if event == "line" and handling:
            signal.raise_signal(signal.SIGTERM)
        return interrupt if handling else None

    def handling_of(frame):
        return frame and (frame.f_code.co_name == "handle" or handling_of(frame.f_back))

    stop = stop_when_signalled()
    sys.settrace(interrupt)
    signal.raise_signal(signal.SIGTERM)
    sys.settrace(None)
    assert stop.asked
    print("handled")
    """
    done = python(code)
    assert (done.stdout, done.stderr) == ("handled\n", "")


def test_a_daemon_that_holds_the_output_open_is_not_waited_for(tmp_path) -> None:
    """But what a child writes shortly after the end of its parent is not lost."""
    away = tmp_path / "away"

    def leaves(does: str) -> str:
        """A command that ends when its child has a session of its own."""
        child = f"setsid sh -c 'touch {away}; {does}'"
        return f"{child} & until test -e {away}; do sleep 0.05; done; rm {away}; echo ended"

    daemon = leaves("exec sleep 3600")
    done = launched(tmp_path, f'import os\nos.system("{daemon}")', capture_output=True)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
    code = """
    import os, sys
    from manynodes.base import processes
    from manynodes.launching import agents
    from manynodes.schedulers.base import Command

    processes.adopt_orphans()
    nowhere = open(os.devnull, "w")
    # Seconds that would not pass in this test: for a child, and for what a daemon holds open.
    for agents.LATE, agents.LATEST, line in ((1e6, 0, sys.argv[1]), (0.1, 1e6, sys.argv[2])):
        command = Command(("sh", "-c", line))
        output, clear = agents.Output(nowhere, nowhere), processes.end_descendants
        outcome = agents.run_all([command], output, agents.Stop(), 5, clear=clear)
        print(outcome.heard_out, flush=True)
    """
    done = python(code, leaves("sleep 0.3; echo late"), daemon)
    assert done.stdout.split() == ["ended", "late", "True", "ended", "True"], done.stderr


def test_closed_streams_and_names_that_are_no_text_hide_no_failure(tmp_path) -> None:
    text = """
    import os, sys
    for number in range(20_000):
        print(number, file=sys.stderr)
    os.write(1, b"here")
    raise ValueError("mine")
    """
    for closed in (">&-", "2>&-", "<&- >&- 2>&-"):
        command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, SCRIPTS / "launch.py"]
        options = ["--launcher", "none", "--rank-logs", os.fsencode(tmp_path) + b"/lo gs\xff"]
        script = tmp_path / "program.py"
        script.write_text(dedent(text))
        log = tmp_path / "log"
        done = subprocess.run([*command, *options, "--log", log, "--", script], capture_output=True)
        assert done.returncode == 1
        assert b"Traceback" not in done.stderr or b"ValueError: mine" in done.stderr
        *_, last = log.read_text().splitlines()
        assert "ValueError: mine; its own log is " in last
        assert last.endswith("/lo gs\\udcff/node=0.log")


def test_a_missing_command_is_refused_in_one_line(tmp_path) -> None:
    where = ["--launcher", "none", "--output", tmp_path / "run"]
    done = program("launch", *where, "--", "no-such-solver")
    assert done.returncode == 1
    assert "no-such-solver: No such file or directory; check program, command" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("both", [True, False])
def test_expressions_that_begin_a_line_find_it_in_both_streams(tmp_path: Path, both: bool) -> None:
    """In the order in which they were printed, and behind a bar that has not ended its line; one
    alone too, if bar and lines have one stream, as with logging.
    """
    script, run = tmp_path / "program.py", tmp_path / "run"
    script.write_text(
        "import sys\n"
        "for epoch in range(200):\n"
        "    print('Epoch', epoch, file=sys.stderr)\n"
        "    print('\\r7it [00:03, 2.33it/s]', end='', file=sys.stderr, flush=True)\n"
        "    print('loss', epoch, flush=True)\n"
        if both
        else "import sys\n"
        "for epoch in range(200):\n"
        "    print('\\r7it [00:03, 2.33it/s]', end='', file=sys.stderr)\n"
        "    print('loss', epoch, 'epoch', epoch, file=sys.stderr)\n"
    )
    patterns = [r"^Epoch (?P<epoch>\d+)", r"^loss (?P<loss>\S+)"]
    one = r"^loss (?P<loss>\S+) epoch (?P<epoch>\d+)"
    reads = {"metrics": {"log": patterns if both else one}}
    where = ["--reads", json.dumps(reads), "--output", run, "--launcher", "none"]
    done = program("launch", *where, "--", "{python}", script)
    assert done.returncode == 0, done.stderr
    rows = (run / "state/metrics.csv").read_text().splitlines()
    assert rows == ["epoch,loss", *[f"{epoch},{epoch}" for epoch in range(200)]]


@pytest.mark.faults
def test_inputs_that_change_meanwhile_end_it_for_good(digits: Path, tmp_path: Path) -> None:
    """What it has saved since comes from other images, so that nothing continues from it."""
    script = tmp_path / "writes.py"
    script.write_text(
        dedent("""
            import os, pathlib, time
            images = pathlib.Path(os.environ["LAUNCH_DATA"], "test_images.npy")
            images.chmod(0o644)
            images.write_bytes(images.read_bytes()[:-1] + b"x")
            pathlib.Path(os.environ["LAUNCH_STATE"], "saved").touch(exist_ok=False)
            time.sleep(600)
        """)
    )
    where = ["--data", digits, "--scratch", tmp_path, "--output", tmp_path / "run"]
    line = r"^launch: .*/test_images.npy on \S+ changed while the program ran; start over"
    for _ in range(2):
        done = program("launch", *where, "--", "{python}", script)
        assert done.returncode == 1
        assert re.search(line, done.stderr, re.MULTILINE), done.stderr


@pytest.mark.parametrize("resume", ["exact", "fresh"])
@pytest.mark.parametrize(
    "name", ["work/x", "evaluation/x", "outputs/x", "logs/x.log", "state/saved/x"]
)
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, name: str, resume: str) -> None:
    script, mine = tmp_path / "one.py", tmp_path / "run" / name
    script.touch()
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    where = ["--output", tmp_path / "run", "--resume", resume, "--launcher", "none"]
    launch = ["launch", *where, "--", "{python}", script]
    done = program(*launch)
    assert done.returncode == 1
    assert "give a folder of its own" in done.stderr
    assert mine.read_text() == "mine"
    assert not (tmp_path / "run/state/request.json").exists()
    # It may lie beside other things.
    mine.rename(tmp_path / "run/mine")
    assert program(*launch).returncode == 0


def test_by_hand_another_program_is_not_taken_for_the_one_that_ended(tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("open('one', 'w').close()\n")
    other.write_text("open('other', 'w').close()\n")
    launch = ["launch", "--output", tmp_path / "run", "--launcher", "none", "--", "{python}"]
    assert program(*launch, one).returncode == 0
    said = program(*launch, one).stderr
    assert "the program has ended before" in said
    assert "with --resume fresh it starts over" in said
    done = program(*launch, other)
    assert done.returncode == 1
    assert "or add --resume anyway or fresh" in done.stderr
    # Long paths leave no room for what it was.
    assert re.search(r"is of another run: command (was|changed)", done.stderr)
    one.write_text("raise ValueError\n")
    assert "the sources changed" in program(*launch, one).stderr


def test_by_hand_a_program_that_only_printed_has_ended_for_the_same_request(tmp_path: Path) -> None:
    """Its lines may be all that is wanted; started again, it would compute them again."""
    script, run, starts = tmp_path / "prints.py", tmp_path / "run", tmp_path / "starts"
    script.write_text(f"open({str(starts)!r}, 'a').write('x')\nprint('epoch 1 loss 0.5')\n")
    launch = ["launch", "--output", run, "--launcher", "none"]
    words = ["--", "{python}", script]
    for given, number in ((words, 1), (words, 1), ([*words, "another"], 2)):
        assert program(*launch, *given).returncode == 0
        assert len(starts.read_text()) == number
        assert len(list((run / "state/printed").iterdir())) == 1


def test_what_has_ended_is_checked_again_without_the_nodes_that_it_took(tmp_path: Path) -> None:
    script, run = tmp_path / "program.py", tmp_path / "run"
    script.write_text("open('left', 'w').close()\n")
    launch = ["--nodes", 2, "--launcher", "none", "--output", run, "--", "{python}", script]
    assert program("launch", "--transport", "local", *launch).returncode == 0
    again = ["launch", "--hosts", "localhost", *launch]
    done = program(*again)
    assert done.returncode == 0, done.stderr
    assert "the program has ended before" in done.stderr
    # What its job stages before serves nobody, and nothing else is needed on other nodes.
    files = ["--name", "x", "--output", tmp_path / "files"]
    assert program("collect", "--files", script, *files, "--content", "").returncode == 0
    stage = ["--nodes", 2, "--launcher", "none", "--collect", run / "staging.json", "--",
             SCRIPTS / "stage.py", "--files", tmp_path / "files"]  # fmt: skip
    done = program("launch", "--hosts", "localhost", *stage)
    assert done.returncode == 0, done.stderr
    # With nothing but what it has printed, or what lies elsewhere, it has ended too; but nothing of
    # it stands in the way of another.
    (run / "work/left").unlink()
    assert "the program has ended before" in program(*again).stderr
    for other in ([*again, "x"], [*again[:1], "--resume", "fresh", *again[1:]]):
        assert "nodes: the run wants 2, hosts has 1" in program(*other).stderr


def test_by_hand_a_repaired_program_that_had_saved_nothing_starts_over(tmp_path: Path) -> None:
    script, run = tmp_path / "program.py", tmp_path / "run"
    script.write_text("open('run.log', 'w').close()\nraise ValueError('first')\n")
    reads = ["--reads", json.dumps({"snapshots": ["ck/*.pt"]})]
    launch = ["launch", "--output", run, "--launcher", "none", *reads, "--", "{python}", script]
    assert "ValueError: first" in program(*launch).stderr
    script.write_text("import os\nassert not os.path.exists('run.log')\n")
    done = program(*launch)
    assert done.returncode == 0, done.stderr
    line = r"^launch: starts over: the sources changed, and nothing is saved, .*/earlier/1$"
    assert re.search(line, done.stderr, re.MULTILINE), done.stderr
    assert (run / "state/earlier/1/run.log").exists()


def launched(folder: Path, text: str, *options: object, **how: Any) -> subprocess.CompletedProcess:
    """A program that runs once, through launch, to its end."""
    script = folder / "program.py"
    script.write_text(dedent(text))
    command = [SCRIPTS / "launch.py", "--launcher", "none", *options, "--"]
    if "--output" in options:
        command.append(sys.executable)
    return subprocess.run([sys.executable, *map(str, [*command, script])], text=True, **how)


def test_output_that_nobody_takes_ends_nothing(tmp_path) -> None:
    """A full disk, or a reader that has gone; and a restart is told there."""
    with Path("/dev/full").open("w") as full:
        done = launched(
            tmp_path,
            """
            import sys, launched
            first = not (launched.state / "here").exists()
            launched.save(launched.state / "here", lambda path: path.write_text("saved"))
            for number in range(3):
                print(number, "x" * 100_000, flush=True)
                print(number, file=sys.stderr, flush=True)
            if first:
                raise ValueError("once")
            launched.save("over", lambda path: path.touch())
            """,
            *("--restart", "--output", tmp_path / "run", "--log", tmp_path / "run/log"),
            stdout=full,
            stderr=full,
        )
    assert done.returncode == 0
    assert (Folders(tmp_path / "run").work / "over").exists()


def test_a_scheduler_s_warning_ends_no_program(tmp_path) -> None:
    """It goes to all processes of a step; `supervise` asks the program to stop instead."""
    text = """
    import os, signal
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR2)
    print("alive", "LAUNCH_SECRET" in os.environ)
    """
    done = launched(tmp_path, text, "--output", tmp_path / "run", capture_output=True)
    assert (done.returncode, done.stdout) == (0, "alive False\n"), done.stderr


@pytest.mark.parametrize(("saves", "killed", "told"), [
    (False, False,
     "stopped; run the same command again; nothing is saved, or named in snapshots"),
    (True, False, r"stopped \(SIGTERM\) with SIGTERM; saved in \S+; run the same command again"),
    # As one whose handler waits for ever is after a while.
    (True, True,
     r"stopped \(SIGTERM\) with SIGKILL; saved in \S+; node [01] on \S+ did not end by itself, and "
     "was killed; run the same command again"),
], ids=["saves nothing", "saves", "is killed"])  # fmt: skip
def test_asked_to_stop_it_tells_whether_the_same_command_starts_over(
    tmp_path: Path, saves: bool, killed: bool, told: str
) -> None:
    text = f"""
    import os, signal, time
    if {killed}:
        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    if {saves}:
        open(os.environ["LAUNCH_STATE"] + "/s", "w").close()
    open("begun" + os.environ["LAUNCH_NODE_RANK"], "w").close()
    time.sleep(1e9)
    """
    program = Program(tmp_path, text, nodes=2, launcher="none")
    for node in (0, 1):
        program.await_file(f"begun{node}")
    program.process.terminate()
    assert program.end() == 75
    line = rf"^launch: program was interrupted: {told}; see \S+/train\.log$"
    assert re.search(line, program.text, re.MULTILINE), program.text


@pytest.mark.parametrize("how", ["raise OSError(28, 'full')", "os._exit(9)"])
def test_a_save_that_does_not_end_is_none(tmp_path, how) -> None:
    text = f"""
    import os, time, launched

    def write(path):
        path.write_text("half")
        time.sleep(2)
        {how}

    launched.save(launched.state / "last.pt", write)
    """
    for _ in range(2):
        done = launched(
            tmp_path, text, "--restart", "--output", tmp_path / "run", capture_output=True
        )
        assert done.returncode == 1
        assert "starting again" not in done.stderr
    left = [path.name for path in (tmp_path / "run/state/saved").iterdir()]
    assert len(left) == (how == "os._exit(9)"), left


def test_a_program_of_launch_alone_is_told_that_its_time_is_up(tmp_path) -> None:
    listens = tmp_path / "listens"

    def until_stopped(stop: str, *options: str) -> subprocess.CompletedProcess:
        listens.unlink(missing_ok=True)
        text = f"""
    import os, pathlib, signal, sys, time
    {stop}
    pathlib.Path({str(listens)!r}).touch()
    time.sleep(1000)
    """

        def with_seconds(seconds: float) -> subprocess.CompletedProcess:
            soon = os.environ | {"LAUNCH_STOP_AT": str(time.time() + seconds)}
            return launched(tmp_path, text, *options, env=soon, capture_output=True)

        return given_enough(4, with_seconds, listens.exists)

    done = until_stopped("signal.signal(15, lambda *_: (print('saved'), sys.exit(75)))")
    assert (done.returncode, done.stdout) == (75, "saved\n"), done.stderr
    # The peer of one that still saves has no say.
    slow = "signal.signal(15, lambda *_: (time.sleep(2), os._exit(75)))"
    first = "os.environ['LAUNCH_NODE_RANK'] == '0' or time.sleep(1000)"
    done = until_stopped(f"{first}; {slow}", "--nodes", "2")
    assert done.returncode == 75, done.stderr
    done = until_stopped("")
    assert done.returncode == 1
    assert "its time was nearly up, and it did not end with 75: give it more time" in done.stderr
    done = until_stopped("signal.signal(15, lambda *_: sys.exit())")
    assert done.returncode == 1
    assert "its time was nearly up, and it ended with status 0, not with 75:" in done.stderr


@pytest.mark.parametrize("ends", ["raise ValueError('x')", "sys.exit('program: x')"])
def test_a_program_s_own_log_lines_are_no_refusals_and_it_may_add_to_its_report(
    tmp_path, ends
) -> None:
    text = f"""
    import os, sys
    from pathlib import Path
    for epoch in (1, 2):
        print("program: epoch", epoch, file=sys.stderr)
        with Path(os.environ["LAUNCH_REPORT"]).open("a") as report:
            print('{{"refused": "epoch ' + str(epoch) + '"}}', file=report)
    {ends}
    """
    log = tmp_path / "log"
    how = os.environ | {"PYTHONWARNINGS": "error"}
    done = launched(tmp_path, text, "--log", log, env=how, capture_output=True)
    assert done.returncode == 1
    said = "ValueError: x" if "raise" in ends else "x"
    assert re.search(rf"^launch: program failed: node 0 on \S+: {said}; see ", done.stderr, re.M)
    assert json.loads((tmp_path / "failure.json").read_text())["kind"] == "refused"
    # Of ours, none leaves a pipe to be closed.
    assert "ResourceWarning" not in done.stderr


@pytest.mark.parametrize(
    ("report", "kind"),
    [
        (b'{"saved": "step 1", "stopped": null, "refused": false}', "failed"),
        (b'{"saved": "\xe9tape 3"}', "failed"),
        (b"[" * 100_000, "failed"),
        (b'{"refused": true}', "refused"),
    ],
)
def test_of_a_report_only_what_is_said_counts(tmp_path, report: bytes, kind: str) -> None:
    (tmp_path / "report").write_bytes(report)
    text = f"""
    import os, shutil, sys
    shutil.copyfile({str(tmp_path / "report")!r}, os.environ["LAUNCH_REPORT"])
    sys.exit(4)
    """
    done = launched(tmp_path, text, "--log", tmp_path / "log", capture_output=True)
    assert done.returncode == 1
    assert re.search(
        r"^launch: program failed: node 0 on \S+ ended with status 4", done.stderr, re.M
    )
    assert json.loads((tmp_path / "failure.json").read_text())["kind"] == kind


def test_a_failure_before_a_request_to_stop_is_known_as_the_first(tmp_path) -> None:
    waits = "import time; time.sleep(1000)"
    for text, before in (("raise SystemExit(3)", True), (waits, False)):
        stop = agents.Stop()

        def look(_pid: int, last: bool, stop: agents.Stop = stop, waits: bool = not before) -> None:
            stop.asked = last or waits

        commands = [Command((sys.executable, "-c", each)) for each in (text, waits)]
        with (tmp_path / "log").open("w") as log:
            outcome = agents.run_all(commands, agents.Output(log, log), stop, 5, look=look)
        assert outcome.stopped
        assert (outcome.asked > time.time()) == before


def test_a_name_may_be_cut_in_a_character(tmp_path) -> None:
    """The kernel keeps 15 bytes."""
    program = tmp_path / "abcdefghijklmnéx"
    program.symlink_to(shutil.which("sleep"))
    with subprocess.Popen([program, "1000"]) as process:
        try:
            until(lambda: b"abcdef" in Path(f"/proc/{process.pid}/stat").read_bytes())
            assert process.pid in processes.descendants(os.getpid())
        finally:
            process.kill()


def test_lines_that_come_at_once_are_written_at_once() -> None:
    class Log(io.StringIO):
        def flush(self) -> None:
            flushed.append(self.getvalue())

    flushed: list[str] = []
    log, (reader, writer) = Log(), os.pipe()
    os.write(writer, b"line\n" * 1000 + b"rest")
    os.close(writer)
    agents.copy_output(os.fdopen(reader, "rb", 0), Command(("x",)), agents.Output(log, log), True)
    assert flushed == ["line\n" * 1000, "line\n" * 1000 + "rest\n"]


def test_a_log_is_flushed_by_one_thread_while_another_replaces_its_file(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(logs_of_launch, "MOST_LOGGED", 20)
    errors = []
    with logs_of_launch.Log(tmp_path / "log") as log:

        def flush() -> None:
            try:
                for _ in range(20_000):
                    log.flush()
            except ValueError as error:
                errors.append(error)

        thread = threading.Thread(target=flush)
        thread.start()
        while thread.is_alive():
            log.write("a line\n")
    assert not errors


def test_a_log_goes_on_if_it_gets_no_new_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(logs_of_launch, "MOST_LOGGED", 20)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with logs_of_launch.Log(tmp_path / "log") as log:
        log.write("first line\n")
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                log.write("second line\n")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        log.write("third line\n")
        log.flush()
    assert (tmp_path / "log.old").read_text() == "first line\nthird line\n"


def test_the_group_of_a_command_is_killed_at_its_end_and_its_number_is_then_let_alone(
    tmp_path, monkeypatch
) -> None:
    """The second command runs for long; the number may be another group's by then."""
    kill, left = os.killpg, tmp_path / "left"

    def still_its_own(group: int, number: int) -> None:
        assert Path(f"/proc/{group}").exists()
        kill(group, number)

    monkeypatch.setattr(os, "killpg", still_its_own)
    starts = f"sleep 1000 >/dev/null 2>&1 & echo $! >{left}.new; mv {left}.new {left}"
    lives = f"grep -q ') [SR] ' /proc/$(cat {left})/stat"
    waits = f"until test -e {left}; do sleep 0.1; done; while {lives}; do sleep 0.1; done"
    commands = [("sh", "-c", starts), ("sh", "-c", waits)]
    with (tmp_path / "log").open("w") as log:
        outcome = agents.run_all(
            [Command(each) for each in commands], agents.Output(log, log), agents.Stop(), 5
        )
    assert (outcome.failed, outcome.stopped) == (None, False)


def test_a_process_that_may_not_be_killed_is_no_failure_and_the_others_are(monkeypatch) -> None:
    """What sudo has started, say."""
    kill, foreign = os.kill, -1

    def refused(pid: int, number: int) -> None:
        if pid == foreign:
            raise PermissionError(1, "Operation not permitted")
        kill(pid, number)

    monkeypatch.setattr(os, "kill", refused)
    # For the foreign one, it would wait.
    monkeypatch.setattr(processes, "MOST_SECONDS", 1e9)
    with subprocess.Popen(["sleep", "1000"]) as own:
        try:
            processes.end_all(lambda: [foreign, *([own.pid] if own.poll() is None else [])])
            assert own.wait() == -signal.SIGKILL
        finally:
            own.kill()


def test_a_node_that_has_too_many_processes_now_is_no_wrong_program(monkeypatch) -> None:
    def look() -> None:
        pass

    def run_with(error: OSError) -> None:
        def fails(*_arguments: Any, **_options: Any) -> None:
            raise error

        monkeypatch.setattr(supervise, "run_all", fails)
        supervise.run_ready(rank, None, agents.Output(log, log), print, agents.Stop())

    monkeypatch.setattr(supervise, "listen", lambda _stop_at: None)
    monkeypatch.setattr(supervise, "end_descendants", look)
    rank, log = SimpleNamespace(rows=None, command=None, look=look), sys.stdout
    with pytest.raises(BlockingIOError, match="could not be run: Resource temporarily unavail"):
        run_with(BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)))
    with pytest.raises(Refusal, match="nowhere: No such file or directory; check program"):
        run_with(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "nowhere"))
