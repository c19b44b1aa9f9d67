"""A user's mistakes in the file of a program of their own, as the first checks of Snakemake find
them. tests/workflow/test_mistakes.py runs Snakemake itself.
"""

import json
import os
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from manynodes.base.errors import Refusal
from manynodes.experiment.command import EMPTY, command
from manynodes.experiment.config import Experiment
from manynodes.experiment.file import read_config
from manynodes.experiment.installed_program import ask, file_of, folder_above
from manynodes.experiment.missing import refuse_missing_program
from manynodes.programs.attempt import files_sha256, folder_of
from manynodes.programs.folders import Folders
from manynodes.programs.task import Task
from manynodes.schedulers.registry import on_hosts
from programs import finished, program
from session.command import Session
from session.finished import FinishedRuns
from session.inputs import Inputs

REFUSED = {
    "program: nowhere.py": "config: program: nowhere.py is not there",
    "program: bad.py": "bad.py:1: invalid syntax",
    "program: fit.sh": 'config: program: "fit.sh" is neither a Python file nor a module; give',
    "program: p.py --lr 0.1": 'config: program: "p.py --lr 0.1" is neither a Python file nor a',
    "program: p.py\narguments: ['{run}']": (
        "config: arguments: {run} stands for nothing; choose another name, or write {{run}}"
    ),
    "program: p.py\ndirectory: 'x{3}'": "stands for nothing; choose another name, or write {{3}}",
    "program: declares/p.py\nlr: 1\nevaluate: [p.py, '{new}']": (
        "config: evaluate: {new} stands for nothing; declare new in parameters.yaml, or write"
    ),
    "program: p.py\nevaluate: evalaute": 'config: evaluate: "evalaute" is neither a Python file',
    "program: p.py\nevaluate: [1, 2]": 'config: evaluate: "1" is neither a Python file nor a',
    "program: p.py\nprogramm: x": "config: programm: unknown key; did you mean program?",
    "program: p.py\ncommand: [ls]": "config: command: program is given too",
    "program: p.py\narguments: ['{lr}']": "config: arguments: {lr} stands for nothing",
    "program: p.py\narguments: --lr {lr} --name 'a b' --x 007": (
        'is not a list; write [--lr, "{lr}", --name, "a b", --x, "007"]'
    ),
    "program: p.py\narguments: [--lr, {lr}]": 'is not text or a number; write "{lr}"',
    "program: p.py\nparameters: {x: [a, ä, b, ö]}": (
        'config: x: "ä" and "ö" would have folders of one name; write one of them in another way'
    ),
    "program: 'x{y}/p.py'": (
        'config: program: "x{y}/p.py": what is in braces would be filled in; rename it, or work in'
    ),
    "command: [bash, 'x{y}/p.py']": 'config: command: "x{y}/p.py": what is in braces would be',
    "program: p.py\nevaluate: ['x{y}/p.py', 1]": 'config: evaluate: "x{y}/p.py": what is in',
    "program: p.py\ndirectory: 'x{y}'": 'config: directory: "x{y}": what is in braces would be',
    "program: p.py\noutputs: 5": "config: outputs: 5 is not a list",
    "program: p.py\noutputs: [../x]": 'config: outputs: "../x" is not a path inside',
    "program: p.py\nparameters: {nodes: 2}": "config: parameters.nodes: has a meaning",
    "program: p.py\nparameters: {a-b: 2}": 'config: parameters: "a-b" is not a name of letters',
    "command: [./sovler]": 'config: command: "./sovler" is not there; give the path of a file',
    "command: [./plain.sh]": 'config: command: "plain.sh" is not executable: chmod +x, or',
    "command: [./windows.sh]": "has Windows line endings, with which no interpreter is found;",
    'program: p.py\nmetrics: {log: "epoch (?P<epoch>\\d+)"}': (
        "found unknown escape character 'd'; in double quotes \\ begins an escape, in single"
    ),
    'program: "x\\0/y.py"': "has a character that no command line can hold; leave it out",
    'program: p.py\nenvironment: {container: "x\\0.sif"}': (
        'config: environment: "x\\u0000.sif" has a character that no command line can hold;'
    ),
    'command: ["{python}", -m]': "{python} is given neither a file nor a module; name one",
    'command: ["{python}", ""]': "{python} is given neither a file nor a module; name one",
    "program: torch.distributed.run\narguments: [p.py]\nnodes: 2": (
        "config: program: torch.distributed.run would start ranks of its own in each of 2 processes"
    ),
    "command: []": "config: command: [] is too short; give at least one value",
    f"command: [ls]\narguments: {[0] * 1001}": "is too long; the most is 1000",
    "program: p.py\nenvironment: {}": (
        "config: environment: {} has too few keys; give at least 1, or leave it out"
    ),
    "program: p.py\nmetrics: {}": "config: metrics: {} has too few keys; give at least 1, or",
    "dataset: {name: partial}": 'config: dataset.name: "partial" is taken; choose another name',
    "program: p.py\nfiles: [.]": 'config: files: "." has no name; files are staged',
    "arguments: [a]": "config: arguments: is for your own program; give program or command",
    "environment: {uv: .}": "config: environment: is for your own program",
    "program: p.py\nhosts: ~nosuchuser/hosts": "hosts: ~nosuchuser/hosts: No such file or",
    "program: p.py\nhosts: ./pipe": "pipe: is not a regular file; give",
    "program: p.py\nhosts: [-oProxyCommand=x]": "hosts: -oProxyCommand=x is not the name of a host",
    "program: p.py\nenvironment: {python: a, uv: b}": (
        "config: environment: python and uv are given; keep one of them"
    ),
    "program: p.py\nenvironment: {container: none.sif}": (
        "config: environment: none.sif: No such file or directory; correct environment"
    ),
    "program: p.py\nenvironment: {container: p.py}": (
        "config: environment: p.py is no image of apptainer's (SIF)"
    ),
    "program: p.py\nenvironment: {container: 'docker://python:3.12'}": (
        "config: environment: docker://python:3.12 is no file; make one: apptainer pull image.sif "
        "docker://python:3.12, and give that"
    ),
    "program: p.py\nenvironment: {container: .}": (
        "is no file; make one: apptainer build image.sif "
    ),
    "program: p.py\nenvironment: {container: 'localhost/p:1', stage: true}": (
        "config: environment.stage: needs the folder of a venv, conda or uv, or an image's file"
    ),
    "program: p.py\nenvironment: {container: x.sif, strict: true}": (
        "config: environment.strict: an image is one whole; leave strict out"
    ),
    "program: p.py\nenvironment: {setup: 'true', strict: true}": (
        "config: environment.strict: needs python, conda or uv, and neither modules nor setup; "
        "leave strict out"
    ),
    "program: p.py\nenvironment: {options: [--nv]}": (
        "config: environment.options: these are for a container; give it too"
    ),
    "program: p.py\nenvironment: {pythn: a}": (
        "config: environment.pythn: unknown key; did you mean python?"
    ),
    "program: p.py\nenvironment: {modules: []}": (
        "config: environment.modules: [] is too short; give at least one value"
    ),
    "program: p.py\nmetrics: 'epoch (?P<epoch>\\d+) loss (?P<loss>\\S+)'": (
        " is no path; an expression for lines of the log is metrics: {log: '…'}, in single quotes"
    ),
    # As it comes from --config, where it is no YAML.
    "program: p.py\nresult: '{log: \"epoch .\\d+\"}'": (
        "is no path; an expression for lines of the log is metrics: {log: '…'}, in single quotes"
    ),
    "program: p.py\nenvironment: {uv: locked}": (
        "locked/.venv is not there; run `uv sync --locked` in locked"
    ),
    "program: p.py\nenvironment: {uv: declares}": (
        "declares/.venv is not there; run `uv sync` in declares"
    ),
    "program: p.py\nmetrics: {log: 'loss (?P<loss>\\S+) accuracy (?P<accuracy>\\S+)'}": (
        "has no group that counts; name one step, iter or epoch, such as (?P<epoch>\\d+), or let"
    ),
    "program: p.py\nmetrics: {log: 'epoch (?P<epoch>\\S+)'}": (
        'config: metrics.log: "epoch (?P<epoch>\\\\S+)" has only one named group; name each number'
    ),
    "program: p.py\nmetrics: {log: ['(?P<epoch>.) (?P<a>.)', '(?P<step>.) (?P<b>.)']}": (
        "metrics.log: one expression counts epoch, another step; let the first of these names"
    ),
    "program: p.py\nruns: [{subject: A, x: 1}, {subject: a, x: 1}]": (
        "and another one would have folders of one name; write a value in another way"
    ),
    "program: p.py\nparameters: {" + ", ".join(f"p{n}: {'x' * 4000}" for n in range(21)) + "}": (
        "; at most 80,000 fit a command line; write them to a file, and name it in files"
    ),
    "dataset: {name: digits}\nglobal_batch_size: 64\nclass_weights: {cat: 2}": (
        "class_weights: digits has no class cat; its classes are 0, 1"
    ),
    "dataset: {name: digits}\nglobal_batch_size: 64\nmodel: ends.py:Net": (
        "ends.py ends Python when it is imported; put what runs it below"
    ),
}


