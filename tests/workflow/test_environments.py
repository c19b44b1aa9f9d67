"""Programs in environments of their own: a venv, a conda prefix, a uv project."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from checkout import Checkout, jobs_in

UV = Path(sys.executable).with_name("uv")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout(tmp_path_factory.mktemp("environments"))


def venv(folder: Path) -> Path:
    """A Python with nothing in it: neither torch nor Snakemake."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def record(run: Path) -> dict:
    found = json.loads((run / "environment.json").read_text())
    assert found["python"] == json.loads((run / "run.json").read_text())["versions"]["python"]
    return found


def test_a_venv_and_a_mistake_after_the_end(
    place: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program trains once; a wrong output, a text and links in a circle do not repeat it."""
    for name in ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT"):
        monkeypatch.setenv(name, sys.prefix)
    folder = place.path / "mine"
    write(
        folder,
        train__py=(
            "import os, sys, launched\n"
            "assert sys.prefix.endswith('mine/env'), sys.prefix\n"
            "assert os.environ['VIRTUAL_ENV'] == sys.prefix\n"
            "assert 'UV_PROJECT_ENVIRONMENT' not in os.environ\n"
            "os.makedirs('out', exist_ok=True)\n"
            "print('trained', flush=True)\n"
            "os.symlink('circle', 'out/circle')\n"
            "open('out/model', 'w').close()\n"
            "launched.result(loss=0.5, optimizer='sgd')\n"
            "with open(launched.state / 'starts', 'a') as file: file.write('x')\n"
        ),
        evaluate__py=(
            "import sys, launched\n"
            "assert sys.prefix.endswith('mine/env'), sys.prefix\n"
            "launched.result(accuracy=0.75)\n"
        ),
        env__yaml=(
            "experiment: own\nprogram: train.py\nevaluate: evaluate.py\npreflight: false\n"
            "environment: {python: env}\noutputs: [wrong]\n"
        ),
    )
    command = ["--until", "evaluate", "--configfile", "mine/env.yaml"]
    missing = place.snakemake("--dry-run", *command)
    assert "config: environment: " in missing.stdout
    assert "/env is not there; correct environment" in missing.stdout
    other = place.snakemake("--dry-run", *command, "--config", "environment={python: /bin/true}")
    assert "config: environment: /bin/true does not answer" in other.stdout
    venv(folder / "env")
    wrong = place.snakemake(*command)
    assert wrong.returncode == 1
    missing = "wrong is not in results/own/run/work, though the program ended"
    assert f"own/run: not finished: train: {missing}" in wrong.stdout
    run = place.path / "results/own/run"
    assert (run / "state/saved/starts").read_text() == "x"
    said = place.run(*command, "--config", "outputs=[out/]")
    assert "own/run: loss 0.5, accuracy 0.75" in said
    for log in ("train.log", "logs/rank=0.log"):
        assert "trained" in (run / log).read_text()
    assert (run / "outputs/out/circle").is_symlink()
    assert json.loads((run / "result.json").read_text()) == {"loss": 0.5, "optimizer": "sgd"}
    (attempt,) = json.loads((run / "run.json").read_text())["attempts"]
    assert attempt["started"] <= attempt["ended"]
    found = record(run)
    assert found["interpreter"] == str(folder / "env/bin/python")
    assert "snakemake" not in found["distributions"]
    (site,) = (folder / "env/lib").glob("*/site-packages")
    write(site / "numbers_of_mine-1.2.dist-info", METADATA="Name: numbers-of-mine\nVersion: 1.2\n")
    said = place.run("-n", *command, "--config", "outputs=[out/]")
    assert "own/run: since it was trained, numbers-of-mine none -> 1.2" in said
    assert jobs_in(said) == {}
    said = place.run("-n", *command, "--config", "program=mine/evaluate.py", "seed=[0,1]")
    assert "tables and page of results/own are of train, and its 1 finished runs will not" in said


def test_an_environment_that_cannot_be_packed_is_told(place: Checkout) -> None:
    folder = place.path / "packed"
    venv(folder / "env")
    write(
        folder,
        train__py="",
        env__yaml="experiment: packed\nprogram: train.py\npreflight: false\n"
        "environment: {python: env, stage: true}\n",
    )
    # In the place of the archive.
    (place.path / "results/packed/environment/environment.tar").mkdir(parents=True)
    done = place.snakemake("--until", "train", "--configfile", "packed/env.yaml")
    why = r"packed/run: not finished: pack: .*environment.tar: Is a directory; log: .*pack.log"
    assert re.search(why, done.stdout), done.stdout
    (place.path / "results/packed/environment/environment.tar").rmdir()
    place.run("--until", "train", "--configfile", "packed/env.yaml")
    # For a finished run, nothing is staged again.
    (site,) = (folder / "env/lib").glob("*/site-packages")
    (site / "mine.pth").touch()
    said = place.run("-n", "--until", "train", "--configfile", "packed/env.yaml")
    assert jobs_in(said) == {"pack": 1}


@pytest.mark.faults
def test_a_prefix_with_site_settings_and_a_program_that_calls_uv(place: Checkout) -> None:
    """Its uv must not take the workflow, above its results, for its own project."""
    folder = place.path / "site"
    prefix = venv(folder / "prefix")
    scripts = prefix / "etc/conda/activate.d"
    write(scripts, one__sh="export OF_PREFIX=$OF_SITE-prefix\n")
    write(
        folder,
        train__py=(
            "import os, subprocess, sys\n"
            "ours = sys.prefix == os.environ['CONDA_PREFIX']\n"
            "print(os.environ['OF_PREFIX'], ours, flush=True)\n"
            f"uv = [{str(UV)!r}, 'run', '--offline', 'python', '--version']\n"
            "subprocess.run(uv, check=True)\n"
        ),
        site__yaml=(
            "experiment: site\nprogram: train.py\npreflight: false\n"
            "environment: {conda: prefix, setup: 'source site/settings.sh'}\n"
        ),
        settings__sh="export OF_SITE=site\n",
        torch__py="",
    )
    place.run("--configfile", "site/site.yaml")
    log = (place.path / "results/site/run/logs/rank=0.log").read_text()
    assert "site-prefix True" in log
    assert not (place.path / ".venv").exists()
    assert not (place.path / "uv.lock").exists()
    # Seen from a file of the user's beside it, and not from our own torch.
    write(folder, train__py="import torch, no_such_module\n")
    done = place.snakemake("--configfile", "site/site.yaml", "--config", "experiment=missing")
    assert re.search(
        r"missing/run: not finished: train: rank 0 on \S+: .*/site/prefix/bin/python \(3\S+\) has "
        r"no module no_such_module, which the program imports",
        done.stdout,
    ), done.stdout


@pytest.mark.faults
def test_a_uv_project_whose_lock_changes_is_another_program(place: Checkout) -> None:
    folder = place.path / "project"
    write(
        folder,
        pyproject__toml='[project]\nname = "mine"\nversion = "0"\nrequires-python = ">=3.9"\n',
        train__py="import sys\nassert sys.prefix.endswith('project/.venv'), sys.prefix\n",
        uv__yaml="experiment: uv\nprogram: train.py\npreflight: false\nenvironment: {uv: .}\n",
    )
    command = ["--configfile", "project/uv.yaml"]
    done = place.snakemake("--dry-run", *command)
    assert "run `uv sync --locked` in project" in done.stdout
    sync = [UV, "sync", "--offline", "--quiet"]
    subprocess.run(sync, cwd=folder, env=place.environment, check=True)
    place.run(*command)
    assert record(place.path / "results/uv/run")["interpreter"].endswith("project/.venv/bin/python")
    assert "Nothing to be done" in place.run(*command)
    lock = folder / "uv.lock"
    lock.write_text(lock.read_text() + "\n# other\n")
    changed = place.snakemake("--dry-run", *command)
    assert "would replace finished results: run (train or its environment has changed)" in (
        changed.stdout
    ), changed.stdout


@pytest.mark.faults
def test_an_unchanged_program_has_its_curve_and_continues_from_its_own_snapshot(
    place: Checkout,
) -> None:
    write(
        place.path / "public",
        train__py=(
            "import json, os, time\n"
            "snapshot = 'snapshot.json'\n"
            "exists = os.path.exists(snapshot)\n"
            "first = json.load(open(snapshot))['epoch'] + 1 if exists else 1\n"
            "for epoch in range(first, 5):\n"
            "    print(f'Epoch {epoch} | loss {1 / epoch:.4f}', flush=True)\n"
            "    json.dump({'epoch': epoch}, open(snapshot, 'w'))\n"
            "    if epoch == 2 and first == 1:\n"
            "        raise MemoryError('once')\n"
            "final = {'loss': 0.25, 'name': 'adam', 'deep': {}}\n"
            "json.dump({'final': [final]}, open('all.json', 'w'))\n"
        ),
        public__yaml=(
            "experiment: public\nprogram: train.py\npreflight: false\n"
            "metrics: {log: 'Epoch (?P<epoch>\\d+) .* loss (?P<loss>\\S+)'}\n"
            "result: all.json#final.0\nsnapshots: ['snap*']\n"
        ),
    )
    said = place.run("--configfile", "public/public.yaml")
    assert "public/run: loss 0.25" in said
    assert "MemoryError: once; " in said
    assert "starting again, with what was saved (start 2 of this job)" in said
    run = place.path / "results/public/run"
    rows = (run / "metrics.csv").read_text().splitlines()
    assert rows == ["epoch,loss", "1,1", "2,0.5", "3,0.3333", "4,0.25"]
    assert not (run / "work/metrics.csv").exists()
    assert json.loads((run / "result.json").read_text()) == {"loss": 0.25, "name": "adam"}
    assert (place.path / "results/public/figures/loss.svg").exists()
    # A mistake in the expression costs no training: the lines of all starts are kept.
    command = ["--until", "train", "--configfile", "public/public.yaml", "--config",
               "experiment=again", "metrics={log: "]  # fmt: skip
    command[-1] += "'Epoch (?P<epoch>\\d+) .* %s (?P<loss>\\S+)'}"
    wrong = place.snakemake(*command[:-1], command[-1] % "lost")
    assert re.search("no line of .*printed/.*log matches; correct the expressions", wrong.stdout)
    said = place.run(*command[:-1], command[-1] % "loss")
    assert "the program has ended before" in said
    # Of all its starts.
    assert (place.path / "results/again/run/metrics.csv").read_text().splitlines() == rows


@pytest.mark.faults
def test_a_program_that_starts_in_its_state_folder_continues_there(place: Checkout) -> None:
    write(
        place.path / "stateful",
        train__py=(
            "import json, os\n"
            "assert os.getcwd() == os.environ['LAUNCH_STATE']\n"
            "if not os.path.exists('last'):\n"
            "    open('last', 'w').close()\n"
            "    raise MemoryError('once')\n"
            "with open(os.path.join(os.environ['LAUNCH_RESULTS'], 'result.json'), 'w') as file:\n"
            "    json.dump({'loss': 0.25}, file)\n"
        ),
        stateful__yaml=(
            "experiment: stateful\nprogram: train.py\npreflight: false\nnproc_per_node: 1\n"
            "directory: '{state}'\n"
        ),
    )
    said = place.run("--until", "train", "--configfile", "stateful/stateful.yaml")
    assert "MemoryError: once; " in said
    assert "starting again, with what was saved (start 2 of this job)" in said
    assert "stateful/run: loss 0.25" in said
