"""The whole graph on the digits: its output, what it reruns, and that reruns give the same."""

import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from checkout import Checkout, jobs_in
from forked import run_ranks
from manynodes.experiment.config import default_run

CONFIG = """
experiment: tiny
dataset: {name: digits}
widths: [16, 32, 32]
epochs: 2
global_batch_size: 64
optimizer: sgd
learning_rate: [0.5, 0.4]
flip: false
test_views: plain
nodes: [1, 2]
cpus_per_proc: 1
"""
# What a page would fetch from elsewhere.
NETWORK = re.compile(r"""<(script|link|img)\b[^>]*\b(src|href)\s*=\s*["']?(https?:)?//""")
RUNS = [
    "learning_rate~0.5_nodes~1",
    "learning_rate~0.5_nodes~2",
    "learning_rate~0.4_nodes~1",
    "learning_rate~0.4_nodes~2",
]
TEST_IMAGES = 355


class Experiment(Checkout):
    """A checkout with the experiment above."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.config = self.path / "tiny.yaml"
        self.config.write_text(CONFIG)
        self.results = self.path / "results" / "tiny"

    def snakemake(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return super().snakemake("--configfile", "tiny.yaml", *arguments)

    def program(self, name: str, *arguments: object, processes: int = 1) -> None:
        command = [f"workflow/scripts/{name}.py", *map(str, arguments)]
        ranks = run_ranks(command, processes, self.path)
        assert [rank.returncode for rank in ranks] == processes * [0], ranks


# What another launcher or a site's module may have set, see also test_environment.py.
FOREIGN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "192.0.2.1",
    "MASTER_PORT": "1",
    "PET_STANDALONE": "1",
    "PET_NNODES": "2",
    "PYTHONSAFEPATH": "1",
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """Finished, in an environment of another launcher, beside a file with our package's name."""
    experiment = Experiment(tmp_path_factory.mktemp("digits"))
    (experiment.path / "manynodes.py").write_text(
        "raise SystemExit('the file of the user was run')\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FOREIGN.items():
            patch.setenv(name, value)
        experiment.run()
    return experiment


@pytest.fixture
def config(done: Experiment) -> Iterator[Path]:
    """The configuration, to be edited; put back afterwards."""
    yield done.config
    done.config.write_text(CONFIG)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def test_two_experiments_are_compared(done) -> None:
    found = done.python("workflow/scripts/difference.py", "results/tiny", "results/tiny")
    assert found.returncode == 0, found.stderr
    first, *lines = found.stdout.splitlines()
    assert first == "different: no key of the configuration"
    assert len(lines) == 3 * len(RUNS)
    accuracy = read(done.results / RUNS[0] / "evaluation.json")["accuracy"]
    assert lines[0] == (
        f"learning_rate 0.5 nodes 1: accuracy {accuracy:.2%} (n = 1) -> {accuracy:.2%} (n = 1): "
        "+0.00 points (too few runs for an interval)"
    )


def test_its_sizes_are_compared(done) -> None:
    with (done.results / "scaling.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == RUNS
    assert [row["processes"] for row in rows] == ["1", "2"] * 2
    for row in rows:
        run = read(done.results / row["run"] / "run.json")
        cpus = min(int(row["processes"]), len(os.sched_getaffinity(0)))
        assert float(row["cpu_hours"]) == pytest.approx(cpus * run["seconds"] / 3600)
    page = (done.results / "report.html").read_text()
    assert "<h2>Scaling</h2>" in page
    assert page.count("too few sizes for a model.") == 2


def test_sizes_that_are_compared_are_trained_one_at_a_time(done) -> None:
    said = done.run("--dry-run", "--forceall", "--cores", "4", "--config", "cpus_per_proc=1")
    threads = re.findall(r"rule train:.*?^ +threads: (\d+)$", said, re.MULTILINE | re.DOTALL)
    assert threads == ["4"] * len(RUNS)


def test_every_run_has_everything(done) -> None:
    folders = {path.name for path in done.results.iterdir() if path.is_dir()}
    assert folders == {*RUNS, "figures"}
    for run in RUNS:
        folder = done.results / run
        assert {path.name for path in folder.glob("*.*")} >= {
            "model.safetensors",
            "metrics.csv",
            "run.json",
            "evaluation.json",
            "predictions.csv",
            "staging.json",
            "train.log",
            "evaluate.log",
        }
        assert sorted(path.name for path in folder.glob("checkpoints/*.safetensors")) == [
            "epoch=001.safetensors",
            "epoch=002.safetensors",
        ]
        assert sha256(folder / "checkpoints" / "epoch=002.safetensors") == sha256(
            folder / "model.safetensors"
        )


def test_the_digits_are_learned(done) -> None:
    for run in RUNS:
        evaluation = read(done.results / run / "evaluation.json")
        assert evaluation["n"] == TEST_IMAGES
        assert evaluation["accuracy"] > 0.9
        assert sum(map(sum, evaluation["confusion_matrix"])) == TEST_IMAGES
        assert [checkpoint["epoch"] for checkpoint in evaluation["checkpoints"]] == [1, 2]
        assert evaluation["checkpoints"][1]["accuracy"] == evaluation["accuracy"]


def test_metrics_have_a_row_per_epoch(done) -> None:
    rows = list(csv.DictReader((done.results / RUNS[1] / "metrics.csv").open()))
    assert list(rows[0]) == [
        "epoch",
        "step",
        "lr",
        "train_loss",
        "train_accuracy",
        "val_loss",
        "val_accuracy",
        "images_per_second",
        "seconds",
    ]
    # 1,298 images in batches of at most 64.
    assert [(row["epoch"], row["step"]) for row in rows] == [("1", "21"), ("2", "42")]
    # The metrics are sums over images, divided once: a share of 1,298 and of 144 images.
    for row in rows:
        for accuracy, images in ((row["train_accuracy"], 1298), (row["val_accuracy"], 144)):
            assert abs(float(accuracy) * images - round(float(accuracy) * images)) < 1e-6


def test_run_json_says_how_it_came_about(done) -> None:
    about = read(done.results / RUNS[3] / "run.json")
    assert about["config"]["learning_rate"] == 0.4
    assert set(about["config"]) == set(default_run().values)
    assert {"cpu", "onednn_isa", "mkl", "aten"} <= set(about["attempts"][0])
    assert about["ranks"][1]["cpu"] == about["attempts"][0]["cpu"] != ""
    assert [(rank["rank"], rank["device"], rank["threads"]) for rank in about["ranks"]] == [
        (0, "cpu", 1),
        (1, "cpu", 1),
    ]
    assert about["data_sha256"] == read(done.path / "results/data/digits/manifest.json")["sha256"]
    assert about["metrics"]["epoch"] == 2
    assert about["versions"]["torch"]
    assert about["started"] < about["ended"]


def test_staging_says_where_each_node_reads(done) -> None:
    for run, nodes in zip(RUNS, (1, 2, 1, 2), strict=True):
        staged = read(done.results / run / "staging.json")["nodes"]
        assert [node["node_rank"] for node in staged] == list(range(nodes))
        for node in staged:
            assert node["status"] in ("fresh", "reused")
            assert Path(node["path"]).is_relative_to(done.scratch)
            assert node["bytes"] > 5_000_000


def test_the_tables_agree_with_the_runs(done) -> None:
    rows = list(csv.DictReader((done.results / "summary.csv").open()))
    assert [row["run"] for row in rows] == RUNS
    for row in rows:
        evaluation, about = (
            read(done.results / row["run"] / "evaluation.json"),
            read(done.results / row["run"] / "run.json"),
        )
        assert (int(row["n"]), float(row["accuracy"]), float(row["loss"])) == (
            TEST_IMAGES,
            evaluation["accuracy"],
            evaluation["loss"],
        )
        assert (float(row["plain_accuracy"]), float(row["plain_loss"])) == (
            evaluation["accuracy"],
            evaluation["loss"],
        )
        assert row["code_sha256"] == about["code_sha256"]
        assert row["computed_in"] == about["computed_in"] == "fp32"
        assert (row["learning_rate"], row["nodes"]) == (
            str(about["config"]["learning_rate"]),
            str(about["config"]["nodes"]),
        )
    curves = list(csv.DictReader((done.results / "curves.csv").open()))
    assert [(row["run"], row["epoch"]) for row in curves] == [
        (run, epoch) for run in RUNS for epoch in "12"
    ]
    figures = {path.stem: path for path in (done.results / "figures").glob("*.svg")}
    assert figures.keys() >= {"loss", "accuracy", "accuracy_by_axis", "confusion", "scaling"}
    for path in figures.values():
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_a_changed_value_of_an_axis_retrains_the_runs_it_touches(done, config) -> None:
    config.write_text(CONFIG.replace("0.4", "0.3"))
    assert done.jobs() == {
        "stage": 2,
        "train": 2,
        "evaluate": 2,
        "aggregate": 1,
        "all": 1,
    }


def test_a_changed_value_of_all_retrains_all(done, config) -> None:
    config.write_text(CONFIG + "label_smoothing: 0.1\n")
    retrained = {"train": 4, "evaluate": 4, "aggregate": 1, "all": 1}
    assert done.jobs() == retrained
    # Also if an update of the workflow stages anew, which alone trains nothing.
    rule = done.path / "workflow/rules/stage.smk"
    text = rule.read_text()
    rule.write_text(text.replace('" --restart"', '"  --restart"'))
    try:
        assert done.jobs() == {"stage": 4} | retrained
        config.write_text(CONFIG)
        assert done.jobs() == {"stage": 4}
    finally:
        rule.write_text(text)


def test_code_retrains_and_no_comment_nor_where_the_data_come_from_and_are_staged(done) -> None:
    path = done.path / "workflow/scripts/classifier/pixels/batches.py"
    text = path.read_text()
    try:
        path.write_text(text + "# a comment\n")
        elsewhere = ["--config", 'scratch=["/var/tmp"]', 'dataset={"archive": "/some/where"}']
        assert done.jobs(*elsewhere) == {}
        path.write_text(text.replace("(coin + epoch) % 2", "(coin + epoch + 1) % 2"))
        assert done.jobs() == {"train": 4, "evaluate": 4, "aggregate": 1, "all": 1}
        added = ["--rerun-triggers", "mtime", "--config", "learning_rate=[0.5, 0.4, 0.3]"]
        (commit,) = {read(done.results / run / "run.json")["git"]["commit"] for run in RUNS}
        *_, last = done.snakemake("-n", *added).stdout.splitlines()
        assert last.startswith(
            "tiny: learning_rate~0.3_nodes~1 would be of other code than learning_rate~0.5_nodes~1 "
        )
        assert last.endswith(
            f"since commit {(commit or 'none')[:10]}); give another experiment name, or add "
            "--config replace=true to train all"
        )
    finally:
        path.write_text(text)


def test_a_state_of_other_code_is_refused_before_others_are_trained(done) -> None:
    # Only here, because of torch.
    from manynodes.base.tree import encode

    run = done.results / "learning_rate~0.3_nodes~2"
    (run / "state").mkdir(parents=True)
    state = {"code_sha256": "of another", "attempts": [{"commit": "0123456789abcdef"}]}
    (run / "state/epoch=0001_step=000000.safetensors").write_bytes(encode(state))
    added = ["--config", "learning_rate=[0.5, 0.4, 0.3]"]
    try:
        for options in ([], ["-n"]):
            *_, last = done.snakemake(*options, *added).stdout.splitlines()
            assert last == (
                f"results/tiny/{run.name}/state is of another run: the code has changed since "
                "commit 0123456789ab; finish it with that version, or delete this folder to start "
                "over"
            )
        assert done.jobs(*added, "resume=fresh")["train"] == 2
    finally:
        shutil.rmtree(run)


@pytest.mark.faults
def test_finished_runs_are_not_trained_again_unasked(done) -> None:
    """Whatever Snakemake's reason is; and it stages for itself, and gives the same bits. What is
    missing or older is evaluated again, and to the same numbers.
    """
    missing, trained = (done.results / run / "evaluation.json" for run in RUNS[:2])
    before = missing.read_bytes()
    missing.unlink()
    assert done.jobs(f"results/tiny/{RUNS[0]}/evaluation.json") == {"evaluate": 1}
    assert done.jobs() == {"evaluate": 1, "aggregate": 1, "all": 1}
    weights = f"results/tiny/{RUNS[1]}/model.safetensors"
    files = [done.path / weights, trained]
    sums = [*map(sha256, files)]
    refused = done.snakemake("--forcerun", "train", "--", weights)
    assert refused.returncode == 1
    line = refused.stdout.splitlines()[-1]
    assert line == (
        f"tiny/{RUNS[1]} is finished and nothing of it has changed (--force, --forcerun or -R); "
        "keep it with --touch, or train it again with --config replace=true"
    )
    planned = done.run("-n", "--forcerun", "train", "--", weights)
    assert f"without -n this is refused: {line}" in planned.splitlines()
    assert sha256(done.path / weights) == sums[0]
    shutil.rmtree(done.scratch)
    done.scratch.mkdir()
    replace = ["--config", "replace=true"]
    done.run("--forcerun", "train", "--until", "train", *replace, "--", weights)
    about = read(done.results / RUNS[1] / "run.json")
    assert sorted(rank["data"]["status"] for rank in about["ranks"]) == ["fresh", "reused"]
    assert jobs_in(done.run()) == {"evaluate": 2, "aggregate": 1, "all": 1}
    assert missing.read_bytes() == before
    assert [*map(sha256, files)] == sums
    assert done.jobs() == {}


def test_accuracy_depends_neither_on_processes_nor_on_batch_size(done, tmp_path) -> None:
    folder = done.results / RUNS[0]
    known = read(folder / "evaluation.json")
    # The rule has used one process and batches of 500.
    for processes, batch_size in ((3, 7), (1, 1)):
        output = tmp_path / f"{processes}-{batch_size}.json"
        done.program(
            "evaluate",
            "--data",
            "results/data/digits",
            "--model",
            folder / "model.safetensors",
            "--device",
            "cpu",
            "--checkpoints",
            folder / "checkpoints",
            "--batch-size",
            batch_size,
            "--output",
            output,
            processes=processes,
        )
        found = read(output)
        assert found["n"] == TEST_IMAGES
        assert found["accuracy"] == known["accuracy"]
        assert found["confusion_matrix"] == known["confusion_matrix"]
        assert [c["accuracy"] for c in found["checkpoints"]] == [
            c["accuracy"] for c in known["checkpoints"]
        ]
        assert found["loss"] == pytest.approx(known["loss"], abs=1e-6)


@pytest.mark.parametrize(
    ("name", "damage", "line"),
    [
        ("evaluation.json", lambda text: text[:50], "evaluation.json is damaged"),
        (
            "evaluation.json",
            lambda _: "[]",
            "evaluation.json is damaged, or not of this version (type)",
        ),
        (
            "run.json",
            lambda _: '{"git": null}',
            "run.json is damaged, or not of this version (required)",
        ),
    ],
)
def test_a_damaged_run_is_not_aggregated(done, tmp_path, name, damage, line) -> None:
    results = Path(shutil.copytree(done.results, tmp_path / "tiny"))
    path = results / RUNS[2] / name
    path.write_text(damage(path.read_text()))
    config = json.dumps(yaml.safe_load(CONFIG))
    command = [
        "workflow/scripts/aggregate.py",
        "--config",
        config,
        "--results",
        results,
        "--output",
        tmp_path,
    ]
    failed = done.python(*command)
    assert failed.returncode == 1
    assert failed.stderr.count("\n") == 1
    # The path may be shortened, but not its end.
    assert f"{RUNS[2][-9:]}/{line}" in failed.stderr
    assert not (tmp_path / "summary.csv").exists()


@pytest.mark.faults
def test_the_same_results_give_the_same_report(done, tmp_path) -> None:
    config = json.dumps(yaml.safe_load(CONFIG))
    places = ["--results", done.results, "--data", "results/data", "--output", tmp_path]
    done.program("aggregate", "--config", config, *places)
    paths = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    made = [path for path in paths if path.name != "SHA256SUMS"]
    assert len(made) >= 11
    for name in made:
        assert sha256(tmp_path / name) == sha256(done.results / name)


def spoil_summary(results: Path) -> None:
    path = results / "summary.csv"
    path.write_text(path.read_text().replace(",0.9", ",0.99"))


def exchange_evaluations(results: Path) -> None:
    paths = [results / run / "evaluation.json" for run in RUNS[:2]]
    texts = [path.read_text() for path in paths]
    for path, text in zip(paths, reversed(texts), strict=True):
        path.write_text(text)


def certify(results: Path) -> None:
    """Every image of the matrix on its diagonal."""
    path = results / RUNS[0] / "evaluation.json"
    about = read(path)
    rows = about["confusion_matrix"]
    about["confusion_matrix"] = [
        [sum(row) * (label == column) for column in range(len(row))]
        for label, row in enumerate(rows)
    ]
    about["accuracy"] = about["plain"]["accuracy"] = 1.0
    path.write_text(json.dumps(about))


def spoil_metrics(results: Path) -> None:
    path = results / RUNS[0] / "metrics.csv"
    path.write_text(path.read_text().replace("1,21,", "1,22,"))


@pytest.mark.parametrize(("option", "spoil", "line"), [
    ("-n", spoil_summary, "results/tiny/summary.csv is not as it was made (SHA256SUMS); delete "
     "results/tiny/report.html and run the same command again"),
    ("-c2", exchange_evaluations, "evaluation.json is of other weights or another configuration"),
    ("-n", certify, "evaluation.json is damaged (its numbers do not agree with each other)"),
    ("--touch", spoil_metrics, "metrics.csv is not the file that the training has written"),
])  # fmt: skip
def test_numbers_of_something_else_are_refused_although_nothing_runs(
    done, option, spoil, line
) -> None:
    kept = done.path / "kept"
    shutil.copytree(done.results, kept, copy_function=shutil.copy2)
    try:
        spoil(done.results)
        refused = done.snakemake(option)
        assert refused.returncode == 1
        # A long path is shortened in its middle.
        *_, last = refused.stdout.splitlines()
        assert all(part[-50:] in last for part in line.split("; ")), refused.stdout
    finally:
        shutil.rmtree(done.results)
        kept.rename(done.results)


def test_sums_that_were_deleted_are_made_again(done) -> None:
    sums = done.results / "SHA256SUMS"
    before = sums.read_text()
    sums.unlink()
    assert done.jobs() == {"aggregate": 1, "all": 1}
    sums.write_text(before)


def test_runs_of_another_configuration_are_refused_without_snakemake_s_record(done, config) -> None:
    config.write_text(CONFIG.replace("epochs: 2", "epochs: 3"))
    for options in (["--rerun-triggers", "mtime"], ["--touch"]):
        refused = done.snakemake(*options)
        assert refused.returncode == 1
        *_, last = refused.stdout.splitlines()
        assert "training again would replace finished results" in last
        assert "epochs 2 -> 3" in last


def test_the_report_is_one_page_that_needs_no_network(done) -> None:
    page = (done.results / "report.html").read_text()
    # The result comes first, then the figure; everything else after.
    order = [
        'class="result"',
        'alt="Curves of accuracy by epoch (a single seed)."',
        "Every run",
        "<h2>Scaling",
        "Confusion matrix",
        "<h2>Configuration",
        "<h2>Provenance",
    ]
    assert [page.index(part) for part in order] == sorted(page.index(part) for part in order)
    assert f"4 runs of 4 settings, {TEST_IMAGES} test images: accuracy " in page
    figures = list((done.results / "figures").glob("*.svg"))
    assert page.count('src="data:image/svg+xml;base64,') == len(figures)
    # Every setting has one seed.
    assert "Mean over seeds" not in page
    assert "label_smoothing" in page
    assert not NETWORK.search(page)


def test_snakemake_s_own_report_has_it_too(done) -> None:
    done.run("--report", "results/provenance.html")
    page = (done.path / "results" / "provenance.html").read_text()
    for name in ("summary.csv", "curves.csv", "loss.svg", "accuracy.svg", "report.html"):
        assert name in page
    assert "<script" in page
    assert not NETWORK.search(page)
