"""Snakemake inside a job: `python in_job.py -m snakemake` and its options.

It imports in half the CPU time, without garbage collection and without pandas, which the Slurm
plugin needs for a report on all jobs of a command.
"""

import gc
import runpy
import sys
from types import ModuleType

NOT_IN_A_JOB = "snakemake_executor_plugin_slurm.efficiency_report"

gc.disable()
sys.modules[NOT_IN_A_JOB] = report = ModuleType(NOT_IN_A_JOB)
report.create_efficiency_report = None  # type: ignore[attr-defined]
# As with -m: the working directory.
sys.path[0] = ""
del sys.argv[1:3]

import snakemake.cli  # noqa: E402, F401

gc.freeze()
gc.enable()
runpy.run_module("snakemake", run_name="__main__", alter_sys=True)
