"""What this workflow patches in Snakemake: its handler of SIGTERM, and how it finds changes."""

import json
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Set
from pathlib import Path
from types import SimpleNamespace

import pytest

from forked import server
from manynodes.base.errors import Refusal
from manynodes.experiment.config import Experiment
from manynodes.experiment.file import read_config
from manynodes.experiment.installed_program import ask
from waiting import until

RULES = Path(__file__).parents[2] / "workflow/rules"
TERMINATING = "Terminating processes on user request, this might take some time."


def patch(name: str, patched: bool) -> str:
    """A line of Python that applies one of our patches, or none."""
    path = f"import sys; sys.path.insert(0, {str(RULES)!r})"
    return f"{path}; import patches; patches.{name}()" if patched else ""


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
    script = SIGNALLED.format(patch=patch("end_in_a_thread", patched))
    command = [sys.executable, "-c", script]
    if patched:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stdout == "graceful\n", done.stderr
    else:
        # If this ends, Snakemake has repaired it, and the patch can go.
        with pytest.raises(subprocess.TimeoutExpired):
            subprocess.run(command, capture_output=True, timeout=5, check=False)


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
    snakefile = tmp_path / "Snakefile"
    command = ["-m", "snakemake", "--cores", "1", "--quiet", "--snakefile", str(snakefile)]
    for number in (1, 2):
        snakefile.write_text(
            GRAPH.format(patch=patch("look_behind_ancient_files", patched), number=number)
        )
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
    snakefile = LOCKED.format(patch=patch("leave_the_locks_of_others", patched))
    (tmp_path / "Snakefile").write_text(snakefile)
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


INTERRUPTED = """
{patch}
onerror:
    print("told how it ended")
rule all:
    output: "done"
    shell: "touch begun; sleep 3; exit 1"
"""


@pytest.mark.parametrize("patched", [True, False])
def test_a_second_ctrl_c_keeps_no_hook_from_running(tmp_path: Path, patched: bool) -> None:
    snakefile = INTERRUPTED.format(patch=patch("cancel_once", patched))
    (tmp_path / "Snakefile").write_text(snakefile)
    command = [sys.executable, "-m", "snakemake", "--cores", "1"]
    # The job gets no signal, as one that takes its time to end.
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    until((tmp_path / "begun").exists, process)
    process.send_signal(signal.SIGINT)
    assert process.stdout
    said = "".join(iter(process.stdout.readline, f"{TERMINATING}\n"))
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    said += process.communicate()[0]
    # If Snakemake does so by itself, the patch can go.
    assert ("told how it ended" in said, "Traceback" in said) == (patched, not patched), said
    assert process.returncode != 0


def command(path: Path, runs: Set[str] = frozenset()) -> tuple[SimpleNamespace, Experiment]:
    """What a Snakemake has of a configuration."""
    from session.configuration import folder_of

    settings = SimpleNamespace(configfiles=[path])
    workflow = SimpleNamespace(configfiles=[path], config_settings=settings)
    return workflow, Experiment.from_files(read_config(path), [folder_of(path)], runs)


def test_jobs_read_the_configuration_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is edited while they wait; a table of runs is read by the job."""
    monkeypatch.syspath_prepend(RULES)
    from session import configuration
    from session.configuration import folder_of

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    config, table = Path("mine/a.yaml"), Path("mine/runs.csv")
    config.write_text("experiment: a\ncommand: ['true', '{lr}']\nruns: runs.csv\n")
    table.write_text("lr\n1\n2\n")
    workflow, experiment = command(config)
    first, *_ = experiment.runs
    parsed = {config: config.read_bytes()}
    config.write_text("experiment: b\ncommand: ['false']\n")
    configuration.keep(workflow, experiment, parsed)
    (copy,) = workflow.config_settings.configfiles
    assert folder_of(copy.absolute()) == Path("mine")
    # Another run does not matter to this one's job.
    table.write_text("lr\n1\n2\n3\n")
    job = command(copy.absolute(), {first})
    configuration.as_submitted(*job)
    assert job[1].runs[first].command == ("true", "{lr}")
    table.write_text("lr\n1.5\n")
    with pytest.raises(Refusal, match="has other values than when this job was submitted"):
        configuration.as_submitted(*command(copy))


def test_a_job_need_not_see_the_folder_of_an_environment_that_is_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs the copy: where a module of it lies and what is locked was known before."""
    monkeypatch.syspath_prepend(RULES)
    from session import configuration

    monkeypatch.chdir(tmp_path)
    venv.create("project/.venv", symlinks=True)
    (packages,) = Path("project/.venv").glob("lib/python3*/site-packages")
    (packages / "mine.pth").write_text(str(tmp_path / "src"))
    Path("src/mypkg").mkdir(parents=True)
    for name in ("train", "test"):
        Path(f"src/mypkg/{name}.py").write_text(f"print('{name}')\n")
    Path("project/uv.lock").write_text("version = 1\n")
    config = Path("e.yaml")
    config.write_text("experiment: e\nprogram: mypkg.train\nevaluate: mypkg.test\n"
                      "environment: {uv: project, stage: true}\n")  # fmt: skip
    workflow, experiment = command(config)
    configuration.keep(workflow, experiment, {config: config.read_bytes()})
    (copy,) = workflow.config_settings.configfiles

    def known(experiment: Experiment) -> list[object]:
        hashes = experiment.sources_sha256, experiment.code_sha256, experiment.evaluation_sha256
        return [*hashes, json.dumps(experiment.reads)]

    before = known(experiment)
    ask.cache_clear()
    Path("project").rename("elsewhere")
    assert known(configuration.as_submitted(*command(copy.absolute()))) == before
    with pytest.raises(Refusal):
        known(command(copy.absolute())[1])


def test_a_job_imports_nothing_from_the_working_directory(tmp_path: Path) -> None:
    """As the command `snakemake` does not."""
    (tmp_path / "queue.py").write_text("raise SystemExit('mine')\n")
    command = [sys.executable, RULES / "in_job.py", "", "-m", "snakemake", "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


RESOURCES = """
from types import SimpleNamespace
from snakemake.resources import Resources
import patches
for text in {texts}:
    resources = Resources.parse([text], allow_expressions=True, defaults="bare")
    given = dict(_parsed_default_resources=resources, _parsed_overwrite_resources=dict())
    patches.leave_names_alone(SimpleNamespace(**given))
    print(resources[text.partition("=")[0]].is_evaluable())
"""


def test_a_resource_that_is_a_name_is_this_text_unless_it_is_a_value_or_wrong() -> None:
    texts = ["slurm_partition=open", "attempts=attempt", "mem_mb=foo", "mem_mb=None"]
    command = [sys.executable, "-c", RESOURCES.format(texts=[*texts, "runtime=open"])]
    done = subprocess.run(command, cwd=RULES, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "True", "True", "True"], done.stderr
    assert "Resource 'runtime' with value 'open' could not be parsed as minutes" in done.stderr
