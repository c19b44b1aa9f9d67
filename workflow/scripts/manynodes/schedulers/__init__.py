"""Who provides the nodes: one module or package per scheduler, found by `registry`.

In: a number of nodes, a command for each. Out: an allocation, processes, an explanation.
"""
