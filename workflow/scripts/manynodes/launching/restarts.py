"""Whether another start of a program is useful, from how its starts have ended. Pure."""

from dataclasses import dataclass, field, replace

from manynodes.base.failure import Kind
from manynodes.launching.first_failure import First

# Starts in a row that save nothing new, after which a program is not started again on these nodes;
# and how often a scheduler has started a job again before one more such start is too much.
MOST_FRUITLESS = 3
# Starts in a row that last less than so many seconds, after which a program that fails is given up,
# whatever it has saved; a training whose states get further is not.
MOST_SHORT = 3
SHORT = 60
# Starts in a row that fail alike and get no further, after which a program is given up. Not fewer:
# one that overwrites last.pt may have got further each time, and the fault of a node comes again.
MOST_ALIKE = 10


@dataclass(frozen=True)
class Reached:
    """How far a program is, as far as its files tell.

    Attributes:
        state: name of the furthest state of the built-in trainer, which has epoch and step.
        counts: in a program's metrics.csv.
        files: names and bytes of what the program continues from.
    """

    state: str = ""
    counts: frozenset[bytes] = frozenset()
    files: frozenset[tuple[str, int]] = frozenset()


@dataclass
class Starts:
    """The starts of a program in this job.

    Attributes:
        reached: at the end of the last one; at first, what an earlier job has left.
        restarts: how often the scheduler has started the job again, if no owner of a run counts
            starts without progress; otherwise 0.
        failed: how the last one has failed.
        known: counts, names of files with their bytes, and words of the program, by which another
            start gets no further.
        short, fruitless, alike: how many of the last ones in a row were short, saved nothing new,
            or failed as the one before and got no further.
    """

    reached: Reached
    restarts: int = 0
    failed: str = ""
    known: set[object] = field(default_factory=set)
    short: int = 0
    fruitless: int = 0
    alike: int = 0

    def __post_init__(self) -> None:
        self.known |= self.reached.counts | self.reached.files

    def judged(self, first: First, seconds: float, reached: Reached) -> First:
        """What may be done about a failure after all of these starts.

        Args:
            first: of one more start.
            seconds: that it has lasted.
            reached: at its end.
        """
        # A program may write its table anew, with the counts of this start alone.
        further = reached.state > self.reached.state or bool(reached.counts - self.known)
        # Each start may leave a file of its own, so that short ones would go on for ever.
        new = further or bool((reached.files | first.said) - self.known)
        failure = first.failure
        failed = failure.reason.removeprefix(f"{failure.who} on {failure.where}")
        same = failed == self.failed and failure.kind != Kind.PREEMPTED
        self.short = self.short + 1 if seconds < SHORT and not further else 0
        self.fruitless = 0 if first.saved else self.fruitless + 1
        self.alike = self.alike + 1 if same and not new else 0
        self.known |= reached.counts | reached.files | first.said
        self.failed, self.reached = failed, reached
        if self.fruitless == MOST_FRUITLESS:
            # The nodes may be the cause.
            said = f"the last {self.fruitless} starts saved nothing new"
            return replace(first, failure=failure.then(said), in_place=False)
        if self.alike == MOST_ALIKE:
            line = f"the last {self.alike} starts failed in this way and got no further"
            return given_up(first, f"{line}; does it continue from what it has saved?")
        if self.short == MOST_SHORT:
            return given_up(first, f"the last {self.short} starts lasted less than {SHORT} s each")
        # Not preempted by somebody, and no node is lost: the program has ended by itself.
        requeued = first.again and not (first.in_place or first.saved or first.stopped)
        by_itself = requeued and failure.kind != Kind.LOST
        if by_itself and self.restarts >= MOST_FRUITLESS and seconds < SHORT:
            line = f"the job was restarted {self.restarts} times, and this start saved nothing new "
            return given_up(first, f"{line}in less than {SHORT} s")
        return first


def given_up(first: First, why: str) -> First:
    """The same, not to be started again."""
    return replace(first, failure=first.failure.then(why), again=False, in_place=False)
