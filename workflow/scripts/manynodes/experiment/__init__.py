"""The configuration and what follows from it.

In: a configuration file. Out: its runs, and the size of their jobs. Free of torch.
"""
