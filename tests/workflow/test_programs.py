"""docs/your-own-program.md as written: programs of other kinds, interrupted, on one machine."""

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import accumulate, product
from pathlib import Path

import pytest
from torch import Tensor

from checkout import Checkout
from manynodes.launching import gpus
from pictures import write_folder
from waiting import until

EXAMPLES = "examples/programs"
EPOCHS = 20
# What an executor adds to the command of a job, as far as it matters to what is read.
OF_JOB = [
    *("--cores", "1", "--force-use-threads", "--force", "--target-files-omit-workdir-adjustment"),
    *("--max-inventory-time", "0", "--no-hooks", "--nolock", "--ignore-incomplete"),
    *("--mode", "remote"),
]
LONG = [
    "--config",
    'arguments=["--epochs","{epochs}"]',
    f"parameters={{lr: 0.1, epochs: {EPOCHS}}}",
    "evaluate=null",
    "nodes=1",
    "nproc_per_node=2",
    "preflight=false",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout(tmp_path_factory.mktemp("programs"))


def example(name: str) -> list[str]:
    return ["--configfile", f"{EXAMPLES}/{name}.yaml"]


def metrics(run: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((run / "metrics.csv").read_text())))


@pytest.fixture(scope="module")
def loop(place: Checkout) -> Path:
    """The example on one node; the faults run it on two."""
    path = place.path / EXAMPLES / "loop.yaml"
    path.write_text(path.read_text().replace("nodes: 2", "cpus_per_proc: 1\npreflight: false"))
    said = place.run(*example("loop"))
    assert "loop/lr~0.1: accuracy 0.9" in said
    return place.path / "results/loop"


def test_results_curves_and_evaluation_become_tables_figures_and_a_page(loop: Path) -> None:
    rows = list(csv.DictReader(io.StringIO((loop / "summary.csv").read_text())))
    assert [row["lr"] for row in rows] == ["0.05", "0.1"]
    for row in rows:
        assert float(row["accuracy"]) == float(row["test_accuracy"]) > 0.9
        assert row["attempts"] == "1"
    curves = list(csv.DictReader(io.StringIO((loop / "curves.csv").read_text())))
    assert [float(row["epoch"]) for row in curves] == [1, 2, 3, 4, 5] * 2
    page = (loop / "report.html").read_text()
    for name, drawn in (
        ("loss", "Curves of loss by epoch"),
        ("accuracy", "Curves of accuracy by epoch"),
        ("accuracy_by_axis", "Points of accuracy by lr"),
    ):
        assert (loop / f"figures/{name}.svg").exists()
        assert f'alt="{drawn} (a single seed)."' in page
    assert "Confusion matrix of the most accurate run, lr~" in page
    assert (loop / "lr~0.1/outputs/model.pt").exists()


def test_a_report_of_other_runs_under_the_same_name_does_not_count(place: Checkout) -> None:
    folder = place.path / "results/reused"
    (folder / "figures").mkdir(parents=True)
    for name in ("summary.csv", "curves.csv", "report.html"):
        (folder / name).write_text("of another experiment\n")
    jobs = place.jobs(*example("loop"), "--config", "experiment=reused")
    assert (jobs["train"], jobs["evaluate"], jobs["aggregate"]) == (2, 2, 1)


@pytest.mark.faults
def test_a_program_that_leaves_nothing_is_reported(place: Checkout) -> None:
    """Such as one that only prints its usage. It is no failure: its work may be elsewhere."""
    (place.path / "idle.py").write_text("print('usage: idle.py')\n")
    (place.path / "number.py").write_text("open('some.bin', 'w').close()\n")
    common = "nproc_per_node: 1\npreflight: false\n"
    (place.path / "idle.yaml").write_text(f"experiment: idle\nprogram: idle.py\n{common}")
    command = ["--configfile", "idle.yaml"]
    said = place.run(*command)
    line = "the program ended with status 0 and left nothing: no metrics, result, output or state"
    assert f"publish: warning: {line}" in said
    assert f"idle/run: finished; {line}" in said
    results = place.path / "results/idle"
    assert f"publish: warning: {line}" in (results / "run/train.log").read_text()
    assert line in (results / "report.html").read_text()
    # So is an evaluation without a number; a file is not nothing.
    said = place.run(*command, "--config", "experiment=other", "program=number.py",
                     "evaluate=idle.py", "snapshots=['some.*','snap*.pt','last.pt']")  # fmt: skip
    assert "other/run: finished; its evaluation left no number" in said
    assert line not in said
    assert (
        "publish: warning: snapshots: nothing in results/other/run/work matches snap*.pt, last"
        in said
    )


