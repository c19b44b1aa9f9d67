"""What every other package may use: errors, files, provenance, the contract with a program.

In: nothing of this library. Out: one-line refusals, atomic and strict files, code hashes.
"""
