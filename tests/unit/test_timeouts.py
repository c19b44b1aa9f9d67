"""The order of the times that depend on each other."""

from itertools import pairwise

from manynodes.base import timeouts as t


def test_who_is_told_to_end_is_over_before_whoever_told_it_gives_up() -> None:
    order = [t.SUPERVISE_GRACE, t.TORCHRUN_GRACE, t.AGENT_GRACE, t.STEP_GRACE, t.LAUNCH_GRACE,
             t.BEFORE_THE_END]  # fmt: skip
    assert all(one < other for one, other in pairwise(order))


def test_an_owner_is_dead_when_its_node_has_lost_the_others_and_is_seen_alive_before() -> None:
    assert t.BEAT < t.SETTLE < t.LEASE
    assert 2 * t.BEAT < t.WATCH < t.LEASE
    assert t.LOST_AFTER + t.ALONE_GRACE <= t.LEASE < t.BETWEEN


def test_nodes_wait_for_each_other_for_longer_than_one_needs_to_start() -> None:
    assert t.CONNECTED < t.RENDEZVOUS < t.TIMEOUT
    assert t.CANCELLED_WITHIN < t.ENDED_BY_SCHEDULER
