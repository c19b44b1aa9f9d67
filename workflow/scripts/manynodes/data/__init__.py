"""Data sets and files, from a source's bytes to each node's copy.

In: an archive, a URL, a package, the user's images. Out: a verified folder, a staged copy.
"""