@pytest.mark.faults
def test_rows_of_a_program_that_continues_and_counts_anew_are_told(place: Checkout) -> None:
    """As XGBoost's rounds are counted from 0 in every start."""
    (place.path / "anew.py").write_text(
        "import launched\n"
        "state = launched.state / 'rounds'\n"
        "again = state.exists()\n"
        "for at in range(3):\n"
        "    print(f'[{at}] loss {at + 4 - again}', flush=True)\n"
        "if not again:\n"
        "    state.write_text('3')\n"
        "    launched.stop()\n"
    )
    (place.path / "anew.yaml").write_text(
        "experiment: anew\nprogram: anew.py\nnproc_per_node: 1\npreflight: false\n"
        "metrics: {log: '\\[(?P<iter>\\d+)\\] loss (?P<loss>\\S+)'}\n"
    )
    place.run("--configfile", "anew.yaml", "--retries", "1")
    line = "counted from 0 again: the rows of 3 earlier counts are left out"
    results = place.path / "results/anew"
    warning = f"publish: warning: the program had saved something when it last started, and {line}"
    assert warning in (results / "run/train.log").read_text()
    assert line in (results / "report.html").read_text()
    assert ",anew," in (results / "incidents.csv").read_text()


@pytest.mark.faults
def test_what_spoils_a_finished_run_is_refused_with_a_remedy_that_ends(place: Checkout) -> None:
    (place.path / "one.py").write_text("import launched\nlaunched.result(accuracy=0.5)\n")
    (place.path / "one.yaml").write_text(
        "experiment: one\nprogram: one.py\nnproc_per_node: 1\npreflight: false\n"
    )
    command = ["--configfile", "one.yaml"]
    place.run(*command)
    run = place.path / "results/one/run"
    # The refusal comes before the options differ.
    several = (["-n"], ["--touch"], ["--config", "replace=true"])
    for name, spoiled, line, remedy in (
        ("environment.json", "{}", "is not the file that", "put it back, or delete run.json there"),
        ("environment.json", None, "cannot be read", "put it back, or delete run.json there"),
        ("result.json", "{}", "is not the file that", "put it back, or delete run.json there"),
        ("run.json", "{", "is damaged", "put that back, or delete its run.json"),
    ):
        before, times = (run / name).read_text(), (run / name).stat()
        if spoiled is None:
            (run / name).unlink()
        else:
            (run / name).write_text(spoiled)
        for options in several:
            *_, last = place.snakemake(*command, *options).stdout.splitlines()
            assert f"{name} {line}" in last
            assert f"{remedy} to train again" in last
        (run / name).write_text(before)
        os.utime(run / name, ns=(times.st_atime_ns, times.st_mtime_ns))
        several = several[:1]
    assert place.jobs(*command) == {}
    (run / "run.json").unlink()
    said = place.snakemake(*command, "--touch").stdout
    assert "one/run: not finished: some of its files are missing; leave --touch out" in said
    assert "one/run: accuracy 0.5" in place.run(*command)


@pytest.mark.faults
def test_a_program_declares_its_parameters(place: Checkout) -> None:
    """A character-level transformer with an evaluation and parameters of its own."""
    text = ["--configfile", f"{EXAMPLES}/text/text.yaml", "--config", "layers=1", "steps=60"]
    refused = place.snakemake("-n", *text, "widht=8")
    assert "config: widht: unknown key; did you mean width?" in refused.stdout
    refused = place.snakemake("-n", *text, "heads=3")
    assert "config: heads: 3 do not share a width of 64; use a divisor of it" in refused.stdout
    place.run(*text, "save_every=20", "preflight=false")
    (row,) = csv.DictReader(io.StringIO((place.path / "results/text/summary.csv").read_text()))
    # 256 without any training.
    assert 5 < float(row["perplexity"]) < 40
    assert [int(line["step"]) for line in metrics(place.path / "results/text/run")] == [20, 40, 60]
    # It changes no result.
    assert place.jobs(*text, "save_every=5", "preflight=false") == {}


