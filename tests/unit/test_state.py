"""States on disk: which stay, which are resumed, and that no content is trusted."""

import dataclasses
import hashlib
import io
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from classifier.states import state
from classifier.states.state import Request, State
from manynodes.base import tree
from manynodes.base.errors import Refusal
from manynodes.experiment.config import Experiment
from programs import MakesFolder

RUN = Experiment.from_config({"experiment": "test"}).runs["run"]
DATA, CODE = "d" * 64, "c" * 64
MISSING = object()
WANTED = Request(RUN, DATA, CODE, "process 2 on here", "exact")


def some_state(
    epoch: int, step: int = 0, processes: int = 1, by: str = "process 1 on here", **changes: object
) -> State:
    ranks = [
        {"buffers": {}, "totals": torch.tensor([float(rank), 0.0]), "rng": {}}
        for rank in range(processes)
    ]
    fields = {
        "run": json.loads(RUN.to_json()),
        "data_sha256": DATA,
        "code_sha256": CODE,
        "epoch": epoch,
        "step": step,
        "model": {"weight": torch.arange(3.0)},
        "optimizer": {"state": {}, "param_groups": []},
        "scaler": {},
        "ranks": ranks,
        "history": [{"epoch": number + 1} for number in range(epoch)],
        "seconds": 0.5,
        "attempts": [{"by": by, "commit": "0123", "started": "now", "seconds": 1.0}],
        "checkpoints": {},
    }
    return State(**fields | changes)


def put(folder: Path, *states: State) -> None:
    folder.mkdir(exist_ok=True)
    for one in states:
        state.write(folder, one.epoch, one.step, one.encode())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def places(folder: Path) -> list[tuple[int, int]]:
    return [place for _, place in state.states(folder)]


def test_what_is_written_is_read(tmp_path) -> None:
    before = some_state(2, 7, processes=2)
    put(tmp_path, before)
    path = tmp_path / "epoch=0002_step=000007.safetensors"
    after, content = state.read(path)
    assert content == path.read_bytes()
    assert dataclasses.replace(after, model={}, ranks=[]) == dataclasses.replace(
        before, model={}, ranks=[]
    )
    torch.testing.assert_close(
        [after.model, after.ranks], [before.model, before.ranks], rtol=0, atol=0
    )
    assert (
        tmp_path / f"{path.name}.sha256"
    ).read_text() == f"{hashlib.sha256(content).hexdigest()}  {path.name}\n"


def test_a_state_of_an_earlier_version_has_no_averages() -> None:
    content = tree.decode(some_state(1).encode())
    del content["averages"]
    assert State.decode(tree.encode(content)).averages == {}


def test_two_states_stay(tmp_path) -> None:
    put(tmp_path, *(some_state(*place) for place in ((1, 0), (2, 0), (2, 5), (2, 9), (2, 14))))
    assert places(tmp_path) == [(2, 14), (2, 9)]
    put(tmp_path, some_state(3))
    assert places(tmp_path) == [(3, 0), (2, 14)]
    assert len(names(tmp_path)) == 4  # and what stands beside them


def test_the_newest_is_told_by_its_numbers(tmp_path) -> None:
    for place in ((9999, 0), (10000, 0), (10000, 999_999), (10000, 1_000_000)):
        (tmp_path / f"epoch={place[0]:04}_step={place[1]:06}.safetensors").touch()
    assert places(tmp_path) == [(10000, 1_000_000), (10000, 999_999), (10000, 0), (9999, 0)]


def saved(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def newest(folder: Path, request: Request, tell: Callable[[str], None]) -> bytes:
    """As a training: what is skipped goes once it has begun."""
    content, skipped = state.newest(folder, request, tell)
    for path in skipped:
        state.remove(path)
    return content


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(MakesFolder("code_was_run"), 2),
        saved({"format": state.FORMAT, "model": MakesFolder("code_was_run")}),
        tree.encode({"format": state.FORMAT + 1}),
        tree.encode({"format": state.FORMAT, "epoch": 3}),
        tree.encode([1, 2]),
        tree.encode(torch.ones(2)),
        some_state(3, run=RUN.values | {"best": "val_accuracy"}).encode(),
        some_state(3, run=RUN.values | {"patience": 2, "epochs": 9}).encode(),
        b"PK\x03\x04",
        b"nonsense" * 1000,
    ],
    ids=[
        "pickle",
        "torch with code",
        "other format",
        "fields missing",
        "list",
        "tensor",
        "no validation to find the best epoch",
        "nothing to be patient for",
        "start of a zip",
        "nonsense",
    ],
)
def test_foreign_content_is_no_state_and_is_not_run(tmp_path, monkeypatch, content) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "states", some_state(2))
    state.write(tmp_path / "states", 3, 0, content)
    lines: list[str] = []
    found = newest(tmp_path / "states", WANTED, lines.append)
    assert lines == [
        (
            "skipped: {}/epoch=0003_step=000000.safetensors is not a state of this version "
            "of the workflow"
        ).format(tmp_path / "states"),
        f"resumed after epoch 2, of {RUN.epochs} epochs, from "
        f"{tmp_path}/states/epoch=0002_step=000000.safetensors",
    ]
    assert found == (tmp_path / "states" / "epoch=0002_step=000000.safetensors").read_bytes()
    assert places(tmp_path / "states") == [(2, 0)]
    assert not (tmp_path / "code_was_run").exists()


