"""Changed results are refused by name, in one line, by every reader; tables contain no formulas."""

import csv
import json
import os
import resource
import shutil
from pathlib import Path

import pandas as pd
import pytest

from manynodes.base.errors import Refusal, spreadsheet_text
from manynodes.experiment.config import Experiment, read_run
from manynodes.reporting.measures import unused
from manynodes.reporting.results import Missing, differences, read_evaluation, write_missing
from manynodes.reporting.tables import refuse_mixture, write_table
from programs import program
from trainings import RUN

CONFIG = json.dumps(RUN | {"experiment": "tampered", "dataset": {"name": "digits"}})


def aggregate(results: Path) -> str:
    done = program("aggregate", "--config", CONFIG, "--results", results, "--output", results)
    if done.returncode == 0:
        return ""
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert len(done.stderr) <= 201
    return done.stderr


def test_what_is_untouched_is_taken(evaluated: Path, tmp_path: Path) -> None:
    assert aggregate(Path(shutil.copytree(evaluated, tmp_path / "r"))) == ""


@pytest.mark.faults
def test_an_axis_loss_keeps_its_settings_beside_the_measured_loss(
    evaluated: Path, tmp_path: Path
) -> None:
    for loss in ("cross_entropy", "focal"):
        run = Path(shutil.copytree(evaluated / "run", tmp_path / f"loss~{loss}"))
        about = json.loads((run / "run.json").read_text())
        about["config"]["loss"] = loss
        (run / "run.json").write_text(json.dumps(about))
    config = json.dumps(json.loads(CONFIG) | {"loss": ["cross_entropy", "focal"]})
    done = program("aggregate", "--config", config, "--results", tmp_path, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    summary = pd.read_csv(tmp_path / "summary.csv")
    assert summary["loss"].tolist() == ["cross_entropy", "focal"]
    measured = json.loads((evaluated / "run" / "evaluation.json").read_text())["loss"]
    assert summary["loss (test)"].tolist() == pytest.approx([measured] * 2)


@pytest.mark.faults
def test_more_runs_than_fit_an_argument_are_read_from_a_file(
    evaluated: Path, tmp_path: Path
) -> None:
    same = {key: RUN[key] for key in ("epochs", "global_batch_size", "crop_size")}
    base = {key: value for key, value in json.loads(CONFIG).items() if key not in same}
    del base["learning_rate"]
    rates = [RUN["learning_rate"], *(number + 0.123456789 for number in range(1, 2100))]
    runs = [same | {"learning_rate": rate} for rate in rates]
    text = json.dumps(base | {"runs": runs})
    assert len(text) > 131_072  # the longest argument that Linux takes
    file = tmp_path / "experiment.json"
    file.write_text(text)
    first, *others = Experiment.from_json(text).runs
    shutil.copytree(evaluated / "run", tmp_path / first)
    write_missing([Missing(name, "failed") for name in others], tmp_path / "missing.csv")
    options = ["--results", tmp_path, "--output", tmp_path, "--missing", tmp_path / "missing.csv"]
    done = program("aggregate", "--config", f"@{file}", *options)
    assert done.returncode == 0, done.stderr
    assert pd.read_csv(tmp_path / "summary.csv")["run"].tolist() == [first]
    file.unlink()
    done = program("aggregate", "--config", f"@{file}", *options)
    assert done.stderr.count("\n") == 1
    assert (
        "experiment.json cannot be read (No such file or directory); run snakemake " in done.stderr
    )


@pytest.mark.parametrize(
    "change",
    [
        {"accuracy": float("nan")},
        {"accuracy": 0.99},
        {"accuracy": 1.5},
        {"n": 354},
        {"n": "355"},
        {"loss": -1},
        {"views": "seven"},
        {"plain": {"loss": 0.1, "accuracy": 0.2}},
        {"data_sha256": "0" * 64},
        {"model_sha256": "0" * 64},
        {"per_class_accuracy": [1.0] * 10},
        {"checkpoints": [{"epoch": 99, "sha256": "0" * 64, "loss": 0.1, "accuracy": 0.2}]},
        {"checkpoints": []},
        {"confusion_matrix": [[1]]},
        {"unknown": 1},
    ],
    ids=str,
)
def test_an_evaluation_with_another_number_is_refused(
    evaluated: Path, tmp_path: Path, change: dict
) -> None:
    results = Path(shutil.copytree(evaluated, tmp_path / "r"))
    path = results / "run" / "evaluation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    said = aggregate(results)
    assert "evaluation" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("name", ["evaluation.json", "run.json", "metrics.csv"])
def test_a_pipe_among_the_results_is_not_waited_for(
    evaluated: Path, tmp_path: Path, name: str
) -> None:
    results = Path(shutil.copytree(evaluated, tmp_path / "r"))
    (results / "run" / name).unlink()
    os.mkfifo(results / "run" / name)
    assert f"run/{name} " in aggregate(results)
    assert "is not a regular file" in aggregate(results)


def test_weights_that_the_training_has_not_written_are_not_evaluated(
    evaluated: Path, digits: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(evaluated / "run", tmp_path / "run"))
    model = run / "model.safetensors"
    model.write_bytes((run / "checkpoints/epoch=004.safetensors").read_bytes())
    done = program("evaluate", "--data", digits, "--model", model, "--device", "cpu",
                   "--output", tmp_path / "evaluation.json")  # fmt: skip
    assert done.returncode == 1
    assert "run/model.safetensors is not the file that the training has written" in done.stderr


@pytest.mark.parametrize("key", ["code_sha256", "sources_sha256", "files_sha256", "data_sha256"])
def test_runs_of_different_code_or_data_are_not_compared(key: str) -> None:
    about = {"config": {"dataset": "digits"}, "data_sha256": "a", key: "a"}
    refuse_mixture({"seed~0": about, "seed~1": about})
    with pytest.raises(Refusal, match=rf"seed~0 and seed~1 were trained with .* \({key}\)"):
        refuse_mixture({"seed~0": about, "seed~1": about | {key: "b"}})
    # Another data set is other data.
    refuse_mixture({"a": about, "b": about | {"config": {"dataset": "x"}, "data_sha256": "b"}})


def test_models_are_compared_although_only_one_is_the_user_s() -> None:
    """The code of a run holds that of its network, which the axis varies."""
    data = {"dataset": "digits"}
    ours = {"config": data | {"model": "resnet9"}, "data_sha256": "a", "code_sha256": "a"}
    ours |= {"network_sha256": None}
    own = ours | {"config": data | {"model": "m.py:Net"}, "code_sha256": "b", "network_sha256": "c"}
    refuse_mixture({"ours": ours, "own": own, "more": own})
    for one in (ours, own):
        with pytest.raises(Refusal, match=r"first and second .* different code \(code_sha256\)"):
            refuse_mixture({"first": one, "second": one | {"code_sha256": "d"}})


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").write_text("{}")
    with pytest.raises(
        Refusal,
        match=(
            r"is damaged, or not of this version \(required\); delete it and run the same "
            r"command again"
        ),
    ):
        read_evaluation(tmp_path / "evaluation.json")


@pytest.mark.faults
def test_weights_that_claim_another_size_are_refused_before_they_are_built(
    digits, evaluated: Path, tmp_path: Path
) -> None:
    content = (evaluated / "run" / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for widths in ([20_000, 20_000, 20_000], [4096, 4096, 4096], [8, 8, 9]):
        header["__metadata__"]["classifier"] = json.dumps(
            {"model": "airbench", "widths": widths, "classes": 10}
        )
        text = json.dumps(header).encode()
        path = tmp_path / "model.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
        # 7 GB were taken for the first.
        arguments = [
            "--data",
            digits,
            "--model",
            path,
            "--device",
            "cpu",
            "--output",
            tmp_path / "x.json",
        ]
        done = program(
            "evaluate",
            *arguments,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30)),
        )
        assert done.returncode == 1
        assert (
            "model.safetensors is damaged or was not written by this workflow: its " in done.stderr
        )
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "safe"),
    [("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"), ("+1", "'+1"), ("-2+3", "'-2+3"),
     ("@SUM(A1)", "'@SUM(A1)"), ("\tx", r"\tx"), ("\rx", r"\rx")],
)  # fmt: skip
def test_a_spreadsheet_computes_no_cell(tmp_path: Path, text: str, safe: str) -> None:
    assert spreadsheet_text(text) == safe
    write_missing([Missing("seed~0", text, "train.log")], tmp_path / "missing.csv")
    with (tmp_path / "missing.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row == {"run": "seed~0", "reason": safe, "log": "train.log"}
    assert spreadsheet_text("airbench") == "airbench"


def test_names_of_columns_are_safe_too(tmp_path: Path) -> None:
    table = pd.DataFrame({"=cmd|x": [1], "\x1b[31m\u202e": ["a\x1b]0;x\x07"]})
    write_table(table, tmp_path / "summary.csv")
    said = (tmp_path / "summary.csv").read_text()
    assert said == "'=cmd|x,\\x1b[31m\\u202e\n1,a\\x1b]0;x\\x07\n"


def test_a_column_of_a_program_never_replaces_another() -> None:
    assert unused("lr", "measured", ["epoch", "loss"]) == "lr"
    assert unused("lr", "measured", ["lr", "loss"]) == "lr (measured)"
    assert unused("lr", "measured", ["lr", "lr (measured)"]) == "lr (measured) (measured)"


def test_a_key_that_is_newer_than_a_run_had_its_default() -> None:
    before = {key: value for key, value in read_run(json.dumps(RUN)).values.items() if key != "ema"}
    assert differences(before, read_run(json.dumps(RUN))) == []
    assert differences(before, read_run(json.dumps(RUN | {"ema": 0.9}))) == ["ema 0.0 -> 0.9"]
    # The first one that matches counts.
    rates = {"^head": 2.0, "h": 3.0}
    other = read_run(json.dumps(RUN | {"rates": dict(reversed(rates.items()))}))
    assert differences(before | {"rates": rates}, other) == [
        "rates {'^head': 2.0, 'h': 3.0} -> {'h': 3.0, '^head': 2.0}"
    ]
