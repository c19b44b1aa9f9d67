"""What NCCL's watchdog has said."""

LONG = "/pytorch/" + "torch/csrc/distributed/c10d/" * 7 + "ProcessGroupNCCL.cpp"
# What two ranks on an H200 said (torch 2.11), without frames and with a longer path.
WATCHDOG = f"""\
[rank0]:[E1127 14:50:12.988827508 {LONG}:689] [Rank 0] Watchdog caught collective operation \
timeout: WorkNCCL(SeqNum=61, OpType=GATHER, NumelIn=20800, NumelOut=41600, Timeout(ms)=30110) ran \
for 30142 milliseconds before timing out.
[rank0]:[E1127 14:50:12.989015092 {LONG}:2303] [PG ID 1 PG GUID 0(default_pg) Rank 0]  failure \
detected by watchdog at work sequence id: 61 PG status: last enqueued work: 61, last completed \
work: 60
[rank0]:[E1127 14:50:14.989612733 {LONG}:750] [Rank 0] Some NCCL operations have failed or timed \
out. Due to the asynchronous nature of CUDA kernels, subsequent GPU operations might run on \
corrupted/incomplete data.
[rank0]:[E1127 14:50:14.989650186 {LONG}:764] [Rank 0] To avoid data inconsistency, we are taking \
the entire process down.
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 1 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with \
exception: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=61, \
OpType=GATHER, NumelIn=20800, NumelOut=41600, Timeout(ms)=30110) ran for 30142 milliseconds before \
timing out.
Exception raised from checkTimeout at {LONG}:692 (most recent call first):
Exception raised from run at {LONG}:2125 (most recent call first):
""".splitlines()
# In the form of torch 2.14's ProcessGroupNCCL.cpp.
DUMP = f"""\
[rank1]:[E1126 09:00:01.123456789 {LONG}:1685] [PG ID 0 PG GUID 0(default_pg) Rank 1] Received a \
dump signal due to a collective timeout from rank 0 and we will try our best to dump the debug info.
""".splitlines()
