"""How the weights change.

In: a run, its data, a state. Out: weights, history, the next state.
"""
