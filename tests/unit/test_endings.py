"""Which failure came first, and which last lines of a process say why. The lines were seen."""

import os
import signal
import subprocess
import sys
import time

import pytest

from manynodes.base.processes import MOST_CHARACTERS, how, last_words
from manynodes.launching.endings import Ending, cause, ending, marked, record_lines, records
from programs import SCRIPTS

GLOO = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection "
    "closed by peer [10.77.0.12]:41264"
)
WARNING = (
    "[W1121 06:01:02.123456789 ProcessGroup.cpp:12] Warning: destroy_process_group() was not called"
)


def test_a_lost_peer_is_a_consequence_however_early() -> None:
    killed = Ending("rank 1", "n2", -9, 10.2)
    peer = Ending("rank 0", "n1", 1, 10.1, lines=("Traceback (most recent call last):", GLOO))
    raised = Ending("rank 2", "n3", 1, 10.0, lines=("ValueError: x",))
    assert cause([peer, killed]) == killed
    assert cause([peer, killed, raised]) == raised
    assert cause([peer]) == peer


def test_endings_survive_the_way_through_srun() -> None:
    """srun labels each line, mixes the lines of its tasks, and breaks long ones."""
    sent = [
        Ending("rank 1", "n2", 1, 1.5, lines=("a: b", "ö" * 3000), log="results/logs/rank=1.log"),
        Ending("rank 0", "n1", -9, 2.5),
    ]
    one, other = ([f"12: {line}" for line in record_lines(ending.record())] for ending in sent)
    assert all(map(marked, one + other))
    assert max(map(len, one)) < 1024
    mixed = [one[0], *other, *one[1:]]
    assert [ending(found["ending"]) for found in records(mixed)] == sent
    assert [ending(found["ending"]) for found in records([*one[:-1], *other])] == sent[1:]


def test_a_record_is_whole_after_a_long_line_that_has_not_ended() -> None:
    """srun breaks that after 1024 bytes."""
    program = "import os; from manynodes.launching.endings import send; "
    program += "os.write(2, b'x' * 1000); send({'finished': 'rank 1 on n2'})"
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = done.stderr.removesuffix("\n").split("\n")
    broken = [f"1: {line[at : at + 1024]}" for line in lines for at in range(0, len(line), 1024)]
    assert records(broken) == [{"finished": "rank 1 on n2"}]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_endings_sent_at_the_same_time_stay_apart(unbuffered) -> None:
    """Like those of all ranks of a node that stop together and share a pipe."""
    each, senders = 3000, 3
    program = (
        f"from manynodes.launching.endings import send\nfor number in range({each}): "
        f"send({{'number': number, 'rest': 600 * 'x'}})"
    )
    read, write = os.pipe()
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered, "PYTHONPATH": str(SCRIPTS)}
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stderr=write, env=environment)
        for _ in range(senders)
    ]
    os.close(write)
    with open(read, encoding="utf-8") as pipe:
        found = records(pipe)
    assert [process.wait() for process in processes] == senders * [0]
    assert sorted(record["number"] for record in found) == sorted(senders * list(range(each)))


def test_other_lines_are_no_records() -> None:
    assert not any(map(marked, ("", "launch {}", "0: epoch 1/3")))


def test_last_words_of_a_traceback_are_the_traceback() -> None:
    lines = [
        "warming up",
        "[rank1]: Traceback (most recent call last):",
        "[rank1]:   1 / 0",
        "[rank1]: ZeroDivisionError: x",
        WARNING,
        "",
    ]
    assert last_words(lines, "train") == (
        "Traceback (most recent call last):",
        "  1 / 0",
        "ZeroDivisionError: x",
    )


def test_an_error_with_several_lines_is_named_by_its_first() -> None:
    lines = ["Traceback (most recent call last):", '  File "a.py", line 1, in <module>',
             "ValueError: the first line", "  and more", "the last line"]  # fmt: skip
    ending = Ending("rank 1", "n2", 1, 1.0, lines=tuple(lines))
    assert ending.error == "rank 1 on n2: ValueError: the first line"


