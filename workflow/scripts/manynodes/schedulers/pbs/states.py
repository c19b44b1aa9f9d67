"""What qstat says of a job: whether it waits, runs, or has ended, and how. Pure."""

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass

# PBS ends a job whose node is lost and still reports exit status 0; only the substate differs
# (measured): 92 is a job that has ended by itself with 0.
GOOD_SUBSTATE = "92"
WALLTIME = -29
# By qdel, or by qsig, which leaves substate 93 (measured).
TERMINATED, QDEL = 256 + signal.SIGTERM, "91"


@dataclass(frozen=True)
class State:
    """A job's state.

    Attributes:
        line: in words, for the user; changes are shown.
        ended: whether it has ended, or never will run.
        good: whether it has ended with success.
        node_lost: whether it has ended because PBS lost one of its nodes.
        never: whether no node can run it.
        waits: whether it waits to be run.
        ran: whether it has run, and ended by itself.
    """

    line: str
    ended: bool = False
    good: bool = False
    node_lost: bool = False
    never: bool = False
    waits: bool = False
    ran: bool = False


def state_of(shown: Mapping[str, str]) -> State:
    """The state of a job.

    Args:
        shown: its attributes as `commands.parse_jobs` returns them.
    """
    letter, comment = shown.get("job_state", ""), " ".join(shown.get("comment", "").split())
    if letter == "F":
        return ended(shown, comment)
    if comment.startswith("Can Never Run"):
        why = comment.partition(": ")[2] or comment
        return State(f"can never run: {why}", ended=True, never=True)
    if letter in ("R", "E"):
        return State("runs" + (f" on {', '.join(nodes_of(shown))}" if nodes_of(shown) else ""))
    words = {"Q": "waits", "H": "is held", "W": "waits for its time", "T": "is being moved",
             "S": "is suspended", "U": "is suspended"}  # fmt: skip
    # "Not Running: …", the scheduler's reason.
    why = comment.removeprefix("Not Running: ")
    line = words.get(letter, f"is in state {letter}") + (f": {why}" if why else "")
    return State(line, waits=letter in ("Q", "H", "W"))


def ended(shown: Mapping[str, str], comment: str) -> State:
    status = shown.get("Exit_status")
    if status == "0" and shown.get("substate") == GOOD_SUBSTATE:
        return State("has ended", ended=True, good=True, ran=True)
    if status == "0":
        return State("has lost a node", ended=True, node_lost=True)
    if status is None:
        return State(f"was deleted before it ran{brackets(comment)}", ended=True)
    # "Job run at … and failed" says nothing more.
    why = "" if comment.startswith("Job run at") else brackets(comment)
    words = how(int(status), shown.get("substate", ""))
    return State(f"{words}{why}", ended=True, ran=0 <= int(status) <= 256)


def how(status: int, substate: str) -> str:
    """PBS's exit status of a job in words."""
    if status == WALLTIME:
        return "has exceeded its walltime"
    if status == TERMINATED:
        return f"was {'deleted (qdel)' if substate == QDEL else 'ended by a signal (qsig?)'}"
    if status > 256:
        return f"was ended by {signal_name(status - 256)}"
    if status > 128:
        return f"ended with status {status}, which is {signal_name(status - 128)}"
    if status < 0:
        return f"was not run to its end by PBS (status {status})"
    return f"ended with status {status}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def brackets(comment: str) -> str:
    return f" ({comment})" if comment else ""


def nodes_of(shown: Mapping[str, str]) -> list[str]:
    """The nodes of exec_host: `n1/0*2+n2/0*2`."""
    parts = shown.get("exec_host", "").split("+")
    return list(dict.fromkeys(re.split(r"[/.]", part)[0] for part in parts if part))