@pytest.mark.faults
def test_an_evaluation_that_is_edited_meanwhile_gives_no_numbers(
    place: Checkout,
) -> None:
    """Here by the first run itself. They would stand under the hash of the files before."""
    folder = place.path / "edited"
    folder.mkdir()
    (folder / "train.py").write_text(
        "import pathlib\n"
        "import launched\n"
        "launched.result(loss=1)\n"
        "score = pathlib.Path(__file__).with_name('score.py')\n"
        "score.write_text('import launched; launched.result(score=1000)')\n"
    )
    (folder / "score.py").write_text("import launched; launched.result(score=1)")
    (folder / "edited.yaml").write_text(
        "experiment: edited\nprogram: train.py\nevaluate: score.py\n"
        "nproc_per_node: 1\npreflight: false\n"
    )
    said = place.snakemake("--configfile", "edited/edited.yaml").stdout
    line = "evaluate: the program that evaluates has changed since this command began; run the same"
    assert said.count(f": not finished: {line}") == 1, said
    assert not list((place.path / "results/edited").glob("*/evaluation.json"))


@pytest.mark.usefixtures("loop")
def test_nothing_is_done_twice_and_changes_are_noticed(place: Checkout) -> None:
    assert place.jobs(*example("loop")) == {}
    results = place.path / "results"
    shutil.copytree(results / "loop", results / "renamed", symlinks=True)
    refused = place.snakemake(*example("loop"), "--config", "experiment=renamed")
    assert refused.stdout.splitlines()[-1] == (
        'results/renamed/report.html is of the experiment "loop"; delete it and run the same '
        "command again"
    )
    (results / "renamed/report.html").unlink()
    assert place.jobs(*example("loop"), "--config", "experiment=renamed") == {
        "aggregate": 1, "all": 1,
    }  # fmt: skip
    source = place.path / EXAMPLES / "digits.py"
    before = source.read_text()
    try:
        # A module that the program imports.
        source.write_text(before.replace("nn.ReLU()", "nn.GELU()"))
        said = place.snakemake("--dry-run", *example("loop"))
        assert "loop has changed" in said.stdout
        jobs = place.jobs(*example("loop"), "--config", "replace=true")
        assert jobs["train"] == jobs["evaluate"] == 2
        refused = place.snakemake(*example("loop"))
        assert refused.returncode != 0
        assert "replace=true" in refused.stdout
    finally:
        source.write_text(before)
    refused = place.snakemake(*example("loop"), "--config", "outputs=[model.pt, metrics.csv]")
    assert refused.returncode != 0
    assert "another value of outputs" in refused.stdout
    # Its numbers stay as they were read, unless it is to be replaced.
    said = place.run(*example("loop"), "--config", "metrics=other.csv")
    assert "Nothing to be done" in said
    assert "the numbers of lr~0.05, lr~0.1 were read by other metrics, and stay so; " in said
    jobs = place.jobs(*example("loop"), "--config", "metrics=other.csv", "replace=true")
    assert jobs["train"] == 2
    source = place.path / EXAMPLES / "evaluate.py"
    source.write_text(source.read_text() + "\n# changed\n")
    assert set(place.jobs(*example("loop"))) == {"evaluate", "aggregate", "all"}
    refuses_to_train_without_an_output(place, results / "loop/lr~0.1")


