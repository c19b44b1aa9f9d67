"""The images of a global batch, the same on any geometry.

In: a staged folder of images, seed, epoch. Out: this rank's pixels and labels.
"""