def check(path: Path) -> None:
    experiment = Experiment.from_files(read_config(path), [path.parent])
    if experiment.hosts:
        on_hosts(experiment.hosts)
    refuse_missing_program(experiment)


@pytest.mark.parametrize("keys", REFUSED)
def test_what_cannot_start_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.py").touch()
    Path("x{y}").mkdir()
    Path("x{y}/p.py").touch()
    Path("bad.py").write_text("def (:\n")
    Path("ends.py").write_text("raise SystemExit(0)\n")
    Path("plain.sh").write_text("#!/bin/bash\n")
    Path("windows.sh").write_text("#!/bin/bash\r\n")
    Path("windows.sh").chmod(0o755)
    Path("locked").mkdir()
    Path("locked/uv.lock").touch()
    Path("declares").mkdir()
    for folder in ("locked", "declares"):
        Path(folder, "pyproject.toml").touch()
    Path("declares/p.py").touch()
    Path("declares/parameters.yaml").write_text("properties:\n  lr: {type: number}\n")
    os.mkfifo("pipe")
    path = Path("wrong.yaml")
    path.write_text(f"experiment: wrong\n{keys}\n")
    with pytest.raises(Refusal) as refused:
        check(path)
    said = str(refused.value)
    assert REFUSED[keys] in said
    assert len(said) <= 200
    assert "\n" not in said


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("[torchrun, --nproc_per_node=2, p.py]", "torchrun"),
        ("[env, X=1, uv, run, --no-sync, /opt/bin/torchrun, p.py]", "torchrun"),
        ("['{python}', -u, -m, torch.distributed.run, p.py]", "torch.distributed.run"),
        ("[python3, -m, torch.distributed.launch, p.py]", "torch.distributed.launch"),
        ("[python, /opt/bin/torchrun, p.py]", "torchrun"),
        ("[torchrun, --standalone, '--nnodes=1', p.py]", "torchrun"),
        ("[torchrun, --nnodes, 1, p.py]", "torchrun"),
        ("[accelerate, launch, --multi_gpu, p.py]", "accelerate launch"),
        ("[uv, run, accelerate-launch, --num_machines=1, --use_fsdp, p.py]", "accelerate-launch"),
        (
            "['{python}', -m, accelerate.commands.launch, --num-processes, 4, p.py]",
            "accelerate.commands.launch",
        ),
        # Told of the nodes.
        ("[accelerate, launch, --multi_gpu, '--machine_rank={rank}', p.py]", ""),
        ("[accelerate, launch, --multi_gpu, --num_machines, 2, p.py]", ""),
        ("[torchrun, '--nnodes=1:4', p.py]", ""),
        ("[torchrun, --nnodes, 12, p.py]", ""),
        ("[torchrun, '--nnodes=2', '--node_rank={rank}', p.py]", ""),
        ("[torchrun, --rdzv-backend, c10d, p.py]", ""),
        # It passes the ranks on.
        ("[accelerate, launch, --num_processes, 1, p.py]", ""),
        ("[accelerate, launch, --num_processes, 1, p.py, --num_processes, 4]", ""),
        ("[accelerate, launch, --cpu, p.py]", ""),
        ("[accelerate, launch, --config_file, my.yaml, p.py]", ""),
        ("[accelerate, test, p.py]", ""),
        ("['{python}', p.py, --launcher, torchrun]", ""),
        ("['{python}', -m, accelerate_my.launch]", ""),
        ("[bash, -c, 'echo torchrun']", ""),
        ("[bash, p.py, torchrun]", ""),
    ],
)
def test_a_command_that_starts_ranks_is_for_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.py").touch()
    path = Path("e.yaml")
    for size in ("nodes: 2", "nodes: [1, 2]", "nproc_per_node: 2"):
        path.write_text(f"experiment: e\ncommand: {words}\n{size}\n")
        if not name:
            check(path)
            continue
        with pytest.raises(Refusal) as refused:
            check(path)
        said = str(refused.value)
        assert said.startswith(f"config: command: {name} would start ranks of its own in each of 2")
        own = "program: p.py" if "p.py]" in words else "the command without it"
        assert said.endswith(f"the workflow starts them: give {own}, and the processes per node")
        assert len(said) <= 200
    path.write_text(f"experiment: e\ncommand: {words}\n")
    check(path)


