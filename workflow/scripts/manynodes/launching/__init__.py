"""Starting a program on every node, and explaining how it ended.

In: a geometry, a launcher, an allocation. Out: a plan, supervised processes, the first failure.
"""
