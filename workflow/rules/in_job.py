"""Snakemake inside a job: `python in_job.py MODULES -m snakemake` and its options.

It imports in half the CPU time, without garbage collection and without modules that no job needs,
separated by commas: what is imported from them is None.
"""

import gc
import runpy
import sys
from pathlib import Path
from types import ModuleType

gc.disable()
for name in filter(None, sys.argv[1].split(",")):
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__getattr__ = lambda _name: None  # type: ignore[method-assign]
# Neither this folder nor the working directory: a file queue.py of the user's would be imported for
# Python's, as not by the command snakemake.
HERE = Path(__file__).resolve().parent
sys.path = [folder for folder in sys.path if folder and Path(folder).resolve() != HERE]
del sys.argv[1:4]

import snakemake.cli  # noqa: E402, F401

gc.freeze()
gc.enable()
runpy.run_module("snakemake", run_name="__main__", alter_sys=True)
