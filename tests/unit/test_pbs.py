"""PBS's requests, states and answers; the text is that of OpenPBS 23.06.06."""

import os
import signal
import subprocess
import threading
import types
from pathlib import Path

import pytest

from manynodes.base.errors import Refusal
from manynodes.experiment.config import Experiment, Run
from manynodes.experiment.job_size import evaluation_size, training_size
from manynodes.schedulers.pbs import commands as pbs_commands
from manynodes.schedulers.pbs import jobs as pbs_jobs
from manynodes.schedulers.pbs.commands import FULL, SEPARATOR, parse_jobs
from manynodes.schedulers.pbs.jobs import (
    Job,
    Jobs,
    job_name,
    known_state,
    script,
    try_submission,
    try_whole,
)
from manynodes.schedulers.pbs.requests import options
from manynodes.schedulers.pbs.scheduler import FIRST, end_of, job_hosts
from manynodes.schedulers.pbs.states import State, state_of
from manynodes.schedulers.registry import SCHEDULERS
from waiting import given_enough, until

REQUESTS = {
    ("cpu", 1): (
        "-l select=1:ncpus=4:mpiprocs=1:ompthreads=4:mem=4000mb -l walltime=02:10:00",
        "-l ncpus=4 -l mem=4000mb -l walltime=02:10:00",
    ),
    ("cpu", 3): (
        "-l select=3:ncpus=4:mpiprocs=1:ompthreads=4:mem=4000mb -l place=scatter "
        "-l walltime=02:10:00",
        "-l ncpus=12 -l mem=12000mb -l walltime=02:10:00",
    ),
    ("cuda", 1): (
        "-l select=1:ncpus=48:mpiprocs=1:ompthreads=48:mem=32000mb:ngpus=4 -l walltime=02:10:00",
        "-l ncpus=48 -l mem=32000mb -l ngpus=4 -l walltime=02:10:00",
    ),
    ("cuda", 2): (
        "-l select=2:ncpus=48:mpiprocs=1:ompthreads=48:mem=32000mb:ngpus=4 -l place=scatter "
        "-l walltime=02:10:00",
        "-l ncpus=96 -l mem=64000mb -l ngpus=8 -l walltime=02:10:00",
    ),
}


def run_on(device: str, nodes: int) -> Run:
    geometry = {"nproc_per_node": 4, "cpus_per_proc": 12} if device == "cuda" else {}
    config = {"experiment": "x", "nodes": nodes, "device": device, "global_batch_size": 504}
    (run,) = Experiment.from_config(config | geometry).runs.values()
    return run


@pytest.mark.parametrize(("device", "nodes"), REQUESTS)
@pytest.mark.parametrize("form", ["select", "totals"])
def test_a_run_becomes_qsub_s_options(device: str, nodes: int, form: str) -> None:
    resources = SCHEDULERS["pbs"].resources(training_size(run_on(device, nodes)))
    select, totals = REQUESTS[device, nodes]
    expected = select if form == "select" else totals
    assert " ".join(options(resources | {"runtime": 130}, form)) == expected


def test_the_site_s_settings() -> None:
    """The example for Gadi in docs/pbs.md."""
    resources = SCHEDULERS["pbs"].resources(training_size(run_on("cuda", 2)))
    site = {
        "runtime": 130, "pbs_queue": "gpuvolta", "pbs_project": "vp91", "jobfs": "10GB",
        "storage": "scratch/vp91", "pbs_extra": "-m n",
    }  # fmt: skip
    assert " ".join(options(resources | site, "totals")) == (
        "-l ncpus=96 -l mem=64000mb -l ngpus=8 -l jobfs=10GB -l walltime=02:10:00 "
        "-l storage=scratch/vp91 -q gpuvolta -P vp91 -m n"
    )
    chunks = options(resources | site | {"pbs_place": "scatter:excl"}, "select")
    assert chunks[1].endswith(":ngpus=4:jobfs=10GB")
    assert chunks[3] == "place=scatter:excl"


def test_local_disk_can_follow_the_data() -> None:
    resources = SCHEDULERS["pbs"].resources(training_size(run_on("cpu", 2)))
    site = resources | {"disk_mb": 40_000, "jobfs": "auto"}
    assert ":jobfs=41000mb" in options(site, "select")[1]
    assert "jobfs=82000mb" in options(site, "totals")


def test_evaluation_asks_for_one_node() -> None:
    resources = SCHEDULERS["pbs"].resources(evaluation_size(run_on("cpu", 3)))
    assert options(resources, "select") == [
        "-l", "select=1:ncpus=4:mpiprocs=1:ompthreads=4:mem=4000mb",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["pbs_queue", "pbs_project", "jobfs", "storage", "pbs_place"])
