"""What a training on GPUs does when something is wrong, without any GPU: texts that NCCL's watchdog
writes, ranks that end as NCCL ends them, calls that never return, and invented GPUs.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from datetime import timedelta
from itertools import product
from pathlib import Path
from socket import gethostname
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._inductor.exc import GPUTooOldForTriton, TritonMissing

import train
from classifier.pixels.batches import Examples, images_per_pass
from classifier.states.saver import Saver
from classifier.states.state import State
from classifier.training import loop
from classifier.training.gradients import refused_if_not_compiled
from forked import run_ranks
from manynodes.base.environment import Environment
from manynodes.base.errors import LONGEST, Refusal, Stopped
from manynodes.base.processes import answer_within, last_words
from manynodes.base.timeouts import SUPERVISE_GRACE
from manynodes.base.tree import encode
from manynodes.checkpointing import incidents
from manynodes.checkpointing.owner import acquire
from manynodes.data.folder import DataFolder
from manynodes.data.staging import stage
from manynodes.experiment.config import read_run
from manynodes.launching import gpus, whereabouts
from manynodes.launching.agents import Outcome
from manynodes.launching.endings import Ending
from manynodes.launching.first_failure import Source, first_failure
from manynodes.launching.whereabouts import Whereabouts
from manynodes.programs.variables import environment_of, gpu_here
from manynodes.ranks import device, probe, process_group
from manynodes.ranks.device import (
    Meter,
    choose_device,
    is_built_for,
    limits,
    named,
    near_cpus,
    on_cpu_at_once,
    stay_near,
)
from manynodes.ranks.preflight import RankReport, check_sum
from manynodes.ranks.process_group import Process
from manynodes.ranks.processor import OF_GPUS, ORDERING, gpu_software
from manynodes.ranks.vote import Vote
from programs import SCRIPTS, program, python, train_command
from simulated.nccl_texts import DUMP, LONG, WATCHDOG
from trainings import RUN, SIMULATED, complete, in_this_process, result
from waiting import until

# As torch describes a GPU.
CARD = SimpleNamespace(uuid="8f3a", pci_domain_id=0, pci_bus_id=0x17, pci_device_id=0)
ASSERT = f"""\
/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1515: indexSelectSmallIndex: block: [0,0,0], \
thread: [0,0,0] Assertion `srcIndex < srcSelectDimSize` failed.
[rank1]:[E1127 14:49:39.863318443 {LONG}:2119] [PG ID 1 PG GUID 0(default_pg) Rank 1] Process \
group watchdog thread terminated with exception: CUDA error: device-side assert triggered
Search for `cudaErrorAssert' in \
https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace \
below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
Exception raised from query at /pytorch/c10/cuda/CUDAEvent.h:111 (most recent call first):
terminate called after throwing an instance of 'c10::DistBackendError'
[rank1]:[W1127 14:49:39.863982307 CUDAEvent.h:57] Warning: CUDA warning: device-side assert \
triggered (function ~CUDAEvent)
  what():  [PG ID 1 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with \
exception: CUDA error: device-side assert triggered
Exception raised from run at {LONG}:2125 (most recent call first):
""".splitlines()
ECC = f"""\
[rank1]:[E1126 09:00:00.123456789 {LONG}:2057] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process \
group watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with \
exception: CUDA error: uncorrectable ECC error encountered
""".splitlines()
# NCCL itself met the fault, in the main thread.
MET_BY_NCCL = """\
Traceback (most recent call last):
  File "train.py", line 9, in <module>
torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3699, unhandled cuda error
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 214 'uncorrectable ECC error encountered'
""".splitlines()
FULL = """\
Traceback (most recent call last):
  File "train.py", line 9, in <module>
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total of 80 GiB
[rank1]:[W1126 09:00:00.123456789 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=5): \
Broken pipe
""".splitlines()


def ending(rank: int, status: int, seconds: float, lines: list[str]) -> Ending:
    return Ending(
        f"rank {rank}", f"n{rank + 1}", status, seconds, lines=last_words(lines, ""), log="log"
    )


def told(endings: list[Ending], seen: list[Whereabouts] | None = None) -> str:
    outcome = Outcome(failed=0, status=1)
    return first_failure(outcome, endings, seen or [], [], Source("srun")).failure.line


def test_a_hang_is_named_although_the_watchdog_has_ended_all_ranks() -> None:
    """Each rank was looked at before, now and then."""
    endings = [ending(0, -signal.SIGABRT, 1.0, WATCHDOG), ending(1, -signal.SIGABRT, 1.2, DUMP)]
    waits = Whereabouts("rank 0", "n1", frames=("synchronize (cuda/streams.py:9)",), waits=True)
    reads = Whereabouts("rank 1", "n2", frames=("read (mine.py:3)",), frame="read (mine.py:3)")
    assert told(endings, [waits, reads]).startswith("rank 1 on n2 hung (in read (mine.py:3)), and")


def test_a_rank_in_a_network_that_ddp_has_called_does_not_wait_for_others(monkeypatch) -> None:
    torch_of = "/usr/local/lib/python3.12/{}-packages/torch/"
    called = ["nn/modules/module.py", "nn/parallel/distributed.py"]

    def waits(*paths: str) -> bool:
        frames = [{"name": "name", "filename": path, "line": 1} for path in paths]
        monkeypatch.setattr(whereabouts, "stack", lambda _pid: frames)
        return whereabouts.seen(os.getpid(), "").waits

    for torch_here in (torch_of.format("site"), torch_of.format("dist")):
        ddp = [torch_here + path for path in called]
        assert not waits("/mine/nets.py", *ddp, "/mine/train.py")
        assert waits(*ddp, "/mine/train.py")
        assert waits(torch_here + "cuda/streams.py", "/ours/manynodes/ranks/vote.py", *ddp)
    assert waits("/ours/manynodes/ranks/device.py", "/ours/train.py")


@pytest.mark.parametrize("python", [
    "/opt/conda/lib/python3.10", "/usr/lib64/python3.9", "/home/me/uv/cpython-3.12/lib/python3.12",
])  # fmt: skip
def test_a_rank_that_hangs_in_another_python_is_told_with_its_own_function(
    monkeypatch, python: str
) -> None:
    """That of an environment of its own, whose files lie elsewhere than ours."""
    paths = [f"{python}/threading.py", "/mine/load.py", "/mine/train.py"]
    frames = [{"name": "name", "filename": path, "line": 1} for path in paths]
    monkeypatch.setattr(whereabouts, "stack", lambda _pid: frames)
    assert whereabouts.seen(os.getpid(), "").frame == "name (mine/load.py:1)"
    frames[1]["filename"] = f"{python}/site-packages/torch/distributed/store.py"
    found = whereabouts.seen(os.getpid(), "")
    assert (found.frame, found.waits) == ("name (mine/train.py:1)", True)


def test_a_fault_of_a_gpu_is_no_lost_peer() -> None:
    peer = ending(0, -signal.SIGABRT, 0.5, WATCHDOG)
    # The second is that of a program that `uv run` or a shell has started.
    for status in (-signal.SIGABRT, 128 + signal.SIGABRT):
        assert told([peer, ending(1, status, 1.0, ECC)]).startswith(
            "rank 1 on n2: CUDA error: uncorrectable ECC error encountered; exclude n2"
        )
    assert told([peer, ending(1, -signal.SIGABRT, 1.0, ASSERT)]).startswith(
        "rank 1 on n2: CUDA error: device-side assert triggered"
    )
    assert told([peer, ending(1, 1, 1.0, MET_BY_NCCL)]).startswith(
        "rank 1 on n2: Cuda failure 214 'uncorrectable ECC error encountered'; exclude n2"
    )
    full = ending(1, 1, 1.0, FULL)
    assert told([peer, full]).startswith(
        "rank 1 on n2: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB."
    )
    # torch's remark on its store is not the rank's own error.
    assert not full.lost_a_peer


def test_a_broken_gpu_is_named_with_what_to_do(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        f"import json, os, sys\n"
        f"open(os.environ['LAUNCH_REPORT'], 'w').write(json.dumps({{'gpu': {named(CARD)!r}}}))\n"
        f"print(*{ECC!r}, sep='\\n', file=sys.stderr, flush=True)\n"
        "os.abort()\n"
    )
    done = program("launch", "--", script)
    assert done.returncode == 1
    fault = "CUDA error: uncorrectable ECC error encountered"
    which = r"\(GPU-8f3a, PCI 0000:17:00\.0\); exclude \S+ and tell its administrator"
    assert re.search(rf"rank 0 on \S+: {fault} {which}", done.stderr), done.stderr


@pytest.mark.faults
def test_of_ranks_that_all_abort_at_once_the_one_that_hung_is_named(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        dedent(f"""
        import os, sys, threading, time
        import torch
        import torch.distributed as dist
        import launched

        dist.init_process_group("gloo")


        def watchdog():
            time.sleep(12)
            print({WATCHDOG!r}[launched.rank], {DUMP[0]!r}, sep="\\n", file=sys.stderr, flush=True)
            os.abort()


        def load_next_file():
            time.sleep(1000)


        threading.Thread(target=watchdog, daemon=True).start()
        if launched.rank == 1:
            load_next_file()
        dist.all_reduce(torch.ones(1))
        """)
    )
    done = program(
        "launch", "--nodes", 2, "--cpus", 2, "--timeout", 8, "--output", tmp_path / "run", "--",
        # As `uv run` and `conda run` do it: the status is 134.
        "bash", "-c", '"$@"; exit $?', "-", sys.executable, script,
    )  # fmt: skip
    assert done.returncode == 1
    line = r"program failed: rank 1 on \S+ hung \(in load_next_file \(\S*program\.py:\d+\)\)"
    assert re.search(line, done.stderr), done.stderr


def waits(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where a rank would be seen not to wait, of all places where it waits for sums of others.

    The others never come: nothing waits but what asks the device for a number.
    """
    monkeypatch.syspath_prepend(SIMULATED)
    import nccl_over_gloo

    # What an earlier test has left would never come.
    nccl_over_gloo.QUEUED.clear()
    sums: list[torch.futures.Future] = []
    ended: list[bool] = []

    def begin(*_arguments: object, **_options: object) -> None:
        sums.append(torch.futures.Future())
        nccl_over_gloo.QUEUED.append(sums[-1])

    monkeypatch.setattr(nccl_over_gloo, "late", lambda: True)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for name in ("all_gather", "all_reduce", "barrier", "broadcast", "gather"):
        monkeypatch.setattr(dist, name, begin)

    def in_queue() -> None:
        with nccl_over_gloo.Queue(), suppress(Refusal):
            work()
        ended.append(True)

    rank = threading.Thread(target=in_queue, daemon=True)
    rank.start()
    places, elsewhere = 0, []
    while rank.is_alive():
        frames = [
            {"name": code.co_name, "filename": code.co_filename, "line": line}
            for each, line in traceback.walk_stack(sys._current_frames().get(rank.ident))
            for code in [each.f_code]
        ]
        if frames and frames[0]["name"] == "asked" and not all(each.done() for each in sums):
            monkeypatch.setattr(whereabouts, "stack", lambda _pid, found=frames: found)
            seen = whereabouts.seen(os.getpid(), "")
            places += 1
            elsewhere += [] if seen.waits else [seen.frame]
            for each in sums:
                if not each.done():
                    each.set_result(None)
        time.sleep(0.001)
    assert places
    assert ended
    return elsewhere


HERE = RankReport(0, 0, "here", "127.0.0.1", "cpu", "", "", 1, 1, "0")
ALONE = Process(0, 0, 2, torch.device("cpu"))
WAITING = {
    "a vote": lambda: Vote(ALONE, None, False, torch.ones(()), torch.ones(())).verdict(),
    "the test all-reduce": lambda: check_sum(1.0, HERE, 2),
    "the first rank of each node": lambda: probe.places(ALONE),
    "the speed of all-reduces": lambda: probe.all_reduces(ALONE),
    "gather": lambda: process_group.gather(1, ALONE),
    "broadcast": lambda: process_group.broadcast(b"1", ALONE),
}


@pytest.mark.parametrize("what", WAITING)
def test_a_rank_that_waits_for_a_gpu_in_code_without_frames_is_seen_to_wait(
    monkeypatch, what: str
) -> None:
    """A copy from the device waits in C."""
    monkeypatch.setenv("LAUNCH_SECRET", "0" * 64)
    assert waits(WAITING[what], monkeypatch) == []


def test_a_training_waits_for_its_gpu_only_where_it_is_seen_to_wait(
    monkeypatch, digits: Path, tmp_path: Path
) -> None:
    training = in_this_process(digits)

    training.seconds = 1.0

    # Where a training with several ranks has its first sums in the queue.
    def meter(device: torch.device) -> Meter:
        dist.all_reduce(torch.ones(1))
        return Meter(device)

    monkeypatch.setattr(loop, "Meter", meter)

    def work() -> None:
        in_this_process(digits)
        training.new_classifier(print)
        training.end_epoch()
        training.save_weights(tmp_path / "weights")
        training.per_rank.tolist()
        training.rank_state()

    assert waits(work, monkeypatch) == []


# In the form of torch's CUDACachingAllocator.cpp, and in none that is known.
TOLD_FULL = {
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 3.25 GiB is free. Including non-PyTorch memory, this process has 136.54 GiB memory in "
    "use.": "(139.80 GiB, 20.00 GiB more)",
    "Allocation on device would exceed the allowed memory.": "(Allocation on device would exceed",
}


@pytest.mark.parametrize("said", TOLD_FULL)
def test_a_gpu_whose_memory_is_full_is_told_in_a_line_with_its_size_and_a_remedy(
    digits: Path, tmp_path: Path, said: str
) -> None:
    """The training's own; its network raises what torch does."""
    network = tmp_path / "large.py"
    network.write_text(
        WIDE.replace("from torch import nn", "import torch\nfrom torch import nn").replace(
            "nn.Flatten(),", "Full(), nn.Flatten(),"
        ).replace(
            "def make",
            "class Full(nn.Module):\n"
            "    def forward(self, x):\n"
            "        if len(x) > 60:\n"
            f"            raise torch.OutOfMemoryError({said!r})\n"
            "        return x\n\n\n"
            "def make",
        )
    )  # fmt: skip
    run = {key: value for key, value in RUN.items() if key != "widths"}
    run = json.dumps(run | {"model": f"{network}:make", "device": "cpu"})
    done = program("train", "--run", run, "--data", digits, "--output", tmp_path / "run")
    line = done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert re.match(
        rf"train: the memory of a GPU on \S+ is full {re.escape(TOLD_FULL[said])}", line
    )
    assert line.endswith("use a smaller global_batch_size, more processes, or images_in: disk")
    assert len(line) <= LONGEST


# What a compiler of torch's raised or, of the GPU ones, raises by its source; and what is said.
PTXAS = (
    "An exception occurred in a subprocess:\n\nName=triton_poi_0\nTraceback (most recent call "
    "last):\n  File make_cubin\nRuntimeError: Internal Triton PTX codegen error\n`ptxas` stderr:\n"
    "ptxas fatal   : Value 'sm_120' is not defined for option 'gpu-name'\n\nRepro command: ptxas x"
)
HEADERS = "C++ compile error\n\nCommand:\ng++ x.cpp\n\nOutput:\nx.cpp:9:10: fatal error: Python.h: \
No such file or directory\n    9 | #include <Python.h>\ncompilation terminated."
KILLED = "C++ compile error\n\nCommand:\ng++ x.cpp\n\nOutput:\ng++: fatal error: Killed signal \
terminated program cc1plus\ncompilation terminated."
OLD_GPU = SimpleNamespace(name="Tesla K80", major=3, minor=7)
COMPILER = "needs g++ and python3-dev (Python's headers) on every node; "
NOT_COMPILED = [
    (RuntimeError(PTXAS), "failed on ", "ptxas fatal : Value 'sm_120'"),
    (RuntimeError(HEADERS), "needs python3-dev (Python's headers) on every node; ", "Python.h: No"),
    (RuntimeError(KILLED), "fills the memory of ", "Killed signal terminated program cc1plus"),
    (RuntimeError("Failed to find C compiler. Please specify via CC"), COMPILER, "Failed to find"),
    (subprocess.CalledProcessError(1, ["/usr/bin/gcc", "/tmp/main.c"]), COMPILER, "/usr/bin/gcc"),
    (ValueError("mine"), "failed on ", "mine; use compile: none"),
]


@pytest.mark.parametrize(("error", "begins", "says"), NOT_COMPILED)
def test_a_network_that_cannot_be_compiled_is_refused_with_the_compilers_own_reason(
    error: Exception, begins: str, says: str
) -> None:
    run = read_run(json.dumps(RUN | {"compile": "default"}))
    with pytest.raises(Refusal) as refused, refused_if_not_compiled(run):
        raise torch._dynamo.exc.BackendCompilerFailed(print, error, None)
    line = str(refused.value)
    assert line.startswith(f"compile: default {begins}{'' if 'every' in begins else gethostname()}")
    assert says in line
    assert line.endswith("use compile: none")
    assert len(line) <= LONGEST


@pytest.mark.parametrize(
    "error", [TritonMissing(None), GPUTooOldForTriton(OLD_GPU, None)], ids=["missing", "too old"]
)
def test_a_gpu_without_triton_is_told_in_a_line(error: Exception) -> None:
    run = read_run(json.dumps(RUN | {"compile": "default"}))
    with (
        pytest.raises(
            Refusal, match=r"^compile: default failed on \S+: (Cannot find a|Found Tesla)"
        ),
        refused_if_not_compiled(run),
    ):
        raise error


def test_what_the_compiler_did_not_raise_is_not_taken_for_its_fault() -> None:
    run = read_run(json.dumps(RUN | {"compile": "default"}))
    full = torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(torch.OutOfMemoryError), refused_if_not_compiled(run):
        raise torch._dynamo.exc.BackendCompilerFailed(print, full, None)
    with pytest.raises(ValueError, match="mine"), refused_if_not_compiled(run):
        raise ValueError("mine")


RANKS = """
import ctypes, os, sys, time
import torch.distributed as dist
from manynodes.base.errors import told_in_one_line
from manynodes.ranks import process_group
from manynodes.ranks.process_group import all_reduce, failing_at_once, refused_after
import torch
"""


def run_both(tmp_path: Path, code: str) -> list[subprocess.CompletedProcess[str]]:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS + dedent(code))
    return run_ranks([str(script)], 2)


def test_a_rank_that_fails_does_not_wait_to_destroy_the_group(tmp_path: Path) -> None:
    """NCCL's destroy waits for the others, which wait in a sum."""
    code = """
    with failing_at_once(), told_in_one_line("ranks"):
        with process_group.process_group("cpu") as process:
            dist.destroy_process_group = lambda: time.sleep(1000)
            if process.rank == 1:
                raise ValueError("mine")
            all_reduce(torch.ones(1))
    """
    zero, one = run_both(tmp_path, code)
    assert (zero.returncode, one.returncode) == (1, 1)
    assert one.stdout.rstrip().endswith("ValueError: mine")


ABSENT = "dist.init_process_group = lambda *_args, **_options: ctypes.CDLL(None).pause()\n"
# The other rank waits as with NCCL.
OF_RANK_1 = f"""
sys.path.append({str(SIMULATED)!r})
import nccl_over_gloo
nccl_over_gloo.install()
if os.environ["RANK"] == "1":
    """
SOON = "process_group.CONNECT = 1\n"
# By what does not come.
NEVER = {
    "both": SOON + ABSENT,
    "rank 1": SOON + OF_RANK_1 + ABSENT,
    "rank 1's number": SOON
    + OF_RANK_1
    + "process_group.check_sum = lambda *_arguments: ctypes.CDLL(None).pause()\n",
    "both, the second time": f"""
def in_the_first_connection(*_arguments):
    {SOON}    {ABSENT}
process_group.check_sum = in_the_first_connection
""",
}
SAID = dict.fromkeys(
    NEVER,
    r"^ranks: preflight: \S+ \(\S+\): no answer within 1 s; the test all-reduce failed",
) | {
    "both, the second time": r"^ranks: preflight: \S+ \(\S+\): the second connection was not there "
    "within 1 s; set GLOO_SOCKET_IFNAME",
}


@pytest.mark.parametrize("absent", NEVER)
def test_a_connection_that_never_comes_is_refused_in_time(tmp_path: Path, absent: str) -> None:
    code = NEVER[absent] + dedent(f"""
    os.environ["LAUNCH_REPORT"] = {str(tmp_path)!r} + "/report" + os.environ["RANK"]
    with failing_at_once(), told_in_one_line("ranks"):
        with process_group.process_group("cpu"):
            pass
    """)
    for rank in run_both(tmp_path, code):
        assert rank.returncode == 1
        assert re.search(SAID[absent], rank.stdout, re.MULTILINE), rank.stdout
    # So that nobody starts it again.
    for number in (0, 1):
        assert json.loads((tmp_path / f"report{number}").read_text()) == {"refused": True}


def test_a_rank_that_is_blocked_outside_python_ends_soon_after_a_signal(tmp_path: Path) -> None:
    """The signal does not reach the main thread, as in a wait for a GPU."""
    script = tmp_path / "blocked.py"
    script.write_text(
        "import ctypes, signal\n"
        "from manynodes.ranks.stopping import listen\n"
        "stop = listen(None, blocked=0.5)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "print('waits', flush=True)\n"
        "ctypes.CDLL(None).pause()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    with subprocess.Popen(
        [sys.executable, script], env=environment, stdout=subprocess.PIPE
    ) as rank:
        assert rank.stdout
        rank.stdout.readline()
        rank.terminate()
        assert rank.wait() == 128 + signal.SIGTERM


def test_a_rank_that_hears_the_signal_is_not_ended_while_it_goes_on_or_saves(
    tmp_path: Path,
) -> None:
    script = tmp_path / "saves.py"
    script.write_text(
        "import time\n"
        "from manynodes.ranks.stopping import listen\n"
        "stop = listen(None, blocked=2)\n"
        "print('trains', flush=True)\n"
        "while not stop.reason: time.sleep(0.1)\n"
        "for _ in range(50): time.sleep(0.1)\n"
        "stop.agreed = True\n"
        "print('saved', stop.signal)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    with subprocess.Popen(
        [sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout
        rank.stdout.readline()
        rank.terminate()
        assert rank.stdout.read() == "saved SIGTERM\n"
        assert rank.wait() == 0


class Gpus:
    """Invented GPUs."""

    def __init__(self, patch: pytest.MonkeyPatch, count: int, trouble: str = "") -> None:
        def init() -> None:
            raise RuntimeError(trouble)

        patch.setattr(torch.cuda, "device_count", lambda: count)
        patch.setattr(torch.cuda, "is_available", lambda: not trouble)
        patch.setattr(torch.cuda, "init", init)
        patch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90", "compute_90"])
        patch.setattr(torch.cuda, "get_device_capability", lambda _number: (9, 0))
        patch.setattr(torch.cuda, "get_device_name", lambda _number: "Tesla V100")


OLD = "The NVIDIA driver on your system is too old (found version 12080)."


def test_a_gpu_that_torch_cannot_use_is_not_taken(monkeypatch, capsys) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    Gpus(monkeypatch, 2)
    assert str(choose_device("auto", 1)) == "cuda:1"
    Gpus(monkeypatch, 2, OLD)
    assert str(choose_device("auto", 0)) == "cpu"
    assert OLD in capsys.readouterr().out
    with pytest.raises(Refusal, match=re.escape(OLD)):
        choose_device("cuda", 0)
    Gpus(monkeypatch, 0)
    assert str(choose_device("auto", 0)) == "cpu"
    with pytest.raises(Refusal, match="2 processes on .*; torch sees 0"):
        choose_device("cuda", 0)
    # One for each process, shown alone; or the same for both, which the preflight finds.
    Gpus(monkeypatch, 1)
    assert str(choose_device("cuda", 1)) == "cuda:0"
    assert str(choose_device("auto", 1)) == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    assert str(choose_device("cuda", 1)) == "cuda:0"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-b"
    # Or torch has no code for it.
    Gpus(monkeypatch, 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _number: (7, 0))
    assert str(choose_device("auto", 0)) == "cpu"
    why = f"Tesla V100 has compute capability 7.0, torch {torch.__version__} was built for sm_80"
    assert why in capsys.readouterr().out
    with pytest.raises(Refusal, match=re.escape(why)):
        choose_device("cuda", 0)


def test_a_machine_whose_gpus_are_not_taken_says_why(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(gpus, "gpus_of_torch", frozenset)
    told: list[str] = []
    for for_auto in (1, 4):
        with gpus.claimed_gpus("auto", 1, told.append, for_auto=for_auto) as mine:
            assert mine == []
    assert [line.partition(" computes on its CPUs: ")[2] for line in told] == [
        "torch cannot use its GPUs",
        "device: auto needs 4 GPUs, for all runs alike; it has 2",
    ]


@pytest.mark.parametrize(
    ("device", "processes", "for_auto", "usable", "other", "shared"),
    [
        ("cpu", 1, 1, True, False, 0),
        ("auto", 1, 1, True, False, 4),
        ("auto", 1, 1, False, False, 0),
        ("auto", 1, 1, False, True, 4),  # of which our torch knows nothing
        ("auto", 1, 5, True, True, 0),  # another run of the experiment needs five
        ("cuda", 1, 5, False, False, 4),  # whose run then says why
    ],
)
def test_a_training_with_device_auto_shares_the_gpus_too_if_torch_can_use_them(
    monkeypatch, device: str, processes: int, for_auto: int, usable: bool, other: bool, shared: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setattr(gpus, "gpus_of_torch", lambda: frozenset(["GPU-a"] * usable))
    assert len(gpus.gpus_to_share(device, processes, for_auto, other)) == shared


@pytest.fixture
def driver(monkeypatch, tmp_path: Path) -> Callable[[str], None]:
    """Sets what an invented nvidia-smi shows."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def shows(text: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncat << END\n{text}END\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        gpus.answer_of_driver.cache_clear()

    yield shows
    gpus.answer_of_driver.cache_clear()


def test_torch_is_asked_for_its_gpus_in_a_process_of_its_own(monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    answers = []

    def answered(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        answers.append(answer_within(*arguments, **options))
        return answers[-1]

    monkeypatch.setattr(gpus, "answer_within", answered)
    gpus.gpus_of_torch.cache_clear()
    assert gpus.gpus_of_torch() == set(device.gpus_to_compute_on())
    assert answers[0].returncode == 0


def test_a_card_that_is_lost_is_not_used(driver) -> None:
    driver("0, [GPU is lost], [GPU is lost]\n1, GPU-b, NVIDIA H200\n")
    assert gpus.usable_gpus("cuda", 1, other_torch=True) == ["GPU-b"]


def test_a_card_that_torch_has_no_code_for_is_left_to_the_screen(monkeypatch, driver) -> None:
    """And each by its UUID: CUDA numbers the fastest first, the driver by their places. A name
    need not be UTF-8.
    """
    capabilities = [(9, 0), (6, 1)]
    Gpus(monkeypatch, 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    cards = [SimpleNamespace(uuid="fast"), SimpleNamespace(uuid="old")]
    monkeypatch.setattr(torch.cuda, "get_device_properties", cards.__getitem__)
    known = device.gpus_to_compute_on()
    assert known == ["GPU-fast"]
    monkeypatch.setattr(gpus, "gpus_of_torch", lambda: frozenset(known))
    driver("0, GPU-old, Quadro$(printf '\\256') P400\n1, GPU-fast, NVIDIA H200\n")
    assert gpus.usable_gpus("cuda", 1) == gpus.usable_gpus("auto", 1) == ["GPU-fast"]
    assert gpus.usable_gpus("auto", 1, other_torch=True) == ["GPU-old", "GPU-fast"]
    told: list[str] = []
    with gpus.claimed_gpus("auto", 2, told.append) as mine:
        assert mine == []
    assert told[0].endswith("needs 2 GPUs, for all runs alike; it has 1 that torch has code for")
    with pytest.raises(Refusal, match="one per process; .* has 1 that torch has code for$"):
        gpus.usable_gpus("cuda", 2)
    # One kind needs no question; and who names them himself is not asked.
    driver("0, GPU-old, NVIDIA H200\n1, GPU-fast, NVIDIA H200\n")
    assert gpus.usable_gpus("cuda", 2) == ["GPU-old", "GPU-fast"]
    driver("0, GPU-old, Quadro P400\n1, GPU-fast, NVIDIA H200\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert gpus.usable_gpus("cuda", 2) == ["0", "1"]


def test_the_cpus_near_a_gpu_are_those_of_its_socket(tmp_path: Path) -> None:
    device = tmp_path / "bus/pci/devices/0000:17:00.0"
    node = tmp_path / "devices/system/node/node1"
    for folder in (device, node):
        folder.mkdir(parents=True)
    (node / "cpulist").write_text("32-63,96-127\n")
    mine = set(range(60, 100))
    for number, near in (("1", {*range(60, 64), *range(96, 100)}), ("-1", set()), ("2", set())):
        (device / "numa_node").write_text(f"{number}\n")
        assert near_cpus(CARD, mine, tmp_path) == near
    assert near_cpus(CARD, mine, tmp_path / "nothing") == set()


@pytest.mark.parametrize(("enough", "threads"), [(True, "1"), (False, "1000")])
def test_a_rank_stays_near_its_gpu_if_its_threads_have_room(
    monkeypatch, tmp_path: Path, enough: bool, threads: str
) -> None:
    mine = os.sched_getaffinity(0)
    first = min(mine)
    device = tmp_path / "bus/pci/devices/0000:17:00.0"
    node = tmp_path / "devices/system/node/node0"
    for folder in (device, node):
        folder.mkdir(parents=True)
    (device / "numa_node").write_text("0\n")
    (node / "cpulist").write_text(f"{first}\n")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: CARD)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    try:
        stay_near(torch.device("cuda", 0), tmp_path)
        assert os.sched_getaffinity(0) == ({first} if enough else mine)
    finally:
        os.sched_setaffinity(0, mine)


def test_a_gpus_counters_are_read_from_when_the_training_began(monkeypatch, tmp_path: Path) -> None:
    """The module of NVIDIA's library is invented; of the real one, four functions are used. An
    H200 answered them all; this card has no counter of heat.
    """
    (tmp_path / "pynvml.py").write_text(
        "from types import SimpleNamespace as Of\n"
        "NVML_PERF_POLICY_POWER, NVML_PERF_POLICY_THERMAL, NVML_GPU_UTILIZATION_SAMPLES = 0, 1, 2\n"
        "energy, held = iter([5_000, 7_500]), iter([10**9, 3 * 10**9])\n"
        "used = iter([[99], [40, 60]])\n"
        "nvmlInit = lambda: None\n"
        "nvmlDeviceGetHandleByUUID = {'GPU-8f3a': 'card'}.__getitem__\n"
        "nvmlDeviceGetTotalEnergyConsumption = lambda card: next(energy)\n"
        "def nvmlDeviceGetViolationStatus(card, policy):\n"
        "    assert policy == NVML_PERF_POLICY_POWER\n"
        "    return Of(violationTime=next(held))\n"
        "def nvmlDeviceGetSamples(card, kind, since):\n"
        "    values = next(used)\n"
        "    assert since == (0 if values == [99] else 7)\n"
        "    return 0, [Of(sampleValue=Of(uiVal=each), timeStamp=7) for each in values]\n"
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: CARD)
    gpu = torch.device("cuda", 0)
    unknown = (-1, -1, -1, -1)
    assert Meter(gpu).read() == unknown  # nvidia-ml-py is not installed here
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    meter = Meter(gpu)
    assert meter.read() == (2.5, 2.0, -1, 0.5)
    assert meter.read() == (-1, -1, -1, 0.5)  # the library fails
    assert Meter(torch.device("cpu")).read() == unknown


def test_the_memory_and_the_power_limit_of_a_gpu_are_known(monkeypatch, tmp_path: Path) -> None:
    card = SimpleNamespace(uuid="8f3a", total_memory=80_000_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: card)
    gpu = torch.device("cuda", 0)
    unknown = {"gpu_total_bytes": 80_000_000_000, "gpu_power_limit_watts": None}
    assert limits(gpu) == unknown
    (tmp_path / "pynvml.py").write_text(
        "nvmlInit = lambda: None\n"
        "nvmlDeviceGetHandleByUUID = {'GPU-8f3a': 'card'}.__getitem__\n"
        "nvmlDeviceGetEnforcedPowerLimit = {'card': 350_000}.__getitem__\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    assert limits(gpu) == unknown | {"gpu_power_limit_watts": 350}
    assert limits(torch.device("cpu")) == {}


def test_variables_that_choose_the_order_of_nccls_sums_are_recorded(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 30, 1)))
    gpu = torch.device("cuda", 0)
    for name in ORDERING:
        monkeypatch.delenv(name, raising=False)
    found = gpu_software(gpu)
    assert list(found) == list(OF_GPUS)
    assert (found["nccl"], found["nccl_settings"]) == ("2.30.1", None)
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert gpu_software(gpu)["nccl_settings"] == "NCCL_ALGO=Ring"
    assert gpu_software(torch.device("cpu")) == {}


def test_another_driver_on_a_node_is_recorded_and_another_one_since_is_told(
    digits: Path, capsys
) -> None:
    training = in_this_process(digits)
    known = train.placement(ALONE, stage(DataFolder.read(digits), []))
    two = [known | dict.fromkeys(OF_GPUS) | {"driver": driver} for driver in ("550.1", "560.2")]
    training.attempts.append(train.attempt(training, "job 1", two, ""))
    assert training.attempts[0]["driver"] == "550.1, 560.2"
    train.attempt(training, "job 2", [two[0], two[0]], "")
    assert "driver was 550.1, 560.2 and is 550.1" in capsys.readouterr().out


@pytest.mark.parametrize("override", ["0", "1"])
def test_fp32_is_not_tf32_whatever_the_environment_says(override: str) -> None:
    code = (
        "import torch\n"
        "from manynodes.ranks.process_group import process_group\n"
        "print(torch.backends.cuda.matmul.allow_tf32)\n"
        "with process_group('cpu'):\n"
        "    print(torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)\n"
    )
    environment = {"PYTHONPATH": str(SCRIPTS), "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": override}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=os.environ | environment,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [str(override == "1"), "False False"]
    assert "deprecated" not in done.stderr


@pytest.mark.parametrize(("architectures", "capability", "runs"), [
    (["sm_80"], (8, 0), True), (["sm_80"], (8, 6), True), (["sm_86"], (8, 0), False),
    (["sm_80"], (9, 0), False), (["sm_80", "compute_80"], (9, 0), True),
    (["sm_75", "sm_120"], (7, 0), False), (["sm_120"], (12, 0), True), (["gfx90a"], (9, 0), True),
])  # fmt: skip
def test_code_runs_on_its_major_version_and_intermediate_code_on_later_ones(
    architectures: list[str], capability: tuple[int, int], runs: bool
) -> None:
    assert is_built_for(architectures, *capability) == runs


def test_launches_at_once_have_different_gpus_and_one_too_many_waits(tmp_path: Path) -> None:
    """`launch` only passes numbers on."""
    script = tmp_path / "gpu.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "here = pathlib.Path(sys.argv[1])\n"
        "mine = here / f'{os.getpid()} {os.environ[\"CUDA_VISIBLE_DEVICES\"]}'\n"
        "mine.touch()\n"
        "while not (here / 'over').exists(): time.sleep(0.05)\n"
    )
    command = [sys.executable, SCRIPTS / "launch.py", "--device", "cuda", "--launcher", "none",
               "--", script, tmp_path]  # fmt: skip
    # Of this test alone; what follows -1 is hidden, as CUDA has it.
    names = [f"GPU-{os.getpid()}-{number}" for number in range(3)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join([*names, "-1", "7"])}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    def numbers() -> list[str]:
        return sorted(path.name.split()[1] for path in tmp_path.glob("* *"))

    launches = [start() for _ in range(3)]
    try:
        until(lambda: len(numbers()) == 3)
        assert numbers() == names
        late = start()
        launches.append(late)
        assert late.stderr
        assert "waiting for 1 of the 3 GPUs" in late.stderr.readline()
        assert len(numbers()) == 3
        # A claim ends with its launch, however that ends.
        launches[0].kill()
        until(lambda: len(numbers()) == 4)
    finally:
        (tmp_path / "over").touch()
        for each in launches:
            each.communicate()
        for folder, name in product(gpus.folders_of_claims(), names):
            (folder / name).unlink()
    assert [each.returncode for each in launches] == [-signal.SIGKILL, 0, 0, 0]


def test_a_gpu_has_one_claim_whatever_it_is_called(monkeypatch, driver) -> None:
    whole = f"GPU-{os.getpid()}-8f3a"
    driver(f"0, {whole}, NVIDIA H200\n1, GPU-other, NVIDIA H200\n")
    names = [whole, whole[:-2], "0", "00"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names))
    try:
        with gpus.claimed_gpus("cuda", 4, print, gone=lambda: True) as mine:
            assert mine == names
            for name in names:
                monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
                other = gpus.claimed_gpus("cuda", 1, print, gone=lambda: True)
                with pytest.raises(Stopped), other:
                    pass
    finally:
        for folder in gpus.folders_of_claims():
            (folder / whole).unlink()


def test_a_broadcast_takes_little_more_memory_than_its_content(tmp_path: Path) -> None:
    code = """
    import resource
    SIZE = 300 << 20
    with process_group.process_group("cpu") as process:
        content = b"x" * SIZE if process.first else b""
        process_group.broadcast(b"y" if process.first else b"", process)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        received = process_group.broadcast(content, process)
        assert (len(received), received[:9], received[-9:]) == (SIZE, b"x" * 9, b"x" * 9)
        assert process_group.broadcast(b"" if process.first else b"z", process) == b""
        more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        print(f"more {more / SIZE:.2f}")
    """
    for rank in run_both(tmp_path, code):
        assert rank.returncode == 0, rank.stdout
        # What is received, once more as bytes, and the pieces.
        assert float(rank.stdout.rpartition("more ")[2]) < 3, rank.stdout


WIDE = """
from torch import nn


def make(classes, channels, size, width=8):
    pixels = channels * size[0] * size[1]
    layers = [nn.Flatten(), nn.Linear(pixels, width), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.Linear(width, classes))
"""


@pytest.mark.faults
def test_a_state_is_in_memory_twice_more_when_it_is_saved() -> None:
    """By safetensors. In a process of its own, whose memory has not been larger before."""
    code = """
import resource, torch
from manynodes.base.tree import encode
weights = torch.ones(50_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
content = encode({"weights": weights, "the same": [weights[:10], weights[5:8]]})
more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
print(more / len(content))
"""
    done = python(code)
    assert float(done.stdout) < 2.5, done.stderr


def test_a_state_is_read_with_little_more_memory_than_its_content(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(encode({"weights": torch.ones(50_000_000)}))
    code = """
import resource, sys
from pathlib import Path
from manynodes.base.tree import decode
content = Path(sys.argv[1]).read_bytes()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tree = decode(content)
more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
print(more / len(content))
"""
    done = python(code, path)
    assert float(done.stdout) < 1.5, done.stderr


WATCHED = """
import runpy, sys, threading, time
from classifier.pixels import batches
from classifier.training.steps import Stepper
from manynodes.reporting import metrics

step, plan, write, taken = Stepper.step, batches.epoch_plan, metrics.write_metrics, []


def noted_step(*args, **options):
    taken.append(None)
    return step(*args, **options)


def noted_plan(n, seed, epoch, *args):
    print(f"plan {epoch} {len(taken)}", flush=True)
    return plan(n, seed, epoch, *args)


def noted_write(path, rows):
    here = threading.current_thread() is threading.main_thread()
    print(f"history {len(rows)} {here}", flush=True)
    time.sleep(0.2)
    write(path, rows)


Stepper.step, batches.epoch_plan, metrics.write_metrics = noted_step, noted_plan, noted_write
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.faults
def test_a_gpu_waits_at_the_end_of_an_epoch_for_no_plan_and_no_disk(
    digits: Path, tmp_path: Path, reference
) -> None:
    """The next plan is made during the epoch, and the history is written during the next one."""
    script, output = tmp_path / "watched.py", tmp_path / "run"
    script.write_text(WATCHED)
    train = train_command(json.dumps(RUN), digits, output)
    (done,) = run_ranks([str(script), *map(str, train)], 1)
    assert done.returncode == 0, done.stdout
    steps = int(json.loads((output / "run.json").read_text())["metrics"]["step"]) // RUN["epochs"]
    plans = dict(re.findall(r"^plan (\d+) (\d+)$", done.stdout, re.MULTILINE))
    assert plans.keys() == {str(epoch) for epoch in range(1, RUN["epochs"] + 1)}
    for epoch in range(2, RUN["epochs"] + 1):
        assert int(plans[str(epoch)]) < (epoch - 1) * steps
    writes = re.findall(r"^history (\d+) (\w+)$", done.stdout, re.MULTILINE)
    in_thread = [(str(epoch), "False") for epoch in range(1, RUN["epochs"] + 1)]
    assert writes == [*in_thread, (str(RUN["epochs"]), "True")]
    assert result(output) == reference(1)


def test_on_a_gpu_a_state_is_encoded_while_the_training_goes_on(tmp_path: Path) -> None:
    """Its tensors are copies there; on a CPU they are those of the training."""
    threads = []

    class Noted(State):
        def encode(self) -> bytes:
            threads.append(threading.current_thread() is threading.main_thread())
            return super().encode()

    given = {field.name: {} for field in fields(State)}
    given |= {"run": {}, "epoch": 1, "step": 0, "seconds": 0.0, "ranks": [], "history": []}
    for kind in ("cuda", "cpu"):
        process = Process(0, 0, 1, torch.device(kind))
        with (
            acquire(tmp_path, "me", print) as owner,
            Saver(process, tmp_path, owner, every=1000) as saver,
        ):
            saver.save({}, lambda _ranks: Noted(**given), wait=True)
    assert threads == [False, True]


def test_tensors_of_a_gpu_are_copied_with_one_wait(monkeypatch) -> None:
    class OfGpu(torch.Tensor):
        is_cuda = True
        __torch_function__ = torch._C._disabled_torch_function_impl

    done: list[str] = []
    copy, room = torch.Tensor.copy_, torch.empty_like

    def copied(here: torch.Tensor, there: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        assert non_blocking
        done.append("copy")
        return copy(here, there)

    stream = SimpleNamespace(synchronize=lambda: done.append("wait"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)

    def pinned(like: torch.Tensor, device: str, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        return room(like.as_subclass(torch.Tensor), device=device)

    monkeypatch.setattr(torch, "empty_like", pinned)
    there, here = [torch.ones(3).as_subclass(OfGpu) for _ in range(3)], torch.zeros(2)
    found = on_cpu_at_once({"a": there[0], "b": [there[1], {"c": there[2], "d": here}], "e": 7})
    assert done == ["copy", "copy", "copy", "wait"]
    assert found["b"][1]["d"] is here
    assert (found["e"], found["a"].tolist()) == (7, [1.0, 1.0, 1.0])


def test_all_tensors_are_asked_for_infinities_at_once(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(device, "numbers", lambda tensor: asked.append(1) or tensor.tolist())
    fine, bad = torch.ones(3), torch.tensor([1.0, float("inf")])
    assert device.not_finite({"a": fine, "b": bad, "c": bad, "d": fine}) == ["b", "c"]
    assert device.not_finite({"a": fine, "d": fine}) == []
    assert len(asked) == 2
    assert device.not_finite({}) == []


def test_images_are_evaluated_in_the_same_passes_on_any_number_of_gpus() -> None:
    """Eight times as many at once as on a CPU."""
    images = torch.arange(9001, dtype=torch.uint8).reshape(-1, 1, 1, 1).expand(-1, 32, 32, 3)
    count = images_per_pass(images, "cuda")
    assert count == 8 * images_per_pass(images, "cpu") == 4000
    assert images_per_pass(torch.empty(1, 4000, 4000, 3, device="meta"), "cuda") == 8
    examples = Examples(images, torch.arange(2, 9001), torch.zeros(8999))

    def passes(ranks: int) -> dict[int, torch.Tensor]:
        return {
            int(numbers[0]): pixels
            for rank in range(ranks)
            for numbers, pixels in examples.passes(count, (32, 32), rank, ranks)
        }

    alone = passes(1)
    assert [len(pixels) for pixels in alone.values()] == [4000, 4000, 999]
    for ranks in (2, 3, 4):
        shared = passes(ranks)
        assert shared.keys() == alone.keys()
        assert all(torch.equal(shared[first], alone[first]) for first in alone)


@pytest.mark.parametrize(("numbers", "found"), [
    # Without a GPU; with one; with one that has neither these counters nor NVIDIA's library.
    ((0.01, 0.002, 0, -1, -1, -1, -1), (0.01, 0.002, None, None, None, None, None)),
    ((0.01, 0.0, 2e9, 1234.56, 0.5, 0.0, 0.97), (0.01, 0.0, 2_000_000_000, 1234.6, 0.5, 0.0, 0.97)),
    ((0.01, 0.0, 2e9, -1, -1, -1, -1), (0.01, 0.0, 2_000_000_000, None, None, None, None)),
    # Only the results had to be written; nothing is known.
    ((0, 0, 0, 0, 0, 0, 0), (None,) * 7),
])  # fmt: skip
def test_what_a_gpu_has_measured_is_in_the_record(
    numbers: tuple[float, ...], found: tuple[float | None, ...]
) -> None:
    """In run.json, for every rank."""
    assert tuple(train.measured(numbers).values()) == found


@pytest.mark.parametrize(("device", "given", "slurm", "driver", "here"), [
    ("auto", None, False, True, True), ("auto", None, False, False, False),
    # A job that has asked for no GPU sees none.
    ("auto", None, True, True, False), ("auto", "0", True, True, True),
    ("cuda", None, True, True, True), ("cuda", "0", True, False, False),
    ("cpu", "0", False, True, False), ("cuda", "", False, True, False),
])  # fmt: skip
@pytest.mark.parametrize("maker", ["CUDA", "ROCR"])
def test_a_program_may_find_a_gpu_if_its_job_has_one(
    monkeypatch, maker: str, device: str, given: str | None, slurm: bool, driver: bool, here: bool
) -> None:
    exists, file = Path.exists, {"CUDA": "/dev/nvidiactl", "ROCR": "/dev/kfd"}[maker]
    monkeypatch.setattr(Path, "exists", lambda path: driver if str(path) == file else exists(path))
    environment = {"SLURM_JOB_ID": "7"} if slurm else {}
    if given is not None:
        # Without a name, CUDA's hides those of ROCm too.
        environment[f"{maker if given else 'CUDA'}_VISIBLE_DEVICES"] = given
    assert gpu_here(device, environment) == here
    found = environment_of(Environment(device=device), environment, "")
    assert found.get("ACCELERATE_USE_CPU") == (None if here else "true")


def test_of_torchs_warnings_only_those_of_what_we_mean_are_not_shown(tmp_path: Path) -> None:
    code = f"""
    import warnings
    from classifier.training.gradients import distributed
    from manynodes.experiment.config import read_run
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    run = read_run({json.dumps(RUN | {"nproc_per_node": 2})!r})
    first = [(torch.ones(2, 1, 2, 2), torch.zeros(2, dtype=torch.int64))]
    with process_group.process_group("cpu"):
        class Counting(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("passes", torch.zeros(()), persistent=False)
            def forward(self, images):
                self.passes += 1
                return images
        def network():
            return nn.Sequential(nn.Flatten(), Counting(), nn.Linear(4, 10))
        if {{shows}}:
            DistributedDataParallel(network(), broadcast_buffers=False)
        else:
            distributed(run, mine := network(), first)
            # Of the passes before the first step, nothing is left.
            assert mine[1].passes == 0
        warnings.warn("Grad strides do not match bucket view strides, and so on")
        warnings.warn("mine is shown")
    """
    ours = "`broadcast_buffers` is deprecated", "Grad strides do not match"
    for shows in (True, False):
        for rank in run_both(tmp_path, code.replace("{shows}", str(shows))):
            assert rank.returncode == 0, rank.stdout
            assert [line in rank.stdout for line in ours] == [shows, shows]
            assert "mine is shown" in rank.stdout


def test_what_is_on_the_cpu_is_not_copied() -> None:
    tensor = torch.ones(3)
    found = on_cpu_at_once({"a": [tensor, 1], 2: {"b": None, "c": tensor}})
    assert found["a"][0] is tensor is found[2]["c"]
    assert (found["a"][1], found[2]["b"]) == (1, None)


def test_an_operation_that_cannot_be_repeated_exactly_is_named_once_and_kept(
    digits: Path, tmp_path: Path
) -> None:
    """`put_` is one on every device."""
    network, output = tmp_path / "inexact.py", tmp_path / "run"
    network.write_text(
        WIDE.replace("nn.Flatten(),", "Put(), nn.Flatten(),").replace(
            "def make",
            "class Put(nn.Module):\n"
            "    def forward(self, x):\n"
            "        x.clone().put_(torch.zeros(1, dtype=torch.long), x.new_zeros(1))\n"
            "        return x\n\n\n"
            "def make",
        ).replace("from torch import nn", "import torch\nfrom torch import nn")
    )  # fmt: skip
    run = RUN | {"model": f"{network}:make", "epochs": 2, "learning_rate": 0.001}
    run.pop("widths")
    (output / "state").mkdir(parents=True)
    incidents.add(output / "state", incidents.SLOW, "in an earlier training")
    done = complete(output, digits, "--resume", "fresh", **run)
    line = "put_ cannot be repeated exactly on this device: the last bits"
    assert done.said.count(f"train: warning: {line}") == 1, done.said
    assert "deterministic" not in done.said
    kept = json.loads((output / "run.json").read_text())["incidents"]
    assert [(each["kind"], each["text"].startswith(line)) for each in kept] == [("inexact", True)]


@pytest.mark.parametrize("interface", ["eth0", None])
def test_a_network_that_nccl_cannot_use_is_told_with_how_to_name_another(
    monkeypatch, interface: str | None
) -> None:
    given: dict[str, object] = {}

    def refuse(*arguments: object, **options: object) -> None:
        given.update(options, backend=arguments[0])
        raise RuntimeError("ncclSystemError")

    monkeypatch.setenv("LAUNCH_SECRET", "0" * 64)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(process_group, "describe", lambda _process: HERE)
    monkeypatch.setattr(process_group, "meeting_place", lambda *_: dist.HashStore())
    monkeypatch.setattr(process_group, "join", lambda *_: {})
    monkeypatch.setattr(process_group, "interface_of", lambda _address: interface)
    monkeypatch.setattr(dist, "init_process_group", refuse)
    gpu = Process(0, 0, 2, torch.device("cuda", 0))
    wanted = f"set NCCL_SOCKET_IFNAME=={interface or 'INTERFACE'}, or another network's"
    with pytest.raises(Refusal, match=re.escape(wanted)):
        process_group.join_others(gpu, timedelta(seconds=9))
    assert (given["backend"], given["device_id"]) == ("nccl", gpu.device)
    # A time-out of NCCL's would end the process without a word before ours.
    assert given["timeout"] > timedelta(seconds=process_group.CONNECT)


def test_a_rank_on_a_gpu_is_near_it_and_can_be_named(monkeypatch, tmp_path: Path) -> None:
    """What only a GPU needs is done for one."""
    report, done = tmp_path / "report", []
    monkeypatch.setenv("LAUNCH_REPORT", str(report))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(process_group, "choose_device", lambda *_: gpu)
    monkeypatch.setattr(process_group, "stay_near", done.append)
    monkeypatch.setattr(process_group, "keep_freed_memory", lambda: done.append("memory"))
    monkeypatch.setattr(process_group, "describe", lambda _process: HERE)
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: CARD)
    with process_group.process_group("cuda") as process:
        assert process.device == gpu
    assert done == [gpu, gpu]
    assert json.loads(report.read_text()) == {"gpu": "GPU-8f3a, PCI 0000:17:00.0"}
    done.clear()
    monkeypatch.setattr(process_group, "choose_device", lambda *_: torch.device("cpu"))
    with process_group.process_group("cpu"):
        assert done == ["memory"]


def test_a_rank_that_waits_for_its_gpu_is_ended_in_time_after_a_signal(monkeypatch) -> None:
    given: list[object] = []

    def listened(*arguments: object) -> None:
        given.append(arguments[1])
        raise Stopped("here")

    monkeypatch.setattr(train, "listen", listened)
    run, arguments = read_run(json.dumps(RUN | {"nodes": 2})), SimpleNamespace(output=Path())
    for kind in ("cuda", "cpu"):
        rank = Process(1, 0, run.world_size, torch.device(kind))
        with pytest.raises(Stopped):
            train.train(run, None, rank, Environment.read(), arguments)
    assert given == [train.BLOCKED, None]
    assert train.BLOCKED < SUPERVISE_GRACE


@pytest.mark.parametrize("dumps", [True, False])
def test_a_rank_whose_memory_is_written_to_a_core_file_does_not_wait_for_a_disk(
    monkeypatch, dumps: bool
) -> None:
    monkeypatch.setattr(whereabouts, "stat_of", lambda _pid: ["D"])
    monkeypatch.setattr(whereabouts, "dumps_core", lambda _pid: dumps)
    assert whereabouts.state_of(os.getpid()) == ("" if dumps else "waiting for a disk")


def test_a_driver_that_does_not_answer_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def silent(seconds: float, command: list[str], **_options: object) -> None:
        asked.append(command)
        raise subprocess.TimeoutExpired(command, seconds)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus.shutil, "which", lambda name: name)
    monkeypatch.setattr(gpus, "answer_within", silent)
    gpus.answer_of_driver.cache_clear()
    try:
        for device in ("auto", "cuda"):
            with pytest.raises(Refusal, match="nvidia-smi does not answer"):
                gpus.usable_gpus(device, 1)
        # Who names them needs no answer.
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        assert gpus.usable_gpus("cuda", 1) == ["0"]
    finally:
        gpus.answer_of_driver.cache_clear()
    assert len(asked) == 1
