"""The preflight, with real stores, real processes and real faults."""

import threading
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from forked import SCRIPTS, run_ranks
from manynodes.base import signing
from manynodes.base.environment import variable
from manynodes.base.errors import Refusal
from manynodes.ranks.preflight import RankReport, join, judge, warnings

REPORT = RankReport(0, 0, "n1", "10.77.0.11", "cpu", "", "", 1, 2, "0-1")
GPU = replace(REPORT, device="cuda:0", device_name="H200", device_id="a")


def test_ranks_on_one_kind_of_device_fit_together() -> None:
    assert judge([REPORT, replace(REPORT, rank=1, host="n2")]) is None
    assert judge([GPU, replace(GPU, rank=1, device="cuda:1", device_id="b")]) is None


def test_a_node_without_gpus_is_named() -> None:
    assert judge([GPU, replace(REPORT, rank=1, host="n2")]) == (
        "rank 1 on n2 computes on cpu, rank 0 on n1 on cuda; give every node a GPU for each of its "
        "processes, or set device: cpu"
    )


def test_a_gpu_used_twice_is_named() -> None:
    assert (
        judge([GPU, replace(GPU, rank=1)])
        == "ranks 0 and 1 on n1 share one GPU, H200; ask for one per process"
    )


def test_more_threads_than_cpus_is_a_warning() -> None:
    assert warnings([REPORT, replace(REPORT, rank=1)]) == []
    (line,) = warnings([replace(REPORT, rank=rank) for rank in range(3)])
    assert line.startswith("preflight: warning: 3 threads on n1 have 2 CPUs; ")


def test_a_rank_that_does_not_come_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False)
    others: list[str] = []

    monkeypatch.setenv(variable("secret"), "x" * signing.LEAST)

    def other() -> None:
        peer = dist.TCPStore("127.0.0.1", store.port, 3, is_master=False)
        with pytest.raises(Refusal) as refused:
            join(peer, replace(REPORT, rank=1), 3)
        others.append(str(refused.value))

    thread = threading.Thread(target=other)
    thread.start()
    store.wait(["preflight/1"], timedelta(days=1))
    with pytest.raises(Refusal) as refused:
        join(store, REPORT, 3, timedelta(seconds=2))
    thread.join()
    assert (
        str(refused.value) == "preflight: ranks 2 of 3 did not connect within 2 s; see their logs"
    )
    assert others == [str(refused.value)]


def test_a_wrong_sum_names_the_node(tmp_path) -> None:
    """Two real processes, one with a wrong summand."""
    body = f"""
import os, sys
sys.path.insert(0, {str(SCRIPTS)!r})
from manynodes.base.errors import told_in_one_line
from manynodes.ranks.preflight import check_sum
from manynodes.ranks.process_group import describe, process_group
with told_in_one_line("x"), process_group("cpu") as process:
    check_sum(process.rank + 1, describe(process), 2)
    check_sum(7, describe(process), 2)
"""
    path = tmp_path / "x.py"
    path.write_text(body)
    ranks = run_ranks([str(path)], 2)
    assert [rank.returncode for rank in ranks] == [1, 1]
    said = "".join(rank.stdout for rank in ranks)
    assert ": preflight: the test all-reduce gives 14 on " in said
    assert " instead of 3; exclude that node (--exclude) and tell its administrator" in said
