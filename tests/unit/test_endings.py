"""Which failure came first, and which last lines of a process say why. The lines were seen."""

import os
import signal
import subprocess
import sys
import time

import pytest

from manynodes.base.processes import MOST_CHARACTERS, how, last_words
from manynodes.launching.endings import Ending, cause, marked, record_lines, records
from manynodes.programs.folders import Folders
from manynodes.programs.task import Task
from programs import SCRIPTS, python

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
        Ending("rank 1", "n2", 1, 1.5, lines=["a: b", "ö" * 3000], log="results/logs/rank=1.log"),
        Ending("rank 0", "n1", -9, 2.5, lines=[]),
    ]
    one, other = ([f"12: {line}" for line in record_lines(ending.record())] for ending in sent)
    assert all(map(marked, one + other))
    assert max(map(len, one)) < 1024
    mixed = [one[0], *other, *one[1:]]
    assert [Ending(**found["ending"]) for found in records(mixed)] == sent
    assert [Ending(**found["ending"]) for found in records([*one[:-1], *other])] == sent[1:]


def test_a_record_is_whole_after_a_long_line_that_has_not_ended() -> None:
    """srun breaks that after 1024 bytes."""
    program = "import os; from manynodes.launching.endings import send; "
    program += "os.write(2, b'x' * 1000); send({'finished': 'rank 1 on n2'})"
    lines = python(program).stderr.removesuffix("\n").split("\n")
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
    # The frames of a crash later are none of its own.
    crashed = ("Fatal Python error: Aborted", "Current thread 0x7f (most recent call first):")
    lines = (*lines, *crashed, '  File "/a/d.py", line 5 in wait')
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


KILLED = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. "
GONE = "RuntimeError: DataLoader worker (pid(s) 7, 9) exited unexpectedly"
CAUSED = "The above exception was the direct cause of the following exception:"
# What Python prints of an error when the handler of a signal raises another one meanwhile.
DUMPED = [
    "    main()object address  : 0x7f07d95c96c0",
    "object refcount : 2",
    "object type     : 0x7f07d9e4fee0",
    "object type name: RuntimeError",
    f"object repr     : RuntimeError('{KILLED.partition(': ')[2]}')",
    "lost sys.stderr",
]


@pytest.mark.parametrize("lines", [
    [*RAISED, KILLED, "", CAUSED, "", *RAISED, GONE], [*RAISED[:2], *DUMPED], DUMPED[1:],
    [*RAISED, KILLED, "", CAUSED, "", *RAISED[:2], *DUMPED],
])  # fmt: skip
def test_a_killed_process_that_loads_data_is_told_with_its_signal(lines) -> None:
    told = Ending("rank 1", "n2", 1, 1.0, lines=last_words(["begun", *lines], "")).error
    assert told == f"rank 1 on n2: {KILLED.rstrip()}"
    own = "object type of sample 3: dict is not supported"
    assert last_words([own], "", 2) == (own,)


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
        done = python(program.replace("SHARD", str(shard)))
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
    done = python(f"raise ExceptionGroup({group})")
    said = [f"[rank1]: {line}" for line in done.stderr.splitlines()]
    lines = last_words(["begun", *said], "")
    assert Ending("rank 1", "n2", 1, 1.0, lines=lines).error == f"rank 1 on n2: {told}", said


STACK = ['  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at',
         '  File "/home/me/train.py", line 28 in <module>']  # fmt: skip
THROWN = ["terminate called after throwing an instance of 'std::runtime_error'",
          "  what():  bad shard header"]  # fmt: skip
THREAD = "Thread 0x00007f239cd136c0 (most recent call first):"
CURRENT = "Current thread 0x00007f65af1e4b80 (most recent call first):"
IMPORTED = "Extension modules: numpy._core._multiarray_umath, torch._C (total: 50)"
ABORTED = "Fatal Python error: Aborted"
SEGMENTATION = "Fatal Python error: Segmentation fault"
FAILED_CHECK = "Check failed: shard < n (5 vs. 4) (loader.cc:44)"