def test_a_value_that_would_be_another_option_is_refused(name: str) -> None:
    with pytest.raises(Refusal, match=f"{name}: a b has a blank"):
        options({name: "a b"}, "select")


def test_other_options_are_divided_as_a_shell_does() -> None:
    found = options({"pbs_extra": "-A 'my project' -v A=\"b c\""}, "select")
    assert found[-4:] == ["-A", "my project", "-v", "A=b c"]
    with pytest.raises(Refusal, match="pbs_extra: -A 'my: No closing quotation"):
        options({"pbs_extra": "-A 'my"}, "select")
    for name in ("-N mine", "-m n -Nmine"):
        with pytest.raises(Refusal, match="pbs_extra: -N: a job is found by a name of its own"):
            options({"pbs_extra": name}, "select")


STATES = [
    (
        {"job_state": "F", "Exit_status": "0", "substate": "92"},
        State("has ended", True, True, ran=True),
    ),
    (
        {"job_state": "F", "Exit_status": "0", "substate": "93"},
        State("has lost a node", True, node_lost=True),
    ),
    (
        {"job_state": "F", "Exit_status": "1", "substate": "93",
         "comment": "Job run at 1 and failed"},
        State("ended with status 1", True, ran=True),
    ),
    (
        {
            "job_state": "F", "Exit_status": "-29", "substate": "93",
            "comment": "Job run at Sun on (n1:ncpus=1) and exceeded resource walltime",
        },
        State("has exceeded its walltime", True),
    ),
    (
        {"job_state": "F", "Exit_status": "271", "substate": "91"},
        State("was deleted (qdel)", True),
    ),
    (
        {"job_state": "F", "Exit_status": "271", "substate": "93"},
        State("was ended by a signal (qsig?)", True),
    ),
    (
        {"job_state": "F", "Exit_status": "265", "substate": "93"},
        State("was ended by SIGKILL", True),
    ),
    ({"job_state": "F", "substate": "91"}, State("was deleted before it ran", True)),
    (
        {"job_state": "Q", "comment": "Can Never Run: Insufficient amount of resource: ncpus"},
        State("can never run: Insufficient amount of resource: ncpus", True, never=True),
    ),
    (
        {"job_state": "Q", "comment": "Not Running: Insufficient amount of resource: ncpus"},
        State("waits: Insufficient amount of resource: ncpus", waits=True),
    ),
    ({"job_state": "R", "exec_host": "n1/0*2+n2/0*2"}, State("runs on n1, n2")),
    ({"job_state": "E", "exec_host": "n1.site/0"}, State("runs on n1")),
    ({"job_state": "H"}, State("is held", waits=True)),
]  # fmt: skip


@pytest.mark.parametrize(("shown", "state"), STATES)
def test_what_qstat_shows_in_words(shown: dict[str, str], state: State) -> None:
    assert state_of(shown) == state


def test_qstat_s_answer_for_several_jobs() -> None:
    lines = [
        ["Job Id: 1.login", "Job_Name=a=b|c", "job_state=R", "Resource_List.walltime=00:02:00"],
        ["Job Id: 2.login", "Variable_List=A=1,B=two\nlines", "job_state=F"],
    ]
    found = parse_jobs("\n".join(SEPARATOR.join(line) for line in lines))
    assert found["1.login"]["Job_Name"] == "a=b|c"
    assert found["1.login"]["Resource_List.walltime"] == "00:02:00"
    assert found["2.login"] == {"Variable_List": "A=1,B=two\nlines", "job_state": "F"}
    assert parse_jobs("") == {}


def test_the_end_of_a_job() -> None:
    # date --utc --date='2026-11-22 13:52:51' +%s: 1795355571
    shown = {"stime": "Sun Nov 22 13:52:51 2026", "Resource_List.walltime": "01:02:03"}
    assert end_of(shown, 0) == 1795355571 + 3723
    assert end_of({"stime": shown["stime"]}, 0) is None


