"""What survives an interruption.

In: the state of a training. Out: durable files, the newest usable one, and one owner per run.
"""