@pytest.mark.parametrize(("status", "lines", "told"), [
    (-6, THROWN, "was ended by SIGABRT: what(): bad shard header"),
    (-6, [THROWN[0], WARNING, "  what():  "], f"was ended by SIGABRT: {THROWN[0]}"),
    (-6, [*RAISED, "OSError: try 1", *THROWN], "was ended by SIGABRT: what(): bad shard header"),
    (134, THROWN, "ended with status 134, which is SIGABRT: what(): bad shard header"),
    (-6, ["F1129 00:11:22.333 4711 loader.cc:44] Check failed: shard < n (5 vs. 4) ",
          "*** Check failure stack trace: ***", *60 * ["    @     0x7f  (unknown)"]],
     f"was ended by SIGABRT: {FAILED_CHECK}"),
    (-6, ["2026-11-29 01:00:00.1: F tensorflow/core/x.cc:12] Check failed: a == b (1 vs 2)"],
     "was ended by SIGABRT: Check failed: a == b (1 vs 2) (tensorflow/core/x.cc:12)"),
    (-6, ["python: a.cc:7: void f(int): Assertion `k == 1' failed."],
     "was ended by SIGABRT: python: a.cc:7: void f(int): Assertion `k == 1' failed."),
    (-6, ["double free or corruption (top)", ABORTED, "", CURRENT, STACK[1]],
     "was ended by SIGABRT in <module> (train.py:28): double free or corruption (top)"),
    (-11, [SEGMENTATION, "", CURRENT, *STACK, "", IMPORTED],
     "was ended by SIGSEGV in <module> (train.py:28)"),
    # Longer than what is kept of a traceback, and with another thread.
    (-11, [SEGMENTATION, "", THREAD, *STACK, "", CURRENT, '  File "net.py", line 6 in forward',
           *100 * STACK, "", IMPORTED], "was ended by SIGSEGV in forward (net.py:6)"),
    (-6, ["Fatal Python error: none_dealloc: deallocating None", CURRENT, STACK[0]],
     "was ended by SIGABRT in string_at (__init__.py:519): "
     "Fatal Python error: none_dealloc: deallocating None"),
    (-11, [SEGMENTATION, "", CURRENT, "  Garbage-collecting", "  <no Python frame>"],
     "was ended by SIGSEGV"),
    (-11, ["epoch 1 loss 0.5"], "was ended by SIGSEGV"),
    # faulthandler was only asked where it was.
    (-11, [CURRENT, *STACK], "was ended by SIGSEGV"),
    # What they had printed before is not why they were ended.
    (-15, THROWN, "was ended by SIGTERM"),
    (-9, THROWN, "was ended by SIGKILL; the system does that when memory runs out"),
    # NCCL's watchdog.
    (-6, [THROWN[0], "  what():  [PG ID 0 Rank 1] WorkNCCL(SeqNum=3) ran for 600 s"],
     "was ended by SIGABRT"),
    (-6, ["terminate called without an active exception", ABORTED, "", CURRENT, STACK[1]],
     "was ended by SIGABRT (terminate called without an active exception): "
     "end the program with torch.distributed.destroy_process_group()"),
])  # fmt: skip
def test_a_crash_is_told_with_its_own_words_and_its_place(status, lines, told) -> None:
    words = last_words(["begun", *lines], "", status)
    assert Ending("rank 0", "vm", status, 1.0, lines=words).error == f"rank 0 on vm {told}"


def test_a_watchdog_s_words_are_kept_if_python_tells_the_crash_too() -> None:
    said = [THROWN[0], "  what():  [PG ID 0 Rank 1] WorkNCCL(SeqNum=3) ran for 600 s"]
    lines = last_words([*said, ABORTED, "", THREAD, *STACK, "", CURRENT, *60 * STACK], "", -6)
    assert Ending("rank 0", "vm", -6, 1.0, lines=lines).lost_a_peer


HYDRA = "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace."
LOGGED = "2026-11-29 00:42:10.353 | {:8} | __main__:<module>:45 - {}"
EDGES = [f"╭─ {{}} {70 * '─'}╮", f"╰{78 * '─'}╯"]
USAGE = ["Usage: f3.py [OPTIONS] {lr}", "Try 'f3.py --help' for help."]


