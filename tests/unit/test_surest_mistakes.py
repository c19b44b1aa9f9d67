"""The pictures of the surest mistakes on the page, and the figures of the probabilities."""

import base64
import html
import io
import json
import re
import shutil
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from sklearn import calibration

from manynodes.data.folder import DataFolder
from manynodes.experiment.config import Experiment
from manynodes.reporting import mistakes, page, predictions, result_figures
from manynodes.reporting.predictions import Predictions
from programs import program
from trainings import RUN

CONFIG = json.dumps(RUN | {"experiment": "judged", "dataset": {"name": "digits"}})


@pytest.fixture
def judged(evaluated: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(evaluated, tmp_path / "judged"))


def aggregate(results: Path, data: Path) -> tuple[int, str]:
    places = ["--results", results, "--data", data, "--output", results]
    done = program("aggregate", "--config", CONFIG, *places)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.faults
def test_the_page_shows_the_surest_mistakes(judged: Path, digits: Path) -> None:
    assert aggregate(judged, digits.parent) == (0, "")
    found = predictions.read(judged / "run")
    assert found is not None
    wrong = found.table[found.table["true_class"] != found.table["predicted_class"]]
    wrong = wrong.sort_values("probability", ascending=False)[: mistakes.MOST]
    text = (judged / "report.html").read_text()
    shown = re.findall(
        r'<figure title="(.*?)"><img .*?base64,(.*?)"><figcaption><b>(.*?)</b> (.*?)%<br>\s*'
        r"true: (.*?) (.*?)%<br>",
        text,
    )
    assert len(shown) == len(wrong) > 3
    images, _ = DataFolder.read(digits).split("test")
    for each, (title, content, predicted, probability, true, of_true) in zip(
        wrong.to_dict("records"), shown, strict=True
    ):
        with Image.open(io.BytesIO(base64.b64decode(content))) as picture:
            np.testing.assert_array_equal(np.asarray(picture), images[each["row"]])
        assert title == f"test image {each['row']}"
        assert (html.unescape(predicted), true) == (each["predicted_name"], each["true_name"])
        assert float(probability) == pytest.approx(100 * each["probability"], abs=0.051)
        assert float(of_true) == pytest.approx(100 * each["true_probability"], abs=0.051)
    assert (judged / "figures/calibration.svg").exists()
    assert not (judged / "figures/ranking.svg").exists()


@pytest.mark.faults
def test_without_the_images_of_the_evaluation_there_are_no_pictures(
    judged: Path, digits: Path
) -> None:
    run = json.loads((judged / "run/evaluation.json").read_text())
    path = judged / "run/evaluation.json"
    path.write_text(json.dumps(run | {"images_sha256": "0" * 64}))
    status, line = aggregate(judged, digits.parent)
    assert status == 0
    assert line.startswith("aggregate: without pictures: ")
    assert "digits has other images than the runs were evaluated on; " in line
    assert line.count("\n") == 1
    assert "Surest mistakes" not in (judged / "report.html").read_text()


