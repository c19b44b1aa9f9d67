"""The times that must stay in an order, in seconds.

Who is told to end passes it on, and must be over before whoever told it gives up: the program,
its supervisor, torchrun, the agent of a node, the step of all nodes, `launch`, the scheduler.
"""

# From SIGTERM to SIGKILL. torch.distributed.elastic's own, which has no option.
TORCHRUN_GRACE = 30
SUPERVISE_GRACE = 25
AGENT_GRACE = 32
STEP_GRACE = 34
LAUNCH_GRACE = 35
# Before the end of the job, at which its ranks stop: time to finish a step and to save.
BEFORE_THE_END = 60
# Before that, in which ranks are not started again: they would hardly do anything.
START_UP = 60

# Between two touches of the record of a run's owner.
BEAT = 2.0
# From taking over a record to the first write: an owner that is still alive sees within BEAT that
# it has lost the run.
SETTLE = 2 * BEAT
# In which an owner that is alive touches its record.
WATCH = 2.5 * BEAT
# After which a peer on another node that does not answer is lost: no power, or a cut network. The
# kernel answers, even if the node is overloaded or the process is stopped; but a process that does
# not read for so long, while the other one writes, is lost too.
LOST_AFTER = 20
# From SIGTERM to SIGKILL on a node that has lost the others: another job may soon train the run.
ALONE_GRACE = 10
# An owner that has not touched its record for so long is dead. Opening the file asks the server,
# even if attributes are cached for a minute.
LEASE = 30.0

# In which a scheduler that is cancelling a job ends `launch` too, before it asks for a requeue.
CANCELLED_WITHIN = 5
# In which `launch` starts its ranks again, or the next program begins.
BETWEEN = 120
# In which a scheduler ends a job that it was asked to requeue.
ENDED_BY_SCHEDULER = 120
# In which an agent must have connected: its Python may come from a cold file system.
CONNECTED = 120
# In which the nodes of torchrun must have met. All of them import torch first, some from a cold
# network file system. dispatch.py has checked before that they can reach node 0.
RENDEZVOUS = 300
# In which ranks wait for each other, without LAUNCH_TIMEOUT. Enough for the first step on a busy
# GPU; the preflight has checked before that all ranks are there.
TIMEOUT = 600
