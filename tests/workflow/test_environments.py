"""Programs in environments of their own: a venv, a conda prefix, a uv project."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from checkout import Checkout, jobs_in
from manynodes.base.reading import file_sha256
from programs import committed

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


def wheel(folder: Path, version: str = "1") -> Path:
    """A package without dependencies, `mine`."""
    path, about = folder / f"mine-{version}-py3-none-any.whl", f"mine-{version}.dist-info"
    files = {
        "mine.py": "",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: mine\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "mine.py,,\n",
    }
    with zipfile.ZipFile(path, "w") as file:
        for name, text in files.items():
            file.writestr(name, text)
    return path


def uv(place: Checkout, *words: str) -> None:
    command = [UV, "--offline", "--quiet", *words]
    subprocess.run(command, cwd=place.path / "project", env=place.environment, check=True)


def times(folder: Path) -> dict[Path, int]:
    """When each file of a checkout was changed."""
    made = {"results", ".snakemake", "__pycache__"}
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")
            if not (path.is_dir() or made & {*path.relative_to(folder).parts})}  # fmt: skip


def record(run: Path) -> dict:
    found = json.loads((run / "environment.json").read_text())
    assert found["python"] == json.loads((run / "run.json").read_text())["versions"]["python"]
    return found


def test_a_venv_and_a_mistake_after_the_end(
    place: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program trains once; a wrong output, a text and links in a circle do not repeat it. It
    has the GPU that the machine names, with which the workflow's own torch cannot compute.
    """
    for name in ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT"):
        monkeypatch.setenv(name, sys.prefix)
    gpu = f"GPU-{os.getpid()}-0"  # nobody else claims it
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{gpu},GPU-{os.getpid()}-1")
    folder = place.path / "mine"
    write(
        folder,
        train__py=(
            "import os, sys, launched\n"
            "assert sys.prefix.endswith('mine/env'), sys.prefix\n"
            "assert os.environ['VIRTUAL_ENV'] == sys.prefix\n"
            "assert 'UV_PROJECT_ENVIRONMENT' not in os.environ\n"
            f"assert os.environ['CUDA_VISIBLE_DEVICES'] == {gpu!r}\n"
            "os.makedirs('out', exist_ok=True)\n"
            "print('trained', flush=True)\n"
            "os.symlink('circle', 'out/circle')\n"
            "open('out/model', 'w').close()\n"
            "launched.result(loss=0.5, optimizer='sgd')\n"
            "with open(launched.state / 'starts', 'a') as file: file.write('x')\n"
        ),
        evaluate__py=(
            "import os, sys, launched\n"
            "assert sys.prefix.endswith('mine/env'), sys.prefix\n"
            f"assert os.environ['CUDA_VISIBLE_DEVICES'] == {gpu!r}\n"
            "launched.result(accuracy=0.75)\n"
        ),
        env__yaml=(
            "experiment: own\nprogram: train.py\nevaluate: evaluate.py\ndevice: cuda\n"
            "environment: {python: env}\noutputs: [wrong]\n"
        ),
    )
    command = ["--until", "evaluate", "--configfile", "mine/env.yaml"]
    missing = place.snakemake("--dry-run", *command)
    assert "config: environment: " in missing.stdout
    assert "/env is not there; correct environment" in missing.stdout
    other = place.snakemake("--dry-run", *command, "--config", "environment={python: /bin/true}")
    assert "config: environment: /bin/true does not answer" in other.stdout
    (site,) = (venv(folder / "env") / "lib").glob("*/site-packages")
    write(site / "numpy-0.1.dist-info", METADATA="Name: numpy\nVersion: 0.1\n")
    committed(folder, "*.py")
    wrong = place.snakemake(*command)
    assert wrong.returncode == 1
    missing = "wrong is not in results/own/run/work, though the program ended"
    assert f"own/run: not finished: train: {missing}" in wrong.stdout
    run = place.path / "results/own/run"
    assert (run / "state/saved/starts").read_text() == "x"
    # As if it had been of two nodes: their queue may be long.
    command += ["--config", "outputs=[out/]"]
    for resume, asked in (("exact", [("1", "0"), ("1", "1")]), ("fresh", [("2", "2"), ("1", "1")])):
        planned = place.run("-n", *command, "nodes=2", f"resume={resume}")
        assert re.findall(r"\bnodes=(\d).*gpus_here=(\d)", planned) == asked, planned
    said = place.run(*command)
    assert "own/run: loss 0.5, accuracy 0.75" in said
    for log in ("train.log", "logs/rank=0.log"):
        assert "trained" in (run / log).read_text()
    assert (run / "outputs/out/circle").is_symlink()
    assert json.loads((run / "result.json").read_text()) == {"loss": 0.5, "optimizer": "sgd"}
    (attempt,) = json.loads((run / "run.json").read_text())["attempts"]
    assert attempt["started"] <= attempt["ended"]
    found = record(run)
    assert found["interpreter"] == str(folder / "env/bin/python")
    assert found["kind"] == "python"
    assert "snakemake" not in found["distributions"]
    about = json.loads((run / "run.json").read_text())
    assert about["versions"]["numpy"] == "0.1"
    assert found["repository"] == about["repository"] | {
        "path": str(folder), "dirty": True, "diff": "untracked: env.yaml\nuntracked: env/"
    }  # fmt: skip
    write(site / "numbers_of_mine-1.2.dist-info", METADATA="Name: numbers-of-mine\nVersion: 1.2\n")
    said = place.run("-n", *command)
    assert "own/run: since it was trained, numbers-of-mine none -> 1.2" in said
    assert jobs_in(said) == {}
    said = place.run("-n", *command[:-1], "program=mine/evaluate.py", "seed=[0,1]")
    assert "tables and page of results/own are of train, and its 1 finished runs will not" in said


