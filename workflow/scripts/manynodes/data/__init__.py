"""Data sets, from a source's bytes to the pixels of a batch.

In: an archive, a URL, a package. Out: a verified folder, a staged copy, crops of its images.
"""