def refuses_to_train_without_an_output(place: Checkout, run: Path) -> None:
    """Its evaluation is to be made again, or need not be."""
    output, kept = run / "outputs/model.pt", run / "kept.pt"
    output.rename(kept)
    try:
        line = (
            f"{run.parent.name}/{run.name} is finished, but outputs/model.pt is gone; put it back,"
        )
        remedy = "train it again with --config replace=true"
        refused = place.snakemake(*example("loop"))
        assert refused.stdout.splitlines()[-1] == f"{line} or {remedy}"
        source = place.path / EXAMPLES / "evaluate.py"
        source.write_text(source.read_text().removesuffix("\n# changed\n"))
        refused = place.snakemake(*example("loop"), "--forcerun", "evaluate")
        assert refused.stdout.splitlines()[-1] == f"{line} keep it with --touch, or {remedy}"
        place.run(*example("loop"), "--forcerun", "evaluate", "--touch")
        assert place.jobs(*example("loop")) == {}
        assert (run / "run.json").exists()
    finally:
        output.parent.mkdir(exist_ok=True)
        kept.rename(output)


@pytest.fixture
def running() -> Iterator[list[subprocess.Popen]]:
    started: list[subprocess.Popen] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait()


@pytest.fixture(scope="module")
def whole(place: Checkout) -> Path:
    """The long loop left alone, and under another launcher."""
    place.run(
        "--until", "train", *example("legacy"), *LONG, "outputs=[model.pt]", "experiment=whole"
    )
    return place.path / "results/whole/run"


def weights(run: Path) -> dict[str, Tensor]:
    import torch

    return torch.load(run / "outputs/model.pt")


@pytest.mark.faults
def test_whatever_ends_it_the_same_command_continues(
    place: Checkout, whole: Path, running: list[subprocess.Popen]
) -> None:
    """A rank is killed, and then Snakemake interrupted: the same rows, each once, and the same
    weights. The clusters' tests run out of time.
    """
    command = [*example("loop"), *LONG, "experiment=ended"]
    run = place.path / "results/ended/run"
    first = place.start(
        *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    running.append(first)
    rows = run / "work/metrics.csv"

    def go_on(more: int) -> None:
        before = len(rows.read_text().splitlines()) if rows.exists() else 0
        until(lambda: rows.exists() and len(rows.read_text().splitlines()) > before + more, first)

    go_on(3)
    assert (run / "logs/rank=1.log").exists()
    victims = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/environ")
        if readable(path) and is_rank(path, run, 1)
    ]
    os.kill(max(victims), signal.SIGKILL)
    # `launch` starts the ranks again by itself.
    until((run / "logs/start=1").exists, first)
    go_on(2)
    # As a terminal does at Ctrl-C.
    os.killpg(first.pid, signal.SIGINT)
    said = first.communicate()[0]
    assert first.returncode != 0, said
    assert re.search("was ended by SIGKILL.*; starting again, with what was saved", said)
    assert len(rows.read_text().splitlines()) - 1 < EPOCHS
    place.run(*command)
    about = json.loads((run / "run.json").read_text())
    # Jobs, not starts.
    assert len(about["attempts"]) == 2
    killed, interrupted = about["incidents"]
    assert killed["kind"] == interrupted["kind"] == "interruption"
    assert re.match(r"rank 1 on \S+ was ended by SIGKILL", killed["text"])
    page = (run.parent / "report.html").read_text()
    assert re.search(r"<td>rank 1 on \S+ was ended by SIGKILL", page)
    assert [row["epoch"] for row in metrics(run)] == [str(n) for n in range(1, EPOCHS + 1)]
    assert metrics(run) == metrics(whole)
    ours, theirs = weights(run), weights(whole)
    assert all(ours[key].equal(theirs[key]) for key in theirs)


