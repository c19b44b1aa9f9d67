"""The library the programs share: pure and typed; it knows neither Snakemake nor a command line."""
