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
# Starts in a row that fail alike and get no further, after which a program is given up that tells
# how far it is.
MOST_ALIKE = 3
# The same if only the names and sizes of its files say that it got no further: one that overwrites
# last.pt may have got further each time, and the fault of a node comes again too.
MOST_UNTOLD = 10


@dataclass(frozen=True)
class Reached:
    """How far a program is, as far as its files tell.

    Attributes:
        state: name of the furthest state of the built-in trainer, which has epoch and step.
        counts: in a program's metrics.csv.
        rows: changes when the program writes other numbers for counts before its newest.
        files: names and bytes of what the program continues from.
    """

    state: str = ""
    counts: frozenset[bytes] = frozenset()
    rows: int = 0
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
        short, fruitless, told, untold: how many of the last ones in a row were short, saved
            nothing new, or failed alike and got no further: as the program has told, or at least
            as far as its files tell.
    """

    reached: Reached
    restarts: int = 0
    failed: str = ""
    known: set[object] = field(default_factory=set)
    short: int = 0
    fruitless: int = 0
    told: int = 0
    untold: int = 0

    def __post_init__(self) -> None:
        self.known |= self.reached.files | self.reached.counts

    def judged(self, first: First, seconds: float, reached: Reached) -> First:
        """What may be done about a failure after all of these starts.

        Args:
            first: of one more start.
            seconds: that it has lasted.
            reached: at its end.
        """
        # A program may write its table anew, with the counts of this start alone.
        further = reached.state > self.reached.state or bool(reached.counts - self.known)
        self.short = self.short + 1 if seconds < SHORT and not further else 0
        self.fruitless = 0 if first.saved else self.fruitless + 1
        self.compare(first, further, reached)
        if self.fruitless == MOST_FRUITLESS:
            # The nodes may be the cause.
            said = f"the last {self.fruitless} starts saved nothing new"
            first = replace(first, failure=first.failure.then(said), in_place=False)
        elif self.told == MOST_ALIKE or self.untold == MOST_UNTOLD:
            number = MOST_ALIKE if self.told == MOST_ALIKE else MOST_UNTOLD
            line = f"the last {number} starts failed in this way and got no further"
            first = given_up(first, f"{line}; does it continue from what it has saved?")
        elif self.short == MOST_SHORT:
            line = f"the last {self.short} starts lasted less than {SHORT} s each"
            first = given_up(first, line)
        requeued = first.again and not (first.in_place or first.saved)
        if requeued and self.restarts >= MOST_FRUITLESS and seconds < SHORT:
            line = f"the job was restarted {self.restarts} times, and this start saved nothing new "
            first = given_up(first, f"{line}in less than {SHORT} s")
        return first

    def compare(self, first: First, further: bool, reached: Reached) -> None:
        """Count a start that has failed as the one before, and told of nothing that is new."""
        failure = first.failure
        failed = failure.reason.removeprefix(f"{failure.who} on {failure.where}")
        # One that goes on leaves earlier rows as they are.
        repeats = reached.rows != self.reached.rows
        new = {*reached.counts, *reached.files, *first.said} - self.known
        alike = failed == self.failed and failure.kind != Kind.PREEMPTED and not (further or new)
        self.untold = self.untold + 1 if alike else 0
        self.told = self.told + 1 if alike and (first.said or repeats) else 0
        self.known |= new
        self.failed, self.reached = failed, reached


def given_up(first: First, why: str) -> First:
    """The same, not to be started again."""
    return replace(first, failure=first.failure.then(why), again=False, in_place=False)