@pytest.mark.parametrize(("message", "told"), [
    # Of torch, pydantic and multiprocessing.
    (["RuntimeError: Error(s) in loading state_dict for Net:", "\tMissing key(s): a.", "\tsize b."],
     "RuntimeError: Error(s) in loading state_dict for Net: Missing key(s): a. size b."),
    (["pydantic.ValidationError: 1 validation error for Model", "x", "  Input should be an int"],
     "pydantic.ValidationError: 1 validation error for Model x Input should be an int"),
    (["RuntimeError: ", "        An attempt", "        has been made."],
     "RuntimeError: An attempt has been made."),
    (["ValueError: these:"], "ValueError: these:"),
    (["IndexError: Caught IndexError in DataLoader worker process 0.",
      "Original Traceback (most recent call last):", '  File "w.py", line 1, in f', "    f(n)",
      "IndexError: sample 0 is broken"], "IndexError: sample 0 is broken"),
])  # fmt: skip
def test_a_first_line_that_only_announces_is_followed_by_its_reason(message, told) -> None:
    frames = [line for _ in range(30) for line in ('  File "a.py", line 1, in f', "    f(n)")]
    later = ["a.py:1: UserWarning: leaked", "  warnings.warn()"] if len(message) > 1 else []
    lines = last_words(["Traceback (most recent call last):", *frames, *message, *later], "")
    assert Ending("rank 1", "n2", 1, 1.0, lines=lines).error == f"rank 1 on n2: {told}"


def test_of_a_message_of_any_length_the_beginning_is_told() -> None:
    missing = "\tMissing key(s): " + ", ".join(f'"layer{number}"' for number in range(1000))
    said = ["Traceback (most recent call last):", "  File", "RuntimeError: in Net:", missing]
    ending = Ending("rank 1", "n2", 1, 1.0, lines=last_words(said, ""))
    assert ending.error.startswith('rank 1 on n2: RuntimeError: in Net: Missing key(s): "layer0"')
    assert len(ending.error) < 300


def test_an_error_without_a_message_is_named_by_its_place() -> None:
    lines = ("Traceback (most recent call last):", '  File "/a/b.py", line 9, in <module>',
             "    load(3)", '  File "/a/c.py", line 1, in load', "    assert n == 3 or n > 4",
             "           ^^^^^^^^^^^^^^^", "AssertionError")  # fmt: skip
    assert Ending("rank 1", "n2", 1, 1.0, lines=lines).error == (
        "rank 1 on n2: AssertionError in load (c.py:1): assert n == 3 or n > 4"
    )
    # Without its source.
    lines = (lines[0], lines[3], "KeyError")
    assert Ending("rank 1", "n2", 1, 1.0, lines=lines).error.endswith("KeyError in load (c.py:1)")


def test_last_words_of_a_refusal_are_its_line() -> None:
    assert last_words(
        ["Traceback (most recent call last):", "train: epochs: too few", WARNING], "train"
    ) == ("epochs: too few",)


RAISED = ("Traceback (most recent call last):", '  File "a.py", line 3, in <module>', "    main()")
CAUGHT = ("ERROR:root:retrying", RAISED[0], '  File "a.py", line 9, in get', "    fetch()")


def test_an_error_that_python_only_ignores_is_not_the_one_that_ended_it() -> None:
    ignored = ["Exception ignored in: <function Pool.__del__ at 0x7f5b>", RAISED[0],
               '  File "pool.py", line 8, in __del__', "AttributeError: 'close'"]  # fmt: skip
    thread = ["Exception in thread Thread-1 (send):", RAISED[0],
              '  File "threading.py", line 1, in _bootstrap_inner', "KeyError: 'a'", "",
              "During handling of the above exception, another exception occurred:", "",
              RAISED[0], '  File "a.py", line 1, in send', "OSError: full"]  # fmt: skip
    real = [*RAISED, "RuntimeError: the loss is nan"]
    assert last_words([*thread, *real, *ignored], "") == tuple(real)
    assert last_words([*real, *ignored, *thread], "") == tuple(real)
    assert last_words(["loading", *ignored], "") == tuple(ignored[1:])
    # Without a message, it is told where that one was raised.
    silent = last_words([*RAISED, "AssertionError", *ignored], "")
    assert Ending("rank 1", "n2", 1, 1.0, lines=silent).error.endswith("(a.py:3): main()")


