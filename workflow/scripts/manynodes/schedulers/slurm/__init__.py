"""Slurm: the only place that knows its commands, its variables and its Snakemake plugin.

In: what launch asks of a scheduler. Out: srun commands, sbatch checks, explanations.
"""

from manynodes.schedulers.slurm.scheduler import Slurm

SCHEDULER = Slurm()
