"""The library that the programs share: typed, and free of Snakemake and of command lines."""
