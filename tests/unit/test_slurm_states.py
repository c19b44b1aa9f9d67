"""What the Slurm plugin of Snakemake is told of the states of jobs, as sacct gives them when it is asked again and again."""

import asyncio

import pytest

from ddp.slurm import with_plain_states


@pytest.mark.parametrize(
    ("states", "told"),
    [
        (["PENDING", "RUNNING", "COMPLETED"], ["PENDING", "RUNNING", "COMPLETED"]),
        (["RUNNING", "CANCELLED by 1000"], ["RUNNING", "CANCELLED"]),
        # Queued again, and not.
        (["PREEMPTED", "PREEMPTED", "PENDING", "PREEMPTED", "RUNNING"], ["PREEMPTED", "PREEMPTED", "PENDING", "PREEMPTED", "RUNNING"]),
        (["PREEMPTED", "PREEMPTED", "PREEMPTED"], ["PREEMPTED", "PREEMPTED", "CANCELLED"]),
        (["NODE_FAIL", "RUNNING", "NODE_FAIL", "COMPLETED"], ["PENDING", "RUNNING", "PENDING", "COMPLETED"]),
        (["NODE_FAIL", "NODE_FAIL", "NODE_FAIL"], ["PENDING", "PENDING", "CANCELLED"]),
    ],
)
def test_states_are_told_in_words_that_the_plugin_knows(states, told) -> None:
    answers = iter(states)

    async def query(_command: str, _logger: object) -> tuple[dict[str, str], float]:
        return {"7": next(answers), "8": "RUNNING", "9": ""}, 0.1

    plainly = with_plain_states(query)
    assert [asyncio.run(plainly("sacct", None)) for _ in states] == [({"7": word, "8": "RUNNING"}, 0.1) for word in told]