def test_the_nodes_of_a_job(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("n2\nn2\nn1\nn1\n")
    assert job_hosts({"PBS_NODEFILE": str(file)}) == ("n2", "n1")
    with pytest.raises(Refusal, match="PBS_NODEFILE: not set; start launch inside the job"):
        job_hosts({})


def test_names_that_pbs_accepts() -> None:
    assert job_name("snakejob.training.3.sh") == "snakejob_traini"
    assert job_name("1 ä") == "j1__"


def commands(folder: Path, monkeypatch: pytest.MonkeyPatch, qsub: str) -> None:
    """A PBS whose qsub runs these lines of shell; the jobs that it deletes are in `deleted`."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    texts = {"qsub": f"cat > {folder}/script; {qsub}", "qdel": f'echo "$@" > {folder}/deleted',
             "qstat": "true"}  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("qsub", "deleted", "refusal"),
    [
        ("echo you have used 3 of 9 hours; echo 7.site.edu", "", None),
        ("echo 7.site.edu; exit 3", "7.site.edu", "qsub ended with status 3"),
        ("echo 7.site.edu; echo 8.site.edu", "7.site.edu 8.site.edu", "no job id in '7.site.edu 8"),
        ("echo welcome", "", "no job id in 'welcome'"),
    ],
)
def test_no_job_that_qsub_has_submitted_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, qsub: str, deleted: str, refusal: str | None
) -> None:
    commands(tmp_path, monkeypatch, qsub)
    jobs = Jobs("select", "")
    job = type("Job", (), {"resources": {}})()
    info = types.SimpleNamespace(job=job, external_jobid=None)
    told: list[tuple] = []
    jobs.tell_state = lambda *state: told.append(state)
    error = jobs.submit(info, "x", "true")
    assert told == ([] if refusal else [(job, "7.site.edu", "is submitted", True)])
    if refusal is None:
        assert error is None
        assert info.external_jobid == "7.site.edu"
    else:
        assert error is not None
        assert f"PBS refused the job: {refusal}" in error
        assert info.external_jobid is None
    done = tmp_path / "deleted"
    assert (done.read_text().strip() if done.exists() else "") == deleted


def test_what_the_server_took_without_an_answer_is_not_submitted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = tmp_path / "tries"
    commands(tmp_path, monkeypatch, "echo >> tries; exec sleep 1000")
    (tmp_path / "qselect").write_text(f'#!/bin/sh\necho "$2" > {tmp_path}/name; echo 7.site\n')
    (tmp_path / "qselect").chmod(0o755)
    monkeypatch.setattr(pbs_jobs, "PAUSE", 0.01)
    jobs = Jobs("select", "", lambda _line: None)
    info = types.SimpleNamespace(job=type("Job", (), {"resources": {}})(), external_jobid=None)

    def submit(seconds: float) -> str | None:
        monkeypatch.setattr(pbs_commands, "TIMEOUT", seconds)
        tries.unlink(missing_ok=True)
        return jobs.submit(info, "snakejob.training.1.sh", "true")

    assert given_enough(0.5, submit, tries.exists) is None
    assert info.external_jobid == "7.site"
    assert tries.read_text() == "\n"
    (job,) = jobs.known.values()
    assert (tmp_path / "name").read_text().strip() == job.options[1]
    assert job.options[1].startswith("snakejob__")


def test_ctrl_c_waits_for_the_number_of_the_job_that_is_being_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands(tmp_path, monkeypatch, "touch begun; sleep 1; echo 7.site")
    jobs = Jobs("select", "")
    info = types.SimpleNamespace(job=type("Job", (), {"resources": {}})(), external_jobid=None)

    def interrupt() -> None:
        until((tmp_path / "begun").exists)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        jobs.submit(info, "x", "true")
    thread.join()
    jobs.cancel()
    assert (tmp_path / "deleted").read_text() == "7.site\n"


@pytest.mark.parametrize("answers", [True, False])
def test_ctrl_c_while_a_submission_is_tried_leaves_no_held_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    commands(tmp_path, monkeypatch, "touch begun; sleep 1; echo 7.site")
    if not answers:
        (tmp_path / "qstat").write_text("#!/bin/sh\nexit 1\n")
    told: list[str] = []

    def interrupt() -> None:
        until((tmp_path / "begun").exists)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(Refusal, match="^pbs: interrupted before the first job$"):
            try_whole((), told.append)
    finally:
        signal.signal(signal.SIGINT, before)
        thread.join()
    assert (tmp_path / "deleted").read_text() == "7.site\n"
    assert told == ([] if answers else ["PBS does not answer; when it does: qdel 7.site"])


@pytest.mark.parametrize(("said", "waits"), [
    ("Maximum number of jobs already in complex", True),
    ("Maximum number of jobs for user ann already in queue workq", True),
    ("Maximum number of jobs in 'Q' state for project p1 already in queue workq", True),
    ("would exceed queue generic's per-user limit", True),
    ("would exceed complex's per-group limit of jobs in 'Q' state", True),
    ("would exceed per-user limit on resource ncpus in complex", False),
    ("would exceed complex's per-user limit on resource ncpus", False),
    ("would exceed user ann's limit on resource ncpus in queue workq for jobs in 'Q' state", False),
    ("Job violates queue and/or server resource limits", False),
])  # fmt: skip
def test_only_a_limit_on_jobs_is_waited_for(said: str, waits: bool) -> None:
    assert bool(FULL.search(f"qsub: {said}\n")) == waits


def test_beyond_a_limit_on_jobs_they_are_submitted_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each submission fails twice, and twice again when the job is submitted again."""
    said = "qsub: would exceed queue generic's per-user limit"
    commands(tmp_path, monkeypatch, (
        f'echo >> tries; n=$(wc -l < tries); [ $((n % 3)) = 0 ] && echo $n.site || '
        f'{{ echo "{said}" >&2; exit 1; }}'
    ))  # fmt: skip
    monkeypatch.setattr(pbs_jobs, "PAUSE", 0.01)
    told: list[str] = []
    jobs = Jobs("select", "", told.append)
    info = types.SimpleNamespace(job=type("Job", (), {"resources": {}})(), external_jobid=None)
    assert jobs.submit(info, "x", "true") is None
    assert info.external_jobid == "3.site"
    assert told == [f"{said}; jobs are submitted when others have ended"]
    assert FIRST not in (tmp_path / "script").read_text()
    (job,) = jobs.known.values()
    # Of the first submission: not that of the next one.
    job.file(".status").write_text("75")
    lost = State("has lost a node", ended=True, node_lost=True)
    for number in ("3.site", "3.site", "6.site"):
        assert jobs.again(job, lost)
        assert info.external_jobid == number
    assert told[1:] == ["job 3.site has lost a node; it continues as job 6.site"]
    assert job.file(".status").read_text() == ""
    # By which a launch knows that it continues.
    assert f"\nexport {FIRST}=3.site\n" in (tmp_path / "script").read_text()
    try_submission(("-q", "workq"), told.append)
    assert not (tmp_path / "deleted").exists()


@pytest.mark.parametrize(
    ("init", "status"),
    [("true\nexport OF_SITE=1", "0"), ("no-such-module", "127"), ("source ./site", "0")],
)
def test_a_job_whose_preparation_fails_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, init: str, status: str
) -> None:
    job = Job(None, tmp_path / "a job", [])
    (tmp_path / "site").write_text("false\ntrue\n")
    monkeypatch.chdir(tmp_path)
    text = script("echo ran", init, job)
    done = subprocess.run(["bash", "-c", text], env={"PATH": os.environ["PATH"]}, check=False)
    assert done.returncode == int(status)
    said = job.file(".log").read_text()
    assert ("ran" in said.split()) == (status == "0")
    assert (f"pbs-init: {init} ended with status 127" in said) == (status == "127")
    assert job.file(".status").read_text().strip() == status


