"""How the weights are evaluated.

In: weights and test images. Out: predictions from several views, and metrics.
"""