MANY_ON_A_NODE = ["nproc_per_node: 2", "nodes: 2\ndevice: cpu"]
EVERY_SIZE = ["nodes: 2", *MANY_ON_A_NODE]


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        # It passes the ranks on if it finds one GPU, and on CPUs if it is told of these.
        ("accelerate launch p.py", MANY_ON_A_NODE),
        ("accelerate launch --num_processes 1 p.py", ["nodes: 2\ndevice: cpu"]),
        ("accelerate launch --cpu p.py", []),
        # -m stands before the module, at any place; what follows that is the program's own.
        ("accelerate launch -m --num_processes 1 p.py", ["nodes: 2\ndevice: cpu"]),
        ("accelerate launch -m --multi_gpu pkg.train", EVERY_SIZE),
        ("accelerate launch --no_python --quiet --use_fsdp run.sh", EVERY_SIZE),
        ("accelerate launch --dynamo_backend no p.py --multi_gpu", MANY_ON_A_NODE),
        ("accelerate launch p.py --cpu --config_file my.yaml", MANY_ON_A_NODE),
        ("accelerate launch -m pkg.train --cpu", MANY_ON_A_NODE),
        ("accelerate launch -m --config_file my.yaml pkg.train", []),
    ],
)
def test_accelerate_is_refused_where_it_passes_no_ranks_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, wrong: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.py").touch()
    path = Path("e.yaml")
    for size in EVERY_SIZE:
        path.write_text(f"experiment: e\ncommand: {words.split()}\n{size}\n")
        if size not in wrong:
            check(path)
            continue
        with pytest.raises(Refusal, match="accelerate launch would start ranks of its own in each"):
            check(path)


