"""PBS: the only place that knows its commands, its variables and its job states.

In: what launch asks of a scheduler, and what the executor plugin asks of PBS. Out: agents on the
job's nodes, qsub options, states and explanations.
"""

from manynodes.schedulers.pbs.scheduler import Pbs

SCHEDULER = Pbs()
