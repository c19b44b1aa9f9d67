"""A small part of `make fuzz`, with cases of its own."""

from types import SimpleNamespace

import pytest

import fuzz


@pytest.mark.parametrize("cases", [1, pytest.param(5, marks=pytest.mark.faults)])
def test_hostile_files_are_taken_or_refused_in_one_line(tmp_path, cases) -> None:
    material = fuzz.make_material(tmp_path / "material")
    wanted = SimpleNamespace(seed=2, cases=cases * len(fuzz.READERS), programs=0, only=None)
    assert fuzz.fuzz(material, wanted, tmp_path) == 0


def test_the_fuzzer_sees_what_is_wrong(tmp_path, monkeypatch) -> None:
    """A traceback, a payload that runs, and a wait without end."""
    material = fuzz.Material(tmp_path / "results", tmp_path / "canary")
    material.results.mkdir()
    assert "ZeroDivisionError" in (tried(material, lambda _: 1 // 0, monkeypatch) or "")
    assert tried(material, lambda _: material.canary.touch(), monkeypatch) == "the canary was made"
    monkeypatch.setattr(fuzz, "SECONDS", 1)
    assert tried(material, lambda _: fuzz.time.sleep(10), monkeypatch) == "not done after 1 s"


def tried(material: fuzz.Material, reader, monkeypatch) -> str | None:
    monkeypatch.setitem(fuzz.READERS, "bad", (lambda *_: None, "x", reader))
    return fuzz.tried(material, 1, 1, "bad", fuzz.in_process, material.results.parent / "work")