@pytest.mark.faults
def test_a_package_of_the_user_s_is_hashed_and_its_repository_recorded(place: Checkout) -> None:
    """As `uv sync` and `pip install -e` leave it."""
    folder = place.path / "packaged"
    (site,) = (venv(folder / "env") / "lib").glob("*/site-packages")
    write(site, mine__pth=str(folder / "src"))
    package = folder / "src/mypkg"
    write(package, train__py="from mypkg import helper\n", helper__py="print('trained')\n")
    write(folder, mine__yaml="experiment: packaged\nprogram: mypkg.train\npreflight: false\n"
          "environment: {python: env}\n")  # fmt: skip
    committed(folder, "src")
    command = ["--until", "train", "--configfile", "packaged/mine.yaml"]
    assert "warning: the module" not in place.run(*command)
    found = record(place.path / "results/packaged/run")
    assert found["repository"]["path"] == str(folder)
    write(package, helper__py="print('trained otherwise')\n")
    said = place.run("-n", *command)
    assert "would replace finished results: run (mypkg.train has changed)" in said


# Of environment modules, as a login shell exports it.
MODULE = """() { shift; for name; do
  export LOADEDMODULES=${LOADEDMODULES:+$LOADEDMODULES:}$name
done; }"""


def test_what_a_site_loads_comes_first_and_is_in_its_profile(
    place: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A --config leaves nothing of a profile's `config`; a change of the site's reruns nothing."""
    monkeypatch.setenv("BASH_FUNC_module%%", MODULE)
    gpu = f"GPU-{os.getpid()}-0"  # nobody else claims it
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu)
    folder = place.path / "at-a-site"
    venv(folder / "env")
    site = (
        "default-resources:\n  site_modules: '2023 cuda/12.4'\n  site_setup: |\n"
        '    export OF_SITE="$LOADEDMODULES"\n    ORDER=site\n'
    )
    write(folder / "profile", config__yaml=site)
    write(
        folder,
        train__py=(
            "import os, sys, launched\n"
            "assert sys.prefix.endswith('at-a-site/env'), sys.prefix\n"
            "assert os.environ['OF_SITE'] == '2023:cuda/12.4:of/mine'\n"
            "assert os.environ['ORDER'] == 'site, mine'\n"
            f"assert os.environ['CUDA_VISIBLE_DEVICES'] == {gpu!r}\n"
            "launched.result(loss=0.5)\n"
        ),
        site__yaml=(
            "experiment: none\nprogram: train.py\nevaluate: train.py\npreflight: false\n"
            "environment:\n  python: env\n  modules: [of/mine]\n"
            "  setup: 'export ORDER=\"$ORDER, mine\"'\n"
        ),
    )
    command = ["--profile", "at-a-site/profile", "--until", "evaluate", "--configfile",
               "at-a-site/site.yaml", "--config", "experiment=at-a-site"]  # fmt: skip
    place.run(*command)
    found = record(place.path / "results/at-a-site/run")
    assert found["modules"] == ["2023", "cuda/12.4", "of/mine"]
    write(folder / "profile", config__yaml=site.replace("12.4", "12.8"))
    assert place.jobs(*command) == {}
    planned = place.run("--dry-run", "--forcerun", "evaluate", *command)
    assert '"modules": ["2023", "cuda/12.8", "of/mine"]' in planned
    assert "gpus_here=1" in planned


def test_an_environment_that_cannot_be_packed_is_told(place: Checkout) -> None:
    folder = place.path / "packed"
    venv(folder / "env")
    write(
        folder,
        train__py="",
        env__yaml="experiment: packed\nprogram: train.py\npreflight: false\n"
        "evaluate: train.py\nenvironment: {python: env, stage: true}\n",
    )
    (folder / "env/zeros").write_bytes(bytes(2_000_000))
    # In the place of the archive.
    (place.path / "results/packed/environment/environment.tar.zst").mkdir(parents=True)
    done = place.snakemake("--until", "train", "--configfile", "packed/env.yaml")
    why = r"packed/run: not finished: pack: .*environment.tar.zst: Is a directory; log: .*pack.log"
    assert re.search(why, done.stdout), done.stdout
    (place.path / "results/packed/environment/environment.tar.zst").rmdir()
    said = place.run("--until", "train", "--configfile", "packed/env.yaml")
    assert f" MB; torchrun and the preflight, if used, import torch from {sys.prefix}" in said
    # For a finished run, nothing is staged again.
    (site,) = (folder / "env/lib").glob("*/site-packages")
    (site / "mine.pth").touch()
    said = place.run("-n", "--until", "train", "--configfile", "packed/env.yaml")
    assert jobs_in(said) == {"pack": 1}
    # All jobs that stage it ask for its room.
    said = place.run("-n", "--until", "evaluate", "--forcerun", "evaluate", "stage",
                     "--configfile", "packed/env.yaml", "--config", "experiment=room")  # fmt: skip
    assert re.findall(r"disk_mb=(\d+)", said) == ["3", "3", "3"]


@pytest.mark.faults
def test_a_prefix_with_site_settings_and_a_program_that_calls_uv(place: Checkout) -> None:
    """Its uv must not take the workflow, above its results, for its own project."""
    folder = place.path / "site"
    prefix = venv(folder / "prefix")
    (ours,) = (venv(place.path / ".venv") / "lib").glob("*/site-packages")
    write(ours / "ours-1.dist-info", METADATA="Name: ours\nVersion: 1\n", RECORD="", INSTALLER="")
    calls = [[str(UV), "--offline", *words] for words in (
        ["sync"], ["lock"], ["run", "-p", "3", "python", "--version"],
        ["pip", "install", str(wheel(folder))],
    )]  # fmt: skip
    scripts = prefix / "etc/conda/activate.d"
    write(scripts, one__sh="export OF_PREFIX=$OF_SITE-prefix\n")
    write(
        folder,
        train__py=(
            "import os, subprocess, sys\n"
            "ours = sys.prefix == os.environ['CONDA_PREFIX']\n"
            "print(os.environ['OF_PREFIX'], ours, flush=True)\n"
            f"for call in {calls}:\n"
            "    print(call, subprocess.call(call), flush=True)\n"
        ),
        site__yaml=(
            "experiment: site\nprogram: train.py\npreflight: false\n"
            "environment: {conda: prefix, setup: 'source site/settings.sh'}\n"
        ),
        settings__sh="export OF_SITE=site\n",
        torch__py="",
    )
    before = times(place.path)
    place.run("--configfile", "site/site.yaml")
    log = (place.path / "results/site/run/logs/rank=0.log").read_text()
    assert "site-prefix True" in log
    changed = {path for path, _ in before.items() ^ times(place.path).items()}
    assert {path for path in changed if not path.is_relative_to(prefix)} == set()
    assert any(prefix.glob("lib/*/site-packages/mine.py")), log
    # Seen from a file of the user's beside it, and not from our own torch.
    write(folder, train__py="import torch, no_such_module\n")
    done = place.snakemake("--configfile", "site/site.yaml", "--config", "experiment=missing")
    assert re.search(
        r"missing/run: not finished: train: rank 0 on \S+: .*/site/prefix/bin/python \(3\S+\) has "
        r"no module no_such_module, which the program imports",
        done.stdout,
    ), done.stdout


SUMS = {
    "accelerate": (
        "from accelerate import Accelerator\n"
        "one = Accelerator().reduce(torch.ones(()))\n"
    ),
    "torch.distributed.launch": (
        "distributed.init_process_group('gloo')\n"
        "one = torch.ones(())\n"
        "distributed.all_reduce(one)\n"
    ),
}  # fmt: skip


@pytest.mark.faults
@pytest.mark.parametrize("launcher", SUMS)
def test_other_launchers_start_the_python_of_an_environment(place: Checkout, launcher: str) -> None:
    """The launcher is ours, and each rank is the program's own Python with its own torch."""
    folder = place.path / launcher
    (site,) = venv(folder / "env").glob("lib/python*/site-packages")
    (site / "torch.pth").write_text(sysconfig.get_path("purelib"))
    write(
        folder,
        train__py=(
            "import sys, torch, launched\n"
            "from torch import distributed\n"
            f"assert sys.prefix.endswith('{launcher}/env'), sys.prefix\n"
            f"{SUMS[launcher]}"
            "if launched.rank == 0: launched.result(ranks=one.item())\n"
            "distributed.destroy_process_group()\n"
        ),
        env__yaml=(
            f"experiment: by-{launcher.replace('.', '-')}\nprogram: train.py\npreflight: false\n"
            f"environment: {{python: env}}\nlauncher: {launcher}\n"
            "nodes: 2\ncpus_per_proc: 1\ndevice: cpu\n"
        ),
    )
    said = place.run("--until", "train", "--configfile", f"{launcher}/env.yaml")
    assert re.search(r"by-\S+/run: ranks 2", said), said
    (run,) = place.path.glob(f"results/by-{launcher.replace('.', '-')}/run")
    assert record(run)["interpreter"] == str(folder / "env/bin/python")


@pytest.mark.faults
def test_a_uv_project_whose_lock_changes_is_another_program(place: Checkout) -> None:
    folder = place.path / "project"
    write(
        folder,
        pyproject__toml=(
            '[project]\nname = "program"\nversion = "0"\nrequires-python = ">=3.9"\n'
            'dependencies = ["mine"]\n[tool.uv]\nfind-links = ["."]\nno-index = true\n'
        ),
        train__py="import mine, sys\nassert sys.prefix.endswith('project/.venv'), sys.prefix\n",
        uv__yaml="experiment: uv\nprogram: train.py\npreflight: false\nenvironment: {uv: .}\n",
    )
    command = ["--configfile", "project/uv.yaml"]
    done = place.snakemake("--dry-run", *command)
    assert "run `uv sync` in project" in done.stdout
    wheel(folder)
    uv(place, "sync")
    place.run(*command)
    found = record(place.path / "results/uv/run")
    assert found["interpreter"].endswith("project/.venv/bin/python")
    assert found["lock_sha256"] == file_sha256(folder / "uv.lock")
    assert "Nothing to be done" in place.run(*command)
    wheel(folder, "2.01")
    uv(place, "lock", "--upgrade")
    done = place.snakemake("--dry-run", *command)
    says = "its .venv has mine 1, and uv.lock 2.1; run `uv sync --locked` in project"
    assert f"config: environment: {says}" in done.stdout
    uv(place, "sync", "--locked")
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
def test_the_python_that_runs_snakemake_is_staged_to_the_nodes(
    place: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then launcher and ranks of the classifier are of the copy, whatever the experiment's name."""
    ours = venv(place.path / "ours")
    (site,) = (ours / "lib").glob("*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    seen = place.path / "seen"
    (site / "sitecustomize.py").write_text(
        "import json, os, sys\n"
        f"with open({str(seen)!r}, 'a') as file:\n"
        "    print(json.dumps([sys.prefix, *map(os.path.basename, sys.orig_argv)]), file=file)\n"
    )
    python = str(ours / "bin/python")
    monkeypatch.setattr(place, "command", [python, *place.command[1:]])
    given = ["environment={stage: true}", "experiment=a--packed", "epochs=1", "seed=0", "nodes=2",
             f"scratch=['{place.scratch}']"]  # fmt: skip
    started = place.start("--configfile", "config/digits.yaml", "--until", "train", "--config",
                          *given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    said, _ = started.communicate()
    assert started.returncode == 0, said
    prefixes: dict[str, set[bool]] = {}
    for line in seen.read_text().splitlines():
        prefix, *words = json.loads(line)
        for name in {"launch.py", "torchrun.py", "train.py"} & {*words[:3]}:
            prefixes.setdefault(name, set()).add(prefix.startswith(str(place.scratch)))
    assert prefixes == {"launch.py": {False}, "torchrun.py": {True}, "train.py": {True}}
    assert re.search(rf"^pack: {ours}, \S+ MB$", said, re.MULTILINE), said
    refused = place.snakemake(
        "-n", "--configfile", "config/digits.yaml", "--config", "environment={strict: true}"
    )
    assert "config: environment: is for your own program" in refused.stdout


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