@pytest.mark.parametrize(("status", "lines", "told"), [
    (1, ["Could not override 'optimizer.lr'.", "To append to your config use +optimizer.lr=3",
         "Key 'optimizer' is not in struct", "    full_key: optimizer", "    object_type=dict", "",
         HYDRA], ": Key 'optimizer' is not in struct"),
    (1, ["c.py:251: UserWarning: In 'c': Defaults list is missing `_self_`", "In 'c': Could not "
         "find 'db/b'", "", "Available options in 'db':", "\ta", "Config search path:",
         "\tprovider=hydra, path=pkg://hydra.conf", "", HYDRA], ": In 'c': Could not find 'db/b'"),
    (1, ["Could not append to config. An item is already at 'lr'.",
         "Either remove + prefix: 'lr=3'", "Or add a second + to add or override 'lr': '++lr=3'",
         "", "", HYDRA], ": Could not append to config. An item is already at 'lr'."),
    (1, ["no viable alternative at input '['", "See https://hydra.cc/docs/1.2/basic for details",
         "", HYDRA], ": no viable alternative at input '['"),
    (1, [HYDRA], f": {HYDRA}"),
    (2, ["cannot read a.yaml", "make: *** [Makefile:2: train] Error 1"],
     " ended with status 2; it last said: cannot read a.yaml"),
    # loguru's logger.catch and logger.exception.
    (1, [LOGGED.format("ERROR", "An error has been caught"), RAISED[0],
         '> File "/home/me/faults.py", line 45, in <module>', "    f(); sys.exit(1)",
         "    │    │   └ <built-in function exit>", "    └ <function f at 0x7f0f784d7420>",
         '  File "/home/me/faults.py", line 44, in f', '    def f(): return {}["lr"]',
         "        └ <function f at 0x7f0f784d7420>", "KeyError: 'lr'"], ": KeyError: 'lr'"),
    (1, [LOGGED.format("ERROR", "failed"), RAISED[0],
         '> File "/home/me/faults.py", line 9, in load', "    assert n == 3", "AssertionError"],
     ": AssertionError in load (faults.py:9): assert n == 3"),
    (3, [LOGGED.format("ERROR", "failed"), RAISED[0], '> File "a.py", line 9, in load',
         "    fetch()", "OSError: try 1", "the folder is full"],
     " ended with status 3; it last said: the folder is full"),
    # typer, and rich's tracebacks.
    (2, [*USAGE, EDGES[0].format("Error"),
         "│ Invalid value for 'lr': Input should be a valid number, unable to parse      │",
         "│ string as a number                                                           │",
         EDGES[1]], " ended with status 2; it last said: Invalid value for 'lr': Input should be a "
     "valid number, unable to parse string as a number"),
    (2, [*USAGE, EDGES[0].format("Error"), "│ Missing option '--mode'.      │", EDGES[1]],
     " ended with status 2; it last said: Missing option '--mode'."),
    (1, [EDGES[0].format("Traceback (most recent call last)"), "│ g.py:16 in <module>      │",
         EDGES[1], "RuntimeError: The size of tensor a (3) must match the size of tensor b (4) at ",
         "non-singleton dimension 1"], ": RuntimeError: The size of tensor a (3) must match the "
     "size of tensor b (4) at non-singleton dimension 1"),
    (1, [EDGES[0].format("Plan"), "│ 2 nodes      │", EDGES[1], "no such dataset"],
     ": no such dataset"),
    (1, ["no such dataset", 80 * "="], ": no such dataset"),
    # What goes with an error that was only printed.
    (1, ["RuntimeError: Expected all tensors on one device", "see https://x/docs"],
     ": RuntimeError: Expected all tensors on one device"),
    (1, [LOGGED.format("ERROR", "no /data/coco"), LOGGED.format("INFO", "bye")],
     f": {' '.join(LOGGED.format('ERROR', 'no /data/coco').split())}"),
    (1, ["ERROR:root:no network", "WARNING:root:cache left", "INFO:root:bye"],
     ": ERROR:root:no network"),
    # It may be the last line that says why.
    (1, ["ERROR:root:no plugin", "config: no such optimizer: adamx"],
     ": config: no such optimizer: adamx"),
    (1, ["ERROR:root:try 1", "ERROR: set NCCL_DEBUG=INFO"], ": ERROR: set NCCL_DEBUG=INFO"),
    (1, ["ERROR:root:no plugin", "loss nan", "INFO:root:bye"], ": INFO:root:bye"),
    (1, ["see https://x/docs"], ": see https://x/docs"),
    (1, ["====", "----"], ": ----"),
])  # fmt: skip
def test_the_line_that_says_why_is_told_and_not_what_goes_with_it(status, lines, told) -> None:
    """As Hydra, loguru, typer, rich and logging wrote them."""
    words = last_words(lines, "", status)
    assert Ending("rank 0", "vm", status, 1.0, lines=words).error == f"rank 0 on vm{told}"


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


@pytest.mark.parametrize("told_to_end", [
    "supervise.end_descendants = end",
    "plain = supervise.send\nsupervise.send = lambda record: (end(), plain(record))",
    # While Python shuts down.
    "class Last:\n def __del__(self, end=end): end()\nlast = Last()",
], ids=["before", "while", "after"])  # fmt: skip
@pytest.mark.parametrize("rank", ["fails", "is refused", "has no log"])
def test_a_supervisor_tells_how_its_rank_failed_even_if_it_is_told_to_end_meanwhile(
    tmp_path, told_to_end: str, rank: str
) -> None:
    """torchrun ends all supervisors once it sees a rank fail, here before this one tells how its
    own has ended, while it does, or after that.
    """
    program, folders = tmp_path / "program.py", Folders(tmp_path / "run")
    program.write_text("raise SystemExit(3)")
    folders.state.mkdir(parents=True)
    folders.spoiled.write_text("the inputs have changed")
    task = Task((str(program),), folders.run, {}).to_json()
    arguments, status, of_rank = {
        "fails": ([program], 3, 3),
        "is refused": (["--task", task], 1, 1),
        "has no log": (["--rank-logs", program / "logs", program], 1, None),
    }[rank]
    ended = (
        "import functools, os, signal, supervise\n"
        "end = functools.partial(os.kill, os.getpid(), signal.SIGTERM)\n"
        f"{told_to_end}\nsupervise.main()"
    )
    done = python(ended, *arguments, RANK="1")
    assert done.returncode == status, done.stderr
    (record,) = records(done.stderr.split("\n"))  # splitlines would split at the mark too
    assert record["ending"]["status"] == of_rank
    assert ("refused" in record["ending"]["report"]) == (rank == "is refused")


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