def test_a_preparation_changes_neither_the_folder_of_the_job_nor_how_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = Job(None, tmp_path / "a job", [])
    text = script("pwd; (exit 3)", "cd / && set -e", job)
    done = subprocess.run(["bash", "-c", text], env={"PATH": os.environ["PATH"]}, check=False)
    assert done.returncode == 3
    assert job.file(".log").read_text() == f"{tmp_path}\n"
    assert job.file(".status").read_text() == "3\n"


@pytest.mark.parametrize("status", ["0", "1"])
def test_a_job_that_did_not_reach_its_script_is_told(tmp_path: Path, status: str) -> None:
    """A start file of the shell has ended it, with success or not."""
    told: list[str] = []
    jobs = Jobs("select", "", told.append)
    info = types.SimpleNamespace(job="train")
    shown = {"job_state": "F", "Exit_status": status, "substate": "93" if int(status) else "92"}
    for name in ("a", "b"):
        job = Job(info, tmp_path / name, [], "7.site")
        job.file(".sh").touch()
        if name == "b":
            job.file(".log").touch()
        state = known_state(job, shown)
        assert jobs.end(job, state) == (status == "0")
        assert ("it did not reach its script: does" in state.line) == (name == "a")
        assert ("did not reach" in jobs.failures.pop("train", "")) == (name == "a")
        # What it would have run.
        assert job.file(".sh").exists() == (name == "a" or status == "1")
    assert len(told) == (status == "0")


def shown(number: str, state: str, user: str = "$(id -un)", folder: str = "$PWD") -> str:
    variables = f"PBS_O_HOME=/root,PBS_O_WORKDIR={folder},PBS_O_QUEUE=batch"
    return (
        f'printf "Job Id: {number}.site\\037job_state={state}\\037Job_Owner={user}@n1'
        f'\\037Variable_List={variables}\\n"'
    )


@pytest.mark.parametrize(
    ("qstat", "left"),
    [
        (f"{shown('7', 'Q')}; {shown('8', 'F')}", {"7.site": False}),
        (f"{shown('8', 'R')}", {"8.site": True}),
        # Of another user, and of another folder.
        (f"{shown('7', 'R', user='other')}; {shown('8', 'R', folder='/elsewhere')}", {}),
        ("exit 153", {}),
        ("exit 1", None),
    ],
)
def test_the_jobs_of_an_earlier_command_that_are_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, qstat: str, left: dict[str, bool] | None
) -> None:
    commands(tmp_path, monkeypatch, "true")
    (tmp_path / "qstat").write_text(f"#!/bin/sh\n{qstat}\n")
    assert SCHEDULERS["pbs"].unended(["7.site", "8.site"]) == left