@pytest.mark.faults
def test_a_replacement_that_has_failed_is_made_by_the_same_command(place: Checkout) -> None:
    """Of two runs one is replaced, and is not trained once more."""
    folder = place.path / "again"
    folder.mkdir()
    (folder / "again.py").write_text(
        "import launched, sys\n"
        f"print('x', file=open('{folder}/' + sys.argv[1], 'a'))\n"
        "if sys.argv[1:] == ['2', 'new']:\n"
        f"    open('{folder}/mended')\n"
        "launched.result(accuracy=0.5)\n"
    )

    def command(version: str) -> list[str]:
        (folder / "again.yaml").write_text(
            "experiment: again\nprogram: again.py\nparameters: {number: [1, 2]}\n"
            f"arguments: ['{{number}}', {version}]\npreflight: false\n"
        )
        return ["--configfile", "again/again.yaml"]

    place.run(*command("old"))
    new = [*command("new"), "--config", "replace=true"]
    failed = place.snakemake("--keep-going", *new)
    assert failed.returncode == 1
    assert "again/number~2: its earlier results are back" in failed.stdout
    assert place.jobs(*new) == {"train": 1, "aggregate": 1, "all": 1}
    (folder / "mended").touch()
    place.run(*new)
    assert (folder / "1").read_text() == "x\n" * 2
    assert (folder / "2").read_text().startswith("x\n" * 3)
    assert place.jobs(*new) == {}


# Says that it has begun, and needs some time, but not torch.
SLOW = """
import time
import launched
with open("{place}/begun", "a") as file:
    print("x", file=file)
for epoch in range(1, 9):
    time.sleep(0.5)
    launched.row(epoch=epoch, loss=1 / epoch)
"""