@pytest.mark.parametrize("later", [
    ["a.py:9: UserWarning: leaked", "  warnings.warn()"], [WARNING],
    # Of an error in a hook of torch's.
    ["Exception raised from wait at a.cc:9 (most recent call first):", "frame #0: f", "", "At:",
     "  /a.py(9): hook"],
    ["make: *** [Makefile:2: train] Error 1"],
])  # fmt: skip
@pytest.mark.parametrize(("status", "traceback", "fatal"), [
    (3, [*CAUGHT, "OSError: try 1"], True), (3, [*RAISED, "OSError: try 1"], True),
    (1, [*CAUGHT, "OSError: try 1"], False), (1, [*RAISED, "OSError: try 1"], False),
    (-6, [*RAISED, "OSError: try 1"], False),
])  # fmt: skip
def test_an_error_that_the_program_has_survived_is_not_the_one_that_ended_it(
    status, traceback, fatal, later
) -> None:
    start = traceback.index(RAISED[0])
    words = last_words(["a", *traceback, "fatal: the folder is full", *later], "", status)
    if fatal:
        assert words == ("fatal: the folder is full",)
    assert last_words([*traceback, *later], "", status)[: len(traceback) - start] == tuple(
        traceback[start:]
    )
    assert fatal or words[: len(traceback) - start] == tuple(traceback[start:])


def test_of_a_group_of_errors_the_first_one_is_told() -> None:
    """As Python prints it."""
    program = (
        "import asyncio\n"
        "async def read(shard):\n"
        "    if shard == 9:\n"
        "        async with asyncio.TaskGroup() as group:\n"
        "            group.create_task(read(7))\n"
        "    raise ValueError(f'shard {shard} is damaged')\n"
        "async def main(shard):\n"
        "    async with asyncio.TaskGroup() as group:\n"
        "        group.create_task(read(shard))\n"
        "        group.create_task(read(8))\n"
        "asyncio.run(main(SHARD))\n"
    )
    for shard in (7, 9):
        text = program.replace("SHARD", str(shard))
        done = subprocess.run(
            [sys.executable, "-c", text], check=False, capture_output=True, text=True
        )
        assert "  + Exception Group Traceback" in done.stderr
        words = last_words(["begun", *done.stderr.splitlines()], "")
        told = Ending("rank 1", "n2", 1, 1.0, lines=words).error
        shard = 7 if shard == 7 else 8
        assert told == f"rank 1 on n2: ValueError: shard {shard} is damaged", done.stderr
        assert "in <module>" in words[1]
        assert words[-1].endswith("is damaged")


@pytest.mark.parametrize(("group", "told"), [
    ("'several', [ValueError('a is bad'), TypeError('b')]", "ValueError: a is bad"),
    ("'several', [ExceptionGroup('in it', [ValueError('deep\\nmore')]), TypeError('b')]",
     "ValueError: deep"),
    ("'several', [KeyError(), TypeError('b')]", "KeyError in <module> (<string>:1)"),
])  # fmt: skip
def test_of_a_group_of_errors_that_were_never_raised_the_first_one_is_told(group, told) -> None:
    """As Python prints it."""
    code = f"raise ExceptionGroup({group})"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    said = [f"[rank1]: {line}" for line in done.stderr.splitlines()]
    lines = last_words(["begun", *said], "")
    assert Ending("rank 1", "n2", 1, 1.0, lines=lines).error == f"rank 1 on n2: {told}", said


def test_a_status_that_is_no_error_of_python_s_is_told() -> None:
    bar = "Epoch 1: 100%|##########| 2/2 [00:02<00:00,  1.0s/it]"
    for status, line, told in (
        (3, bar, f"ended with status 3; it last said: {' '.join(bar.split())}"),
        (1, bar, f"ended with status 1; it last said: {' '.join(bar.split())}"),
        (137, "a", "ended with status 137, which is SIGKILL; the system does that when memory runs "
                   "out; it last said: a"),
        (3, "", "ended with status 3"),
    ):  # fmt: skip
        lines = last_words([line] if line else [], "", status)
        assert Ending("rank 1", "n2", status, 1.0, lines=lines).error == f"rank 1 on n2 {told}"
    assert Ending("rank 1", "n2", 1, 1.0, lines=("a",)).error == "rank 1 on n2: a"