@pytest.mark.parametrize(("change", "told"), [
    ({"learning_rate": 0.25}, f"learning_rate was 0.25 and is {RUN.learning_rate}"),
    ({"epochs": 5, "seed": 3}, f"seed was 3 and is {RUN.seed}, epochs was 5 and is {RUN.epochs}"),
    ({"nproc_per_node": 7, "device": "cuda", "cpus_per_proc": 3}, None),
    # `auto` goes on as it began.
    ({"precision": "bf16"}, None),
    # A state of an earlier version has no such key.
    ({"ema": MISSING}, None),
    ({"rates": {"^fc": 2.0, "c": 3.0}}, "rates was {'^fc': 2.0, 'c': 3.0} and is {}"),
])  # fmt: skip
def test_another_configuration_is_refused_another_place_is_not(tmp_path, change, told) -> None:
    run = {key: value for key, value in (RUN.values | change).items() if value is not MISSING}
    put(tmp_path, some_state(1, run=run), some_state(2, 4, run=run))
    there = names(tmp_path)
    if told:
        with pytest.raises(Refusal) as refused:
            newest(tmp_path, WANTED, print)
        assert str(refused.value).endswith(
            f"step=000004.safetensors is a state of another run: {told}; undo that, or start "
            "over: --config resume=fresh"
        )
    else:
        assert newest(tmp_path, WANTED, print)
    assert names(tmp_path) == there


def test_rates_in_another_order_are_another_configuration(tmp_path) -> None:
    """The first one that matches counts. Of `class_weights` the order means nothing."""
    rates, weights = {"^head": 2.0, "h": 3.0}, {"1": 2.0, "2": 3.0}
    was = RUN.with_values(rates=rates, class_weights=weights)
    turned = {"class_weights": dict(reversed(weights.items()))}
    put(tmp_path, some_state(1, run=json.loads(was.to_json())))
    same = dataclasses.replace(WANTED, run=was.with_values(**turned))
    assert newest(tmp_path, same, print)
    other = was.with_values(rates=dict(reversed(rates.items())))
    line = "rates was {'^head': 2.0, 'h': 3.0} and is {'h': 3.0, '^head': 2.0}; undo that"
    with pytest.raises(Refusal, match=re.escape(line)):
        newest(tmp_path, dataclasses.replace(WANTED, run=other), print)


def test_behind_the_end_of_another_run_nothing_is_looked_for(tmp_path) -> None:
    """Its results are complete, so the configuration may change, although an older state exists
    too.
    """
    other = RUN.values | {"learning_rate": 0.25}
    put(tmp_path, *(some_state(epoch, run=other) for epoch in (RUN.epochs - 1, RUN.epochs)))
    lines: list[str] = []
    assert newest(tmp_path, WANTED, lines.append) == b""
    assert lines[0] == (
        f"skipped: {tmp_path}/epoch={RUN.epochs:04}_step=000000.safetensors "
        "belongs to another run, which has ended: "
        f"learning_rate was 0.25 and is {RUN.learning_rate}"
    )
    assert lines[-1] == f"no usable state in {tmp_path}, 2 skipped; starting from scratch"
    assert names(tmp_path) == []


def test_fresh_starts_over_but_not_from_what_the_same_job_has_saved(tmp_path) -> None:
    """Otherwise a job that is requeued repeatedly would never end."""
    fresh = dataclasses.replace(WANTED, resume="fresh")
    put(tmp_path, some_state(1), some_state(2, by=fresh.by))
    assert newest(tmp_path, fresh, print)
    assert places(tmp_path) == [(2, 0), (1, 0)]
    put(tmp_path, some_state(3))
    assert newest(tmp_path, dataclasses.replace(fresh, by="process 3 on here"), print) == b""
    assert names(tmp_path) == []


def test_another_number_of_processes_goes_on_if_it_may(tmp_path) -> None:
    put(tmp_path, *(some_state(*place, processes=2) for place in ((1, 0), (1, 5), (1, 9))))
    with pytest.raises(
        Refusal,
        match=r"p=000009.safetensors .* it was on 2 processes and is on 1 "
        r"\(--config resume=anyway continues\)",
    ):
        newest(tmp_path, WANTED, print)
    lines: list[str] = []
    content = newest(tmp_path, dataclasses.replace(WANTED, resume="anyway"), lines.append)
    assert State.decode(content).step == 9
    assert lines[0].startswith("resumed after step 9 of epoch 2")