@pytest.mark.parametrize("kind", ["program", pytest.param("classifier", marks=pytest.mark.faults)])
def test_a_training_that_outlives_its_snakemake_is_not_done_twice(
    place: Checkout, running: list[subprocess.Popen], kind: str
) -> None:
    """SIGINT to Snakemake alone, and not to what it has started as Ctrl-C does: the training goes
    on to its end, but for Snakemake it has failed.
    """
    folder = place.path / kind
    folder.mkdir()
    (folder / "slow.py").write_text(SLOW.format(place=folder))
    (folder / "config.yaml").write_text(f"experiment: outlives-{kind}\nprogram: slow.py\n")
    command = ["--configfile", f"{kind}/config.yaml", "--config", "preflight=false"]
    told = f"report: results/outlives-{kind}/report.html"
    if kind == "classifier":
        command = ["--until", "train", "--configfile", "config/digits.yaml", "--config",
                   f"experiment=outlives-{kind}", "nodes=1", "seed=0", "epochs=8",
                   "learning_rate=0.1"]  # fmt: skip
        told = f"outlives-{kind}/run: trained"
    run = place.path / f"results/outlives-{kind}/run"
    first = place.start(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    running.append(first)
    begun = run / "metrics.csv" if kind == "classifier" else folder / "begun"
    until(lambda: begun.exists(), first)
    first.send_signal(signal.SIGINT)
    said = first.communicate()[0]
    assert first.returncode != 0, said
    # With times.
    trained = (run / "metrics.csv").read_bytes()
    said = place.run(*command)
    assert told in said
    assert (run / "metrics.csv").read_bytes() == trained
    if kind == "program":
        assert (folder / "begun").read_text() == "x\n"


def readable(path: Path) -> bool:
    try:
        return bool(path.read_bytes())
    except OSError:
        return False


def is_rank(path: Path, run: Path, rank: int) -> bool:
    """Whether it is a process of the program of that rank."""
    environment = path.read_bytes().split(b"\0")
    return (
        f"LAUNCH_RESULTS={run}/work".encode() in environment
        and f"RANK={rank}".encode() in environment
    )


# `legacy` is the fixture `whole`.
@pytest.mark.faults
@pytest.mark.parametrize("name", ["lit", "accelerated"])
def test_an_example_completes(place: Checkout, name: str) -> None:
    said = place.run("--until", "train", *example(name), "--config", "preflight=false")
    assert f"{name}/run: accuracy 0.9" in said


def test_a_job_asks_nothing_of_the_user_s_own_images(place: Checkout) -> None:
    """Its own Snakemake, as an executor starts it: there may be millions, and a node may not see
    them.
    """
    folder = place.path / "apart"
    write_folder(folder / "images", train=2, test=1, size=(8, 8))
    for name in ("train", "test"):
        (folder / f"{name}.py").write_text(
            "import launched\n"
            f"launched.result({name}=len(list(launched.data.glob('{name}_images.npy'))))\n"
        )
    (folder / "apart.yaml").write_text(
        "experiment: apart\nprogram: train.py\nevaluate: test.py\npreflight: false\n"
        "dataset: {name: shapes, folder: images}\ncpus_per_proc: 1\n"
    )
    file, rules = ["--configfile", "apart/apart.yaml"], ["stage", "train", "evaluate"]
    place.run("results/data/shapes/manifest.json", *file)
    (folder / "images").rename(place.scratch / "images")
    jobs = ["--target-jobs", *(f"{rule}:experiment=apart,run=run" for rule in rules)]
    command = ["workflow/rules/in_job.py", "", "-m", "snakemake", *jobs, "--allowed-rules", *rules]
    done = place.python(*command, *OF_JOB, *file)
    assert done.returncode == 0, done.stderr
    for name, number in {"result": "train", "evaluation": "test"}.items():
        found = json.loads((place.path / f"results/apart/run/{name}.json").read_text())
        assert found[number] == 1


@pytest.mark.faults
def test_files_are_staged_and_hashed(place: Checkout) -> None:
    folder = place.path / "mine"
    (folder / "inputs/deep").mkdir(parents=True)
    (folder / "inputs/deep/a b.txt").write_text("7\n")
    (folder / "single.txt").write_text("5\n")
    (folder / "sum.py").write_text(
        "import launched, os, sys\n"
        "assert sys.argv[1:] == ['x {y}', '1'], sys.argv\n"
        "one = int((launched.files / 'inputs/deep/a b.txt').read_text())\n"
        "assert os.path.exists('sum.yaml')\n"
        "two = int((launched.files / 'single.txt').read_text())\n"
        "assert not str(launched.files).startswith(os.getcwd())\n"
        "launched.result(total=one + two)\n"
    )
    (folder / "sum.yaml").write_text(
        "experiment: total\nprogram: sum.py\nfiles: [inputs, single.txt]\npreflight: false\n"
        "directory: .\n"
        "arguments: ['x {{y}}', '{nodes}']\nnproc_per_node: 2\n"
    )
    file = ["--configfile", "mine/sum.yaml"]
    command = ["--until", "train", *file]
    assert "total/run: total 12" in place.run(*command)
    staged = json.loads((place.path / "results/total/run/staging.json").read_text())["nodes"]
    assert {node["status"] for node in staged} <= {"fresh", "reused"}
    assert place.jobs(*command) == {}
    (folder / "single.txt").write_text("5\n")
    made = "results/total/files/manifest.json"
    line = f"same bytes as before, first make {made} alone: this command --force {made}\n"
    assert line in place.snakemake(*command).stdout
    place.run(made, *file)
    assert place.jobs(*command) == {}
    (folder / "single.txt").write_text("6\n")
    refused = place.snakemake(*command)
    assert refused.returncode != 0
    assert "other files" in refused.stdout
    jobs = place.jobs(*command, "--config", "replace=true")
    assert jobs["collect"] == jobs["train"] == 1
    assert "total/run: total 13" in place.run(*command, "--config", "replace=true")
    # Results that were copied have no record of Snakemake's.
    (place.path / ".snakemake").rename(place.path / "record")
    (folder / "single.txt").write_text("6\n")
    assert line in place.snakemake(*command).stdout
    place.run(*file, "--force", made)
    place.run(*command, "--touch")
    assert place.jobs(*command) == {}
    shutil.rmtree(place.path / ".snakemake")
    (place.path / "record").rename(place.path / ".snakemake")


@pytest.mark.faults
def test_a_seed_that_diverged_is_counted_and_sizes_are_compared(place: Checkout) -> None:
    folder = place.path / "diverged"
    folder.mkdir()
    (folder / "diverged.py").write_text(
        "import json, sys\n"
        "json.dump({'acc': [0.5, float('nan')][int(sys.argv[1])]}, open('result.json', 'w'))\n"
    )
    (folder / "diverged.yaml").write_text(
        "experiment: diverged\nprogram: diverged.py\narguments: ['{seed}']\nseed: [0, 1]\n"
        "nproc_per_node: [1, 2]\npreflight: false\n"
    )
    said = place.run("--configfile", "diverged/diverged.yaml")
    assert "scaling: By the seconds of the whole program, its start included" in said
    page = (place.path / "results/diverged/report.html").read_text()
    assert "0.5 (1 of 2 runs)" in page
    assert 'alt="Points of the speed-up by processes, beside the ideal."' in page
    sizes = csv.DictReader(io.StringIO((place.path / "results/diverged/scaling.csv").read_text()))
    assert [(row["processes"], row["runs"]) for row in sizes] == [("1", "2"), ("2", "2")]
    command = ["workflow/scripts/difference.py", *["results/diverged"] * 2]
    done = place.python(*command)
    assert "acc 0.5 (n = 1) -> 0.5 (n = 1)" in done.stdout


def test_a_command_without_a_file_and_an_evaluation_that_fails(place: Checkout) -> None:
    folder = place.path / "line"
    folder.mkdir()
    (folder / "line.yaml").write_text(
        "experiment: line\nnproc_per_node: 2\npreflight: false\n"
        "command: [bash, -c, 'printf local-$0-$LOCAL_RANK']\narguments: ['{local_rank}']\n"
        "evaluate: bad.py\n"
    )
    (folder / "bad.py").write_text("raise SystemExit(7)")
    done = place.snakemake("--configfile", "line/line.yaml")
    assert {"local-0-0", "local-1-1"} <= set(done.stdout.splitlines())
    assert re.search(
        r"line/run: not finished: evaluate: node 0 on \S+ ended with status 7; log: ", done.stdout
    )


@pytest.mark.faults
def test_a_missing_module_is_told_whichever_rank_is_the_fastest(place: Checkout) -> None:
    """The first process of a node looks for it; the others must not fail before."""
    folder = place.path / "slow"
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin/python"
    # The look is slow, as on a cold file system; the program's start is not.
    python.write_text(
        f'#!/bin/sh\n[ "$1" != -c ] || sleep 3\nexec {sys.executable} "$@"\n', encoding="utf-8"
    )
    python.chmod(0o755)
    (folder / "train.py").write_text("import no_such_module\n")
    (folder / "slow.yaml").write_text(
        "experiment: slow\nnproc_per_node: 2\npreflight: false\n"
        "program: train.py\nenvironment: {python: .}\n"
    )
    done = place.snakemake("--configfile", "slow/slow.yaml")
    assert re.search(
        r"slow/run: not finished: train: rank 0 .* has no module no_such_module", done.stdout
    ), done.stdout
    # Its numbers may be in a file of another name.
    (folder / "train.py").write_text("open('some.bin', 'w').close()\n")
    done = place.run("--configfile", "slow/slow.yaml", "--config", "experiment=elsewhere")
    assert "elsewhere/run: finished; without numbers; the keys metrics and result" in done


@pytest.mark.faults
def test_braces_and_empty_words_reach_a_program_and_its_evaluation(place: Checkout) -> None:
    """Snakemake would take braces in a text for a wildcard, and write nothing for an empty word."""
    folder = place.path / "braces"
    folder.mkdir()
    (folder / "parameters.yaml").write_text(
        "properties:\n  label: {type: string, default: 'x {y} {run}', result: evaluation}\n"
    )
    (folder / "train.py").write_text(
        "import launched, sys\nlaunched.result(score=int(sys.argv[1:] == ['--tag', '', 'in']))\n"
    )
    (folder / "test.py").write_text(
        "import launched, sys\n"
        "assert sys.argv[1:] == ['', 'x'], sys.argv\n"
        "launched.result(seen=int(launched.parameters()['label'] == 'x {y} {run}'))\n"
    )
    (folder / "braces.yaml").write_text(
        "experiment: braces\nprogram: train.py\narguments: [--tag, '', in]\n"
        "evaluate: [test.py, '', x]\npreflight: false\n"
    )
    file = ["--configfile", "braces/braces.yaml"]
    assert "braces/run: trained\n" in place.run("--until", "train", *file)
    assert "braces/run: score 1, seen 1\n" in place.run("--until", "evaluate", *file)
    assert place.jobs("--until", "evaluate", *file) == {}


@pytest.mark.faults
def test_a_command_an_evaluation_and_what_watch_says(place: Checkout) -> None:
    folder = place.path / "mine"
    folder.mkdir(exist_ok=True)
    (folder / "run.sh").write_text("echo '{\"score\": 3}' > result.json\n")
    (folder / "e1.py").write_text("import launched; launched.result(seen=1)\n")
    (folder / "e2.py").write_text("")
    (folder / "shell.yaml").write_text(
        "experiment: shell\ncommand: [bash, run.sh]\nevaluate: e1.py\npreflight: false\n"
    )
    command = ["--until", "evaluate", "--configfile", "mine/shell.yaml"]
    assert "shell/run: score 3, seen 1" in place.run(*command)
    watch = ["workflow/scripts/watch.py", "results/shell"]
    (place.path / "results/shell/run/evaluated.json").unlink()
    line = "evaluated.json is not there; delete evaluation.json and run the same command again, or"
    for done in (
        place.snakemake(*command),
        place.snakemake(*command, "--touch"),
        place.python(*watch),
        place.python("workflow/scripts/difference.py", *["results/shell"] * 2),
    ):
        said = done.stdout + (done.stderr or "")
        assert f"results/shell/run/{line} for all runs add --forcerun evaluate" in said
    assert "shell/run: score 3, seen 1" in place.run(*command, "--forcerun", "evaluate")
    # Snakemake compares times only, or takes what is touched for new.
    other = [*command, "--config", "evaluate=[mine/e1.py, again]"]
    for how in (["-n", "--rerun-triggers", "mtime"], ["--touch"]):
        done = place.snakemake(*other, *how)
        assert "evaluation.json is of another evaluate, or of other arguments" in done.stdout
    # The numbers of the earlier evaluation are gone.
    said = place.run(*command, "--config", "evaluate=mine/e2.py")
    line = "score 3; its evaluation left no number\n"
    assert f"shell/run: {line}" in said
    done = place.python(*watch)
    assert done.stdout == f"run: done, {line.replace(';', ':')}", done.stdout + done.stderr
    (folder / "run.sh").write_text("exit 3\n")
    assert "run has changed" in place.snakemake(*command).stdout
    assert place.snakemake(*command, "--config", "replace=true").returncode != 0
    said = place.python(*watch, "--once")
    assert "run: failed: train: rank 0 on" in said.stdout


ON_A_GPU = """
import os, pathlib, time
gpu = pathlib.Path(os.environ["HERE"], os.environ["CUDA_VISIBLE_DEVICES"])
used = pathlib.Path(os.environ["HERE"], "used " + gpu.name)
gpu.mkdir()  # fails if another training has it
used.touch()
while len(list(gpu.parent.glob("used *"))) < 4: time.sleep(0.05)
gpu.rmdir()
"""


@pytest.mark.faults
def test_ten_seeds_on_four_gpus_are_trained_four_at_a_time(
    place: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPUs are invented; `launch` only passes their names on. There are CPUs for five."""
    names = [f"GPU-{os.getpid()}-{number}" for number in range(4)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names))
    monkeypatch.setenv("HERE", str(tmp_path))
    (place.path / "on_a_gpu.py").write_text(ON_A_GPU)
    (place.path / "gpus.yaml").write_text(
        f"experiment: gpus\nprogram: on_a_gpu.py\nseed: {list(range(10))}\ndevice: cuda\n"
        "cpus_per_proc: 1\npreflight: false\n"
    )
    try:
        said = place.run("--configfile", "gpus.yaml", "--until", "train", "--cores", "5")
    finally:
        for folder, name in product(gpus.folders_of_claims(), names):
            (folder / name).unlink(missing_ok=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"used {name}" for name in names]
    steps = re.findall(r"^localrule train:|Finished jobid: \d+ \(Rule: train\)", said, re.MULTILINE)
    at_once = list(accumulate(-1 if "Finished" in step else 1 for step in steps))
    assert (len(steps), max(at_once), at_once[-1]) == (20, 4, 0), said