def test_a_connection_of_the_program_s_own_is_no_peer_but_perhaps_to_one() -> None:
    download = Ending("rank 0", "n1", 1, 1.0, lines=(
        *RAISED, "ConnectionResetError: [Errno 104] Connection reset by peer"))  # fmt: skip
    config = "ValueError: NCCL_SOCKET_IFNAME must be set in config.yaml"
    own = Ending("rank 1", "n2", 1, 1.1, lines=(*RAISED, config))
    ended = Ending("rank 0", "n1", 1, 1.0, lines=(*RAISED, "EOFError"))
    assert not any(each.lost_a_peer for each in (download, own, ended))
    assert cause([ended, own]) == own
    damaged = Ending("rank 0", "n1", 1, 1.0, lines=(*RAISED, "EOFError: Ran out of input"))
    assert cause([damaged, own]) == damaged
    assert cause([download]) == download
    gloo = Ending("rank 1", "n2", 1, 0.9, lines=(*RAISED, GLOO))
    assert cause([download, gloo]) == download


def test_last_words_are_few() -> None:
    words = last_words([f"line {number} " + 100 * "x" for number in range(60)], "train")
    assert words[-1].startswith("line 59 ")
    assert sum(map(len, words)) <= MOST_CHARACTERS


def test_how_a_status_is_told() -> None:
    assert (how(3), how(-15)) == ("ended with status 3", "was ended by SIGTERM")
    assert how(-9) == "was ended by SIGKILL; the system does that when memory runs out"


def test_a_supervisor_tells_how_its_rank_failed_even_if_it_is_told_to_end_meanwhile(
    tmp_path,
) -> None:
    """torchrun ends all supervisors once it sees a rank fail, here between the end of this one and
    the record of it.
    """
    program = tmp_path / "program.py"
    program.write_text("raise SystemExit(3)")
    ended = (
        "import os, signal, supervise\n"
        "supervise.end_descendants = lambda: os.kill(os.getpid(), signal.SIGTERM)\n"
        "supervise.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", ended, str(program)], check=False, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(SCRIPTS), "RANK": "1"},
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    (record,) = records(done.stderr.split("\n"))  # splitlines would split at the mark too
    assert record["ending"]["status"] == 3


@pytest.mark.parametrize(("before", "told"), [
    ("", "was ended by SIGABRT (terminate called without an active exception): "
     "end the program with torch.distributed.destroy_process_group()"),
    # As Python prints it before it ends.
    ("import sys\ntry: raise ValueError('mine')\n"
     "except ValueError: sys.excepthook(*sys.exc_info())\n", ": ValueError: mine"),
])  # fmt: skip
def test_a_program_that_ends_with_its_process_group_is_told_why(tmp_path, before, told) -> None:
    """In C++'s own words, here without the race of torch's that leads to them."""
    program = tmp_path / "program.py"
    program.write_text(before + "import ctypes; ctypes.CDLL('libstdc++.so.6')._ZSt9terminatev()")
    done = subprocess.run(
        [sys.executable, SCRIPTS / "supervise.py", program], check=False, capture_output=True,
        text=True, env=os.environ | {"PYTHONPATH": str(SCRIPTS), "RANK": "1"},
    )  # fmt: skip
    *_, record = records(done.stderr.split("\n"))
    assert record["ending"]["status"] == -signal.SIGABRT
    assert Ending(**record["ending"]).error.endswith(told)


def test_a_supervisor_tells_the_time_of_an_end_by_the_clock_of_rank_0_s_node(tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text("raise SystemExit(3)")
    done = subprocess.run(
        [sys.executable, SCRIPTS / "supervise.py", program], check=False, capture_output=True,
        text=True, env=os.environ | {"RANK": "1", "LAUNCH_AHEAD": "1000"},
    )  # fmt: skip
    (record,) = records(done.stderr.split("\n"))
    assert abs(time.time() - 1000 - record["ending"]["time"]) < 500
