"""A small part of `make fuzz`, with cases of its own."""

import json
import random
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

import fuzz
import programs
from manynodes.base import reading


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> fuzz.Material:
    return fuzz.make_material(tmp_path_factory.mktemp("material"))


@pytest.mark.parametrize("cases", [1, pytest.param(5, marks=pytest.mark.faults)])
def test_hostile_files_are_taken_or_refused_in_one_line(tmp_path, material, cases) -> None:
    wanted = SimpleNamespace(seed=2, cases=cases * len(fuzz.READERS), programs=0, only=None)
    assert fuzz.fuzz(material, wanted, tmp_path) == 0


# Of those that the material has none of.
WHOLE: dict[str, dict[str, Any]] = {
    "program_run": programs.ABOUT,
    "environment": {
        "python": "3.12.1", "distributions": {"torch": "2.9", "damaged": None}, "kind": None,
        "modules": ["cuda/12.4"], "setup_sha256": "", "lock_sha256": "0" * 64,
        "unasked": {"modules": [], "distributions": {"torch": "2.9"}},
        "repository": {"path": "/a", "commit": None, "dirty": None, "unknown": "no git"},
    },
}  # fmt: skip


@pytest.mark.parametrize("form", reading.OF_RUNS)
def test_the_fast_check_of_many_files_says_what_jsonschema_says(material, form) -> None:
    path = material.run / f"{form}.json"
    whole = shortened(json.loads(path.read_text()) if path.exists() else WHOLE[form])
    assert reading.fast_check(form)(whole)
    draw, verdicts = random.Random(0), []
    for _ in range(200):
        value = fuzz.mutated(whole, draw, material.canary)
        verdicts.append(reading.validator(form).is_valid(value))
        assert reading.fast_check(form)(value) == verdicts[-1], value
    assert {*verdicts} == {True, False}


def shortened(value: Any) -> Any:
    """With two elements of every list: each has the same schema, and costs as much."""
    if isinstance(value, dict):
        return {key: shortened(each) for key, each in value.items()}
    return [shortened(each) for each in value[:2]] if isinstance(value, list) else value


def test_the_fuzzer_sees_what_is_wrong(tmp_path, monkeypatch) -> None:
    """A traceback, a payload that runs, and a wait without end."""
    material = fuzz.Material(tmp_path / "results", tmp_path / "canary")
    material.results.mkdir()
    assert "ZeroDivisionError" in (tried(material, lambda _: 1 // 0, monkeypatch) or "")
    assert tried(material, lambda _: material.canary.touch(), monkeypatch) == "the canary was made"
    monkeypatch.setattr(fuzz, "SECONDS", 1)
    late = "not done after 1 s of a CPU, or {} s"
    assert tried(material, lambda _: any(False for _ in count()), monkeypatch) == late.format(
        fuzz.WAITING
    )
    monkeypatch.setattr(fuzz, "WAITING", 1)
    assert tried(material, lambda _: fuzz.time.sleep(10), monkeypatch) == late.format(1)


def tried(material: fuzz.Material, reader, monkeypatch) -> str | None:
    monkeypatch.setitem(fuzz.READERS, "bad", (lambda *_: None, "x", reader))
    return fuzz.tried(material, 1, 1, "bad", fuzz.in_process, material.results.parent / "work")
