"""One process among many.

In: RANK, LOCAL_RANK, WORLD_SIZE. Out: a checked process group, signed exchange, votes, signals.
"""
