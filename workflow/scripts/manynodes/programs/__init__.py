"""A training program of the user's.

In: a run's command, its values and folders. Out: a started program that is stopped in order, its
state under a guard, and its checked outputs.
"""
