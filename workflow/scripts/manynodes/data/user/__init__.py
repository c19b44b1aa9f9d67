"""A user's own images: what the configuration declares, and their import.

In: a folder of images, arrays, or a Python function. Out: the arrays of a data folder.
"""
