"""The states of a training, from which it resumes bit for bit.

In: weights, optimizer, generators, position. Out: durable files, and the newest usable one.
"""