def table(right: np.ndarray, probability: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame(
        {"row": range(len(right)), "file": "", "true_class": 1, "true_name": "one",
         "predicted_class": right.astype(int), "predicted_name": "x", "probability": probability,
         "true_probability": 1 - probability}
    )  # fmt: skip


def test_large_pictures_are_shrunk_and_any_pixels_shown() -> None:
    few = table(np.zeros(3, bool), np.array([0.5, 0.9, 0.9]))
    images = np.zeros((3, 300, 150, 2), np.float32)
    images[1, :, 75:, 0] = 4.5
    shown = mistakes.surest(few, images)
    assert [each.file for each in shown] == ["test image 1", "test image 2", "test image 0"]
    with Image.open(io.BytesIO(shown[0].picture)) as picture:
        assert (picture.size, picture.mode, picture.getextrema()) == ((48, 96), "L", (0, 255))
    many = table(np.zeros(30, bool), np.linspace(0.1, 1, 30))
    colours = np.random.default_rng(0).integers(0, 256, (30, 8, 8, 3), np.uint8)
    shown = mistakes.surest(many, colours)
    assert len(shown) == 24
    with Image.open(io.BytesIO(shown[0].picture)) as picture:
        np.testing.assert_array_equal(np.asarray(picture), colours[29])
    assert mistakes.surest(table(np.ones(3, bool), np.ones(3)), images) == []


NAMES = ['a/"><script>alert(1)</script>.png', "a/ü #1?.png", "javascript:alert(1).png", "a/%41.png"]


def test_the_name_of_a_mistake_is_a_link_to_its_file(tmp_path: Path) -> None:
    images, page_folder = tmp_path / "images", tmp_path / "results" / "x"
    for name in NAMES:
        (images / name).parent.mkdir(parents=True, exist_ok=True)
        (images / name).write_text(name)
    few = table(np.zeros(len(NAMES), bool), np.linspace(0.9, 0.6, len(NAMES)))
    few["file"] = NAMES
    pixels = np.zeros((len(NAMES), 8, 8, 3), np.uint8)
    shown = mistakes.surest(
        few, pixels, lambda file: mistakes.address_of(file, images, page_folder)
    )
    text = rendered(shown)
    assert "<script" not in text
    assert text.count('alt="A test image of the class one."') == len(NAMES)
    assert 'alt="Test images."' in text
    links = re.findall(r'<small><a href="(.*?)">(.*?)</a></small>', text)
    for name, (address, label) in zip(NAMES, links, strict=True):
        # As a browser resolves it.
        url = urljoin((page_folder / "report.html").as_uri(), html.unescape(address))
        assert Path(unquote(urlsplit(url).path)).read_text() == name
        assert html.unescape(label) == "/".join(name.split("/")[-2:])


def rendered(shown: list[mistakes.Mistake]) -> str:
    """The page of an experiment with these mistakes."""
    experiment = Experiment.from_json(json.dumps({"experiment": "x"}))
    confusion = [{"run": "run", "true_class": 0, "true_name": "a", "predicted_class": 0,
                  "predicted_name": "a", "images": 1}]  # fmt: skip
    row = {"run": "run", "n": 1, "views": "plain", "accuracy": 0.5, "loss": 1.0, "plain_loss": 1.0,
           "plain_accuracy": 0.5, "attempts": 1, "commit": "c", "dirty": False,
           "versions": ""}  # fmt: skip
    tables = {
        "summary": pd.DataFrame([row]),
        "incidents": pd.DataFrame(columns=["run", "time", "text"], dtype=str),
        "confusion": pd.DataFrame(confusion),
    }
    figures = {"confusion": ("Test images.", b"<svg/>")}
    return page.report(experiment, tables, ["accuracy"], None, figures, shown)


@pytest.mark.parametrize(
    "file",
    ["", "gone.png", "../secret", "a/../../secret", "/etc/passwd", "'=1.png", "a\\nb", "x" * 5000],
)
def test_what_is_no_file_of_the_folder_has_no_link(tmp_path: Path, file: str) -> None:
    images = tmp_path / "images"
    (images / "a").mkdir(parents=True)
    for name in ("../secret", "'=1.png", "a\\nb"):
        (images / name).touch()
    assert mistakes.address_of(file, images, tmp_path / "results") == ""


def test_the_calibration_curve_is_that_of_scikit_learn() -> None:
    random = np.random.default_rng(0)
    probability = np.append(random.uniform(0.3, 1, 1000), [1, 0.4, 0.2])
    right = random.uniform(size=1003) < probability
    found = result_figures.calibration(right, probability)
    accuracy, mean = calibration.calibration_curve(right, probability, n_bins=15)
    np.testing.assert_allclose(found["accuracy"], accuracy)
    np.testing.assert_allclose(found["probability"], mean)
    assert found["images"].sum() == 1003
    assert (found["left"] < found["probability"]).all()
    assert (found["probability"] <= found["left"] + 1 / 15 + 1e-12).all()


def test_two_classes_have_the_curves_of_each() -> None:
    both = table(np.array([True, False, True]), np.array([0.7, 0.6, 1]))
    both["true_class"], both["p(a)"], both["p(b)"] = [1, 0, 1], [0.3, 0.4, 0], [0.7, 0.6, 1]
    figures = result_figures.draw_predictions("r", Predictions(both, ["a", "$b"], "", "plain"))
    assert list(figures) == ["calibration", "ranking"]
    (roc, precision) = figures["ranking"].axes
    labels = [line.get_label() for line in roc.lines[:2]]
    assert labels == ["a found by its probability", "$b found by its probability"]
    assert roc.lines[0].get_ydata().tolist() == [0, 1, 1, 1]
    assert roc.lines[1].get_ydata().tolist() == [0, 0.5, 1, 1]
    assert precision.lines[0].get_ydata().tolist() == [1, 1, 0.5, 1 / 3]


def test_the_folds_of_a_setting_are_judged_together() -> None:
    parts = [
        Predictions(table(np.ones(2, bool), np.array([0.7, shift])), ["a", "b"], "", "plain")
        for shift in (0.6, 0.8)
    ]
    whole = predictions.pooled(parts)
    assert whole is not None
    assert whole.table["probability"].tolist() == [0.7, 0.6, 0.7, 0.8]
    assert predictions.pooled([parts[0], None]) is None
