"""Ranks that stand still or compute slowly, so that a training lasts for as long as its test needs
and takes no CPU time from others.
"""

import os
import re
import signal
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from cluster.handle import Cluster

CYCLE = 0.5  # seconds


def ranks_of(cluster: Cluster, results: str) -> list[int]:
    """The ranks of the training in this folder, on all nodes.

    Those that started it have its command in their own, after another program.
    """
    rank = re.compile(r"\S*python\S* ((?!\.py).)*train\.py .*" + re.escape(results))
    return [
        pid
        for node in cluster.nodes
        for pid, line in cluster.processes(node).items()
        if rank.match(line)
    ]


@contextmanager
def paused(ranks: Collection[int]) -> Iterator[None]:
    """They do nothing meanwhile."""
    assert ranks
    send(signal.SIGSTOP, ranks)
    try:
        yield
    finally:
        send(signal.SIGCONT, ranks)


@contextmanager
def slowed(ranks: Collection[int], share: float, cycle: float = CYCLE) -> Iterator[None]:
    """They have the CPUs for this share of each cycle only."""
    over = threading.Event()

    def alternate() -> None:
        while not over.is_set():
            with paused(ranks):
                over.wait(cycle * (1 - share))
            over.wait(cycle * share)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def send(number: signal.Signals, ranks: Collection[int]) -> None:
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
