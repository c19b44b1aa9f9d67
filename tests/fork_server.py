"""Forks for each program that forked.py asks for: `fork_server.py SOCKET [MODULE …]`, a descriptor
and what to import.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

# Only what others wrote: our own modules are imported by each program, from its checkout.
IMPORTED = (
    "torch", "torch._dynamo", "torch.distributed.run", "torchvision", "safetensors.torch", "tqdm",
    "PIL.Image", "sklearn.datasets", "matplotlib.pyplot", "pandas", "jsonschema", "yaml", "rich",
    "snakemake.cli", "snakemake_executor_plugin_slurm",
)  # fmt: skip


def serve(requests: socket.socket, modules: Sequence[str]) -> None:
    """Fork for each request until nobody can make one."""
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    # No program's end is the end of what is imported here: for torch's operators alone, each copied
    # 9,000 pages, in 40 ms.
    for each in gc.get_objects():
        if type(each) is weakref.finalize:
            each.atexit = False
    # Otherwise each program looks for garbage in all of this, and so copies it.
    gc.freeze()
    gc.enable()
    in_huge_pages()
    waits: dict[int, int] = {}
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # Ctrl-C is for the tests; this process ends when they do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([requests, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            while waits:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                end = waits.pop(pid)
                # Its reader may have been interrupted.
                with suppress(BrokenPipeError):
                    os.write(end, b"%d\n" % os.waitstatus_to_exitcode(status))
                os.close(end)
        if requests in ready:
            size, descriptors, _, _ = socket.recv_fds(requests, 8, 3)
            if not size:
                return
            order = receive(requests, int.from_bytes(size))
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for descriptor in (requests.fileno(), woken, wake, *waits.values()):
                    os.close(descriptor)
                become(*json.loads(order), descriptors)
            *theirs, waits[pid] = descriptors
            os.write(waits[pid], b"%d\n" % pid)
            for descriptor in theirs:
                os.close(descriptor)


def in_huge_pages() -> None:
    """Move what is loaded into huge pages: a fork copies a table of all pages, which took three
    quarters of its time (57 ms; 16 with 200 huge pages). Linux before 6.1 leaves all as it is.

    Source: MADV_COLLAPSE in madvise(2).
    """
    madvise, collapse = ctypes.CDLL(None).madvise, 25
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, *_, inode = line.split()[:5]
        begin, end = (int(address, 16) for address in addresses.split("-"))
        if (rights, inode) == ("rw-p", "0"):
            madvise(begin, end - begin, collapse)


def receive(requests: socket.socket, size: int) -> bytes:
    text = b""
    while len(text) < size:
        text += requests.recv(size - len(text))
    return text


def become(
    command: list[str], cwd: str, environment: dict[str, str], descriptors: list[int]
) -> None:
    """Be the program, to its end."""
    out, errors, end = descriptors
    os.dup2(out, 1)
    os.dup2(errors, 2)
    for descriptor in (out, errors, end):
        os.close(descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    sys.path[1:1] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv = command
    status = status_of(command, cwd)
    # Without Python's own end, which takes longer than most programs: it frees all modules.
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


def status_of(command: list[str], cwd: str) -> int:
    """Run the program; returns its exit status."""
    sys.argv = command
    try:
        if command[0] == "-m":
            sys.path[0] = cwd
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(command[0]).resolve().parent)
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:] or IMPORTED)