@pytest.mark.parametrize(
    "words",
    [
        '[env, -u, RANK, "{python}", train.py]',
        "[bash, run.sh, train.py]",
        '["{python}", train.py]',
        '["{python}", -m, train]',
        "[./run.sh, train.py]",
    ],
)
def test_a_command_may_name_files_of_the_folder_where_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code = Path("mine/code")
    code.mkdir(parents=True)
    (code / "train.py").write_text("import helper\n")
    (code / "run.sh").write_text('exec python "$1"\n')
    (code / "run.sh").chmod(0o755)
    (code / "helper.py").write_text("")
    path = Path("mine/e.yaml")
    path.write_text(f"experiment: e\ncommand: {words}\narguments: [log]\ndirectory: code\n")

    def sources() -> str:
        check(path)
        return Experiment.from_files(read_config(path), [path.parent]).sources_sha256

    before = sources()
    # Which the program writes.
    (code / "log").write_text("")
    assert sources() == before
    # One that is installed is no file here.
    path.write_text("experiment: e\ncommand: ['true', --to]\narguments: [log]\ndirectory: code\n")
    assert sources() == ""
    path.write_text("experiment: e\ncommand: [/bin/bash, run.sh]\ndirectory: code\n")
    assert sources() != ""
    path.write_text(f"experiment: e\ncommand: {words}\narguments: [log]\ndirectory: code\n")
    (code / "helper.py").write_text("x = 1\n")
    assert sources() != before
    experiment = Experiment.from_files(read_config(path), [path.parent])
    assert folder_of(command(experiment.config), experiment.config["directory"]) == code
    assert folder_of(command(experiment.config), "{state}") is None
    # A word that begins with a colon names no folder.
    words = ["bash", "-c", ': "${X:=1}"; exec "$@"', "start", "{python}", str(code / "train.py")]
    assert folder_of(words, None) == code
    assert folder_of(["fit", ":memory:"], None) is None


