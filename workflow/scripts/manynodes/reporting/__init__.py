"""The files of finished runs.

In: metrics.csv, run.json, evaluation.json. Out: tables, the report page, reasons for missing runs.
"""
