"""Snakemake's own handler of SIGTERM, as this workflow patches it."""

import subprocess
import sys
from pathlib import Path

import pytest

RULES = Path(__file__).parents[2] / "workflow/rules"
# A real scheduler object and a real signal; only what the handler uses is there.
SIGNALLED = """
import os, signal, threading, time
from snakemake.scheduling.job_scheduler import JobScheduler
{patch}
scheduler = JobScheduler.__new__(JobScheduler)
scheduler._lock, scheduler._open_jobs = threading.Lock(), threading.Semaphore(0)
signal.signal(signal.SIGTERM, scheduler.exit_gracefully)
with scheduler._lock:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
assert scheduler._open_jobs.acquire()
print(scheduler._user_kill)
"""


@pytest.mark.parametrize("patched", [True, False])
def test_a_signal_that_comes_while_the_scheduler_holds_its_lock_ends_it(patched: bool) -> None:
    patch = "from patches import end_in_a_thread; end_in_a_thread()" if patched else ""
    command = [sys.executable, "-c", SIGNALLED.format(patch=patch)]
    if patched:
        done = subprocess.run(command, cwd=RULES, capture_output=True, text=True, check=False)
        assert done.stdout == "graceful\n", done.stderr
    else:
        # If this ends, Snakemake has repaired it, and the patch can go.
        with pytest.raises(subprocess.TimeoutExpired):
            subprocess.run(command, cwd=RULES, capture_output=True, timeout=5, check=False)
