"""`probe: true`: what the nodes of a training can do."""

import json

from manynodes.base.reading import parse_form
from manynodes.ranks.probe import LEAST_READ, LINK, SIZES, best_links, outliers, read_rate, rounds
from trainings import complete_on_ranks


def test_a_training_measures_its_nodes_first(tmp_path, digits) -> None:
    said = complete_on_ranks(tmp_path / "run", digits, 2, "--probe", epochs=1)
    text = (tmp_path / "run/run.json").read_bytes()
    found = parse_form(text, "run")["probe"]
    assert [each["bytes"] for each in found["all_reduce"]] == list(SIZES)
    assert all(each["seconds"] > 0 for each in found["all_reduce"])
    (node,) = found["nodes"]
    assert node["matmul_flops_per_second"] > 0
    # The digits take 82 KB.
    assert node["scratch_bytes_per_second"] is None
    assert node["shared_bytes_per_second"] is None
    assert node["reply_seconds"] is None
    assert "warning: probe" not in said
    complete_on_ranks(tmp_path / "other", digits, 2, epochs=1)
    assert json.loads((tmp_path / "other/run.json").read_text())["probe"] is None
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "other")]
    assert weights[0] == weights[1]


def test_a_node_that_is_slower_is_named() -> None:
    def node(host: str, **measured: float | None) -> dict[str, object]:
        usual = {
            "matmul_flops_per_second": 1e11,
            "scratch_bytes_per_second": 1e9,
            "shared_bytes_per_second": 2e8,
            "link_bytes_per_second": 1e8,
            "reply_seconds": 1e-4,
        }
        return {"host": host} | usual | measured

    first = node("n1")
    assert outliers([first, node("n2"), node("n3")]) == []
    assert outliers([first]) == []
    assert outliers([first, node("n2", matmul_flops_per_second=5e10), node("n3")]) == [
        "n2 is 2.0 times slower than the median of the nodes: matmul flops 5e+10 per second"
    ]
    assert outliers([first, node("n2"), node("n3", reply_seconds=0.005)]) == [
        "n3 is 50.0 times slower than the median of the nodes: reply seconds 0.005"
    ]
    # A fifth of a millisecond more is noise; what was not measured is not compared.
    assert outliers([first, node("n2"), node("n3", reply_seconds=3e-4)]) == []
    assert outliers([first, node("n2", scratch_bytes_per_second=None)]) == []


def test_neighbours_in_a_ring_meet_in_rounds() -> None:
    assert rounds(1) == []
    assert rounds(2) == [[(0, 1)]]
    assert rounds(3) == [[(0, 1)], [(1, 2)], [(2, 0)]]
    assert rounds(4) == [[(0, 1), (2, 3)], [(1, 2), (3, 0)]]
    assert rounds(5) == [[(0, 1), (2, 3)], [(1, 2), (3, 4)], [(4, 0)]]


def test_a_slow_link_counts_for_the_node_that_has_no_better_one() -> None:
    # Ranks 0, 2 and 4 are the first of their nodes; that of rank 2 is slow.
    links = {0: {2: (0.01, 2.0)}, 2: {4: (0.01, 2.0)}, 4: {0: (0.001, 0.02)}}
    best = best_links(links)
    assert best[0] == best[4] == {"link_bytes_per_second": LINK * 100, "reply_seconds": 0.001}
    assert best[2] == {"link_bytes_per_second": LINK, "reply_seconds": 0.01}
    assert best_links({0: {}}) == {0: {"link_bytes_per_second": None, "reply_seconds": None}}


def test_a_file_that_cannot_be_read_has_no_rate(tmp_path) -> None:
    assert read_rate(tmp_path / "nothing") is None
    (tmp_path / "file").write_bytes(bytes(LEAST_READ - 1))
    assert read_rate(tmp_path / "file") is None
    (tmp_path / "file").write_bytes(bytes(LEAST_READ))
    rate = read_rate(tmp_path / "file")
    assert rate
    assert rate > 0
