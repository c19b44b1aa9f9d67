"""What this workflow patches in Snakemake: its handler of SIGTERM, and how it finds changes."""

import subprocess
import sys
from pathlib import Path

import pytest

from forked import server

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


GRAPH = """
{patch}
rule all:
    input: "trained"
rule stage:
    output: "staged"
    params: number={number}
    shell: "echo {{params.number}} > {{output}}"
rule train:
    input: ancient("staged")
    output: "trained"
    params: number={number}
    shell: "echo {{params.number}} > {{output}}"
"""


@pytest.mark.parametrize("patched", [True, False])
def test_a_change_behind_a_job_that_runs_again_is_seen(tmp_path: Path, patched: bool) -> None:
    patch = (
        f"import sys; sys.path.insert(0, {str(RULES)!r}); import patches; "
        "patches.look_behind_ancient_files()"
        if patched
        else ""
    )
    snakefile = tmp_path / "Snakefile"
    command = ["-m", "snakemake", "--cores", "1", "--quiet", "--snakefile", str(snakefile)]
    for number in (1, 2):
        snakefile.write_text(GRAPH.format(patch=patch, number=number))
        done = server().run(command, tmp_path)
        assert done.returncode == 0, done.stderr
    # If Snakemake finds it by itself, it has repaired this, and the patch can go.
    assert (tmp_path / "trained").read_text() == ("2\n" if patched else "1\n")
    assert (tmp_path / "staged").read_text() == "2\n"


LOCKED = """
{patch}
rule all:
    output: touch("done")
"""


@pytest.mark.parametrize("patched", [True, False])
def test_the_locks_of_another_command_stay(tmp_path: Path, patched: bool) -> None:
    patch = (
        f"import sys; sys.path.insert(0, {str(RULES)!r}); import patches; "
        "patches.leave_the_locks_of_others()"
    )
    (tmp_path / "Snakefile").write_text(LOCKED.format(patch=patch if patched else ""))
    lock = tmp_path / ".snakemake/locks/7.output.lock"
    lock.parent.mkdir(parents=True)
    lock.write_text(f"{tmp_path}/of another\n")
    command = ["-m", "snakemake", "--cores", "1", "--quiet"]
    done = server().run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    # If Snakemake leaves them by itself, the patch can go.
    assert lock.exists() == patched
    assert len(list(lock.parent.glob("*"))) == patched
    assert server().run([*command, "--unlock"], tmp_path).returncode == 0
    assert not lock.exists()
