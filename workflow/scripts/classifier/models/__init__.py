"""Networks and their weights files.

In: uint8 images. Out: logits; safetensors files that describe their own network.
"""