def test_an_environment_beside_the_file_is_no_other_one(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    venv.create(".venv", symlinks=True)
    Path("mine").mkdir()
    Path("mine/p.py").touch()
    text = "experiment: e\nprogram: p.py\nenvironment: {python: .venv}\n"
    # A home folder may be a link, through which Snakemake was started.
    Path("home").symlink_to(tmp_path)
    for prefix in (tmp_path, tmp_path / "home"):
        monkeypatch.setattr(sys, "prefix", str(prefix / ".venv"))
        for given in (".venv", ".venv/bin/python"):
            Path("mine/e.yaml").write_text(text.replace(".venv", given))
            with pytest.raises(Refusal, match=r"mine/\.venv(/bin/python)? is not there; correct"):
                check(Path("mine/e.yaml"))
    Path("mine/e.yaml").write_text(text)
    venv.create("mine/.venv", symlinks=True)
    check(Path("mine/e.yaml"))


def write_finished(runs: FinishedRuns, sources: str) -> None:
    """run.json of every run."""
    for name, run in runs.experiment.runs.items():
        about = {
            "config": run.values, "git": {"commit": None, "dirty": None}, "files": {},
            "sources_sha256": sources, "data_sha256": None,
            "files_sha256": None, "versions": {}, "attempts": [{}], "incidents": [],
            "started": "", "ended": "", "seconds": 0, "directory": None, "outputs": [],
        }  # fmt: skip
        (runs.results / name).mkdir(parents=True)
        (runs.results / name / "run.json").write_text(json.dumps(about))


def test_what_of_an_environment_makes_a_finished_run_another(tmp_path, monkeypatch) -> None:
    """Another image, and with `strict` other packages; without it, nothing of them."""
    monkeypatch.chdir(tmp_path)
    venv.create("v", symlinks=True)
    (packages,) = Path("v").glob("lib/python3*/site-packages")
    Path("p.py").touch()
    image = Path("image.sif")
    image.write_bytes(b"SIF_MAGIC one")
    given = ("{container: image.sif}", "{python: v}", "{python: v, strict: true}")

    def finished(environment: str) -> FinishedRuns:
        Path("e.yaml").write_text(f"experiment: e\nprogram: p.py\nenvironment: {environment}\n")
        check(Path("e.yaml"))
        experiment = Experiment.from_files(read_config(Path("e.yaml")), [Path()])
        results = Path(f"results/{given.index(environment)}")
        return FinishedRuns(experiment, results, Inputs(experiment, results))

    for runs in map(finished, given):
        (name,) = runs.experiment.runs
        write_finished(runs, runs.experiment.sources_sha256)
        assert runs.replaced([name]) == {}
    image.write_bytes(b"SIF_MAGIC two")
    (packages / "mine-1.dist-info").mkdir()
    (packages / "mine-1.dist-info/METADATA").write_text("Name: mine\nVersion: 1\n")
    changed = {name: "p or its environment has changed"}
    assert [finished(each).replaced([name]) for each in given] == [changed, {}, changed]


def test_by_what_numbers_were_read_makes_a_finished_run_another_if_asked(
    tmp_path, monkeypatch, capsys
) -> None:
    """And no run of a version that has not noted it."""
    monkeypatch.chdir(tmp_path)
    Path("p.py").touch()
    config = {"experiment": "e", "program": "p.py", "parameters": {"lr": [1, 2]}}

    def finished(**keys: Any) -> FinishedRuns:
        experiment = Experiment.from_config(config | keys)
        return FinishedRuns(experiment, Path("results/e"), Inputs(experiment, Path("results/e")))

    runs = finished()
    write_finished(runs, runs.experiment.sources_sha256)
    other = {"metrics": {"log": "(?P<epoch>.) (?P<loss>.)"}, "result": "other.json"}
    assert finished(replace=True, **other).replaced(runs.experiment.runs) == {}
    finished(**other).tell_other_reads()
    assert capsys.readouterr().err == ""
    about = Path("results/e/lr~2/run.json")
    noted = json.loads(about.read_text()) | {"reads": {"metrics": None, "result": None}}
    about.write_text(json.dumps(noted))
    assert finished(replace=True, **other).replaced(runs.experiment.runs) == {
        "lr~2": "another value of metrics, another value of result"
    }
    assert finished(**other).replaced(runs.experiment.runs) == {}
    finished(**other).tell_other_reads()
    finished().tell_other_reads()
    assert capsys.readouterr().err == (
        "warning: the numbers of lr~2 were read by other metrics and result, and stay so; --config "
        "replace=true trains them again\n"
    )


def test_a_module_is_looked_for_without_running_its_package(tmp_path, monkeypatch) -> None:
    (tmp_path / "loud").mkdir()
    (tmp_path / "loud/__init__.py").write_text("raise SystemExit('was run')")
    (tmp_path / "loud/quiet.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    found = [file_of(name) != "" for name in ("loud", "loud.quiet", "json.decoder")]
    absent = [file_of(name) != "" for name in ("loud.none", "loud.quiet.x", "train.sh", ".x", "")]
    assert isinstance(file_of("__main__"), str)  # without a traceback
    assert (found, absent) == ([True] * 3, [False] * 5)


def test_a_module_is_looked_for_in_the_python_that_will_run_it(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    venv.create("v", symlinks=True)
    (packages,) = Path("v").glob("lib/python3*/site-packages")
    (packages / "there.py").touch()

    def checked(program: str, environment: str) -> None:
        text = f"experiment: e\nprogram: {program}\nenvironment: {environment}\n"
        Path("e.yaml").write_text(text)
        check(Path("e.yaml"))

    checked("there", "{python: v}")
    checked("json.decoder", "{python: v}")
    checked("there", "{python: v, setup: 'true'}")
    Path("train.py").touch()
    Path("train.sh").touch()
    for given, environment in (
        ("there", "null"), ("snakemake", "{python: v}"), ("there.none", "{python: v}"),
        ("train.sh", "{python: v}"), ("train.sh", "{modules: [x]}"),
    ):  # fmt: skip
        with pytest.raises(Refusal, match=f'program: "{given}" is neither a Python file nor a'):
            checked(given, environment)


SCRIPT = """#!{python}
import re
import sys
from mypkg.train import main
if __name__ == '__main__':
    sys.exit(main())
"""


def test_a_package_without_an_init_is_started_by_its_main(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("bare_of_test", "main_of_test"):
        (tmp_path / name).mkdir()
    main = tmp_path / "main_of_test/__main__.py"
    main.touch()
    assert file_of("main_of_test") == str(main)
    assert folder_above("main_of_test", main) == tmp_path
    assert folder_above("main_of_test.__main__", main) == tmp_path
    assert file_of("bare_of_test") == "namespace"


@pytest.mark.parametrize("given", [
    "program: mypkg.train", "program: mypkg", 'command: ["{python}", -m, mypkg.train]',
    "command: [v/bin/python, -m, mypkg.train]", "command: [fit]", "command: [v/bin/fit]",
    "command: [long]",
])  # fmt: skip
def test_an_installed_program_is_hashed_where_it_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    venv.create("v", symlinks=True)
    (packages,) = Path("v").glob("lib/python3*/site-packages")
    # As pip and uv make it; with a path that is too long for the kernel a shell starts it.
    shell = "/bin/sh\n'''exec' 'python' \"$0\" \"$@\"\n' '''"
    for name, python in (("fit", str(tmp_path / "v/bin/python")), ("long", shell)):
        Path("v/bin", name).write_text(SCRIPT.format(python=python))
        Path("v/bin", name).chmod(0o755)
    package = Path("src/mypkg")
    package.mkdir(parents=True)
    for name, text in (("__init__", ""), ("__main__", "from . import train"), ("helper", ""),
                       ("train", "from mypkg import helper")):  # fmt: skip
        (package / f"{name}.py").write_text(text)
    (packages / "mine.pth").write_text(str(tmp_path / "src"))
    Path("e.yaml").write_text(f"experiment: e\nenvironment: {{python: v}}\n{given}\n")

    def now() -> Experiment:
        ask.cache_clear()
        check(Path("e.yaml"))
        return Experiment.from_files(read_config(Path("e.yaml")), [Path()])

    before = now()
    earlier = {before.earlier_sha256, before.sources_sha256, before.code_sha256}
    assert before.installed
    folder = folder_of(command(before.config), None, before.installed.sources)
    assert folder == tmp_path / package
    (package / "helper.py").write_text("x = 1")
    after = now()
    assert after.installed
    assert not earlier & {after.sources_sha256, after.code_sha256}
    assert after.earlier_sha256 in earlier
    # As the job hashes it, which asks no Python.
    task = Task(tuple(command(after.config)), Path(), {}, environment={"python": "v"},
                reads={"installed": list(after.installed.sources)})  # fmt: skip
    assert files_sha256(task, only_code=True) == after.code_sha256
    # What is of an earlier version is not trained again; and nothing more is known of it.
    runs = FinishedRuns(after, Path("results"), Inputs(after, Path("results")))
    write_finished(runs, after.earlier_sha256)
    (name,) = after.runs
    assert runs.replaced([name], code=False) == {}
    assert "has not hashed" in runs.replaced([name])[name]
    # Among the other packages it has a version.
    (packages / "mine.pth").unlink()
    package.rename(packages / "mypkg")
    installed = now()
    assert installed.installed
    assert installed.sources_sha256 == after.earlier_sha256
    told = f"the module {installed.installed.module} is {tmp_path / packages / 'mypkg'}/"
    session = Session.__new__(Session)
    session.experiment = installed
    session.tell_unhashed()
    assert f"warning: {told}" in capsys.readouterr().err


@pytest.mark.parametrize(("evaluate", "edits", "known"), [
    (["ev.py", "", "{{x}}", "0.50"], False, True),
    (["ev.py"], True, True),
    (["pack.ev"], False, True),
    # Where its files are is not known there.
    (["platform"], False, False),
])  # fmt: skip
def test_numbers_of_an_evaluation_that_was_edited_meanwhile_are_not_published(
    tmp_path: Path, evaluate: list[str], edits: bool, known: bool
) -> None:
    """Otherwise they would stand in a table under the hash of the program before."""
    (tmp_path / "parameters.yaml").write_text(
        "properties: {share: {type: number, default: 0.1, result: evaluation}}"
    )
    (tmp_path / "train.py").write_text("")
    (tmp_path / "pack").mkdir()
    for file in (tmp_path / "ev.py", tmp_path / "pack/ev.py"):
        again = "open(__file__, 'a').write('#')" if edits else ""
        file.write_text(f"import launched\nlaunched.result(score=1)\n{again}\n")
    given = {"experiment": "x", "program": "train.py", "evaluate": evaluate}
    experiment = Experiment.from_files(given, [tmp_path])
    assert experiment.parameters_for("evaluation") == {"share": 0.1}
    sha256 = experiment.evaluation_sha256
    run = finished(tmp_path / "x", {}, [{}]) / "run"
    done = program(
        "launch", "--launcher", "none", "--evaluate", "--output", run,
        "--settings", json.dumps(experiment.parameters_for("evaluation")),
        "--", *[word or EMPTY for word in experiment.evaluation],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert Folders(run).evaluated_by.exists() == known
    if not known:
        (run / "evaluation/result.json").write_text('{"score": 1}')
    done = program("publish", f"--evaluation={sha256}", "--output", run)
    assert (done.returncode != 0) == edits, done.stderr
    assert (run / "evaluation.json").exists() == (not edits)
    line = "has changed since this command began; run the same command again"
    assert done.stderr == f"publish: the program that evaluates {line}\n" * edits
    # So are those of a program that was edited before it began.
    if known:
        done = program("publish", f"--evaluation={'0' * 64}", "--output", run)
        assert (done.returncode, line in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ("parameters: {lr: [0.5]}", "{lr}"),
        ("parameters: {lr: [0.1, 0.2], wd: 0.01}\narguments: ['{lr}']", "{wd}"),
        ("runs: [{lr: 0.1, wd: 1}, {lr: 0.2, wd: 1}]\narguments: ['{lr}']", "{wd}"),
        ("seed: [0, 1]\nnodes: [1, 2]", "{seed}"),
        ("seed: 1\nparameters: {lr: [0.1, 0.2]}\narguments: ['{lr}']", ""),
        ("parameters: {size: 3}\nevaluate: [p.py, '{size}']", ""),
        ("parameters: {size: 3}\ndirectory: '{size}'", ""),
    ],
)
def test_a_parameter_that_changes_nothing_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: str, names: str
) -> None:
    (tmp_path / "p.py").write_text("optimizer = SGD(model.parameters(), 0.1)\n")
    path = tmp_path / "e.yaml"
    path.write_text(f"experiment: e\nprogram: p.py\n{keys}\n")
    session = Session.__new__(Session)
    session.experiment = Experiment.from_files(read_config(path), [tmp_path])
    session.tell_unseen_parameters()
    told = f"warning: no argument has {names}, and the program does not read" if names else ""
    said = capsys.readouterr().err
    assert said.startswith(told) if told else not said
