"""Steps through agents: for schedulers that start a process on a node, but do not report its end.

In: one command per node, and a command that starts a process there. Out: their output and status.
"""
