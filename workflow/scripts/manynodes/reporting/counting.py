"""Counts that go back in the rows of a program: it has started again, or counts anew."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from manynodes.base.errors import Refusal, shown

# A count, and the numbers of a row with it; None where it has none.
Counted = tuple[float, dict[str, float | None]]
# Gets a count with which rows begin again, and how many counts there were before.
Tell = Callable[[float, int], None]


def to_nobody(count: float, counts: int) -> None:
    """Tells nobody."""


@dataclass
class Anew:
    """Notices numbers that are replaced after the count of their column has gone back.

    Each column for itself: validation may be written later than the training of its epoch, or be
    counted in other units.

    Attributes:
        replaced: for the first, second, … time that a column's count has gone back, how many rows
            then had another number where there was one.
    """

    replaced: list[int] = field(default_factory=list)
    newest: dict[str, float] = field(default_factory=dict)
    times: Counter[str] = field(default_factory=Counter)
    lowest: dict[str, float] = field(default_factory=dict)
    begins: set[str] = field(default_factory=set)  # columns that went back to where they began

    def take(
        self, count: float, row: Mapping[str, float | None], old: Mapping[str, float | None]
    ) -> None:
        """Look at a row.

        Args:
            old: what is known at its count.
        """
        which = 0
        for name, value in row.items():
            if value is None:
                continue
            last = self.newest.get(name, count)
            self.newest[name] = count
            lowest = self.lowest.get(name, count)
            self.lowest[name] = min(lowest, count)
            if count < last:
                # Further up, a program has gone back to what it has saved, or sums up.
                (self.begins.add if count <= lowest else self.begins.discard)(name)
            self.times[name] += count < last
            self.replaced += [0] * (self.times[name] - len(self.replaced))
            if count != last and name in self.begins and not alike(old.get(name), value):
                which = max(which, self.times[name])
        if which:
            self.replaced[which - 1] += 1

    def lost(self, restarts: int) -> int:
        """The rows that were replaced, but for those of so many restarts."""
        return sum(sorted(self.replaced)[: max(0, len(self.replaced) - restarts)])


def alike(old: float | None, new: float) -> bool:
    """Whether nothing is lost if a number replaces what was there."""
    return old is None or old == new or (math.isnan(old) and math.isnan(new))


def of_the_last_start(
    rows: Sequence[Counted],
    restarts: int,
    count: str,
    counts: Collection[str],
    tell: Tell,
) -> list[Counted]:
    """Rows in the order in which they were written, without those that were abandoned: a program
    that starts again goes back to what it has saved, and what it wrote of later counts before is
    of other weights.

    Args:
        restarts: how often it has started again.
        count: the name of the count.
        counts: columns that only count.
        tell: called if the last start counts from the first count again.

    Raises:
        Refusal: the count goes back more often, and numbers would be lost; or as
            `refuse_other_units`.
    """
    refuse_other_units(rows, count, counts)
    if rises_with_falls(rows, count, counts):
        restarts = 0
    anew, found = Anew(), dict[float, dict[str, float | None]]()
    # A row without the count only adds to one.
    measured = [
        (at, {name: row[name] for name in row if name not in (count, *counts)} if own else {})
        for at, row in rows
        for own in [row.get(count) == at]
    ]
    for at, row in measured:
        old = found.setdefault(at, {})
        anew.take(at, row, old)
        old |= {name: value for name, value in row.items() if value is not None}
    # Once, it may be a row after the last epoch.
    if anew.lost(restarts) > 1:
        refuse_anew(count)
    if len(anew.replaced) > restarts:
        # Written in another order, such as by several writers.
        return list(rows)
    return without_abandoned(rows, measured, restarts, tell)


def without_abandoned(
    rows: Sequence[Counted], measured: Sequence[Counted], restarts: int, tell: Tell
) -> list[Counted]:
    """The rows of `of_the_last_start`.

    Args:
        measured: the same with what each measures; a row without the count has nothing.
    """
    kept: list[Counted] = []
    newest: dict[str, float] = {}
    times: Counter[str] = Counter()
    starts = 0
    again = (0.0, 0)  # from where the last start counts, and the counts before, if it is the first
    seen: set[tuple[str, float]] = set()
    following, first, fallen = (
        next_counts(measured),
        begun_again(measured, restarts),
        falls(measured),
    )
    often = Counter(name for names in fallen for name in names)
    for (at, row), (_, numbers), after, anew, fall in zip(
        rows, measured, following, first, fallen, strict=True
    ):
        names = given(numbers)
        # A row of its own is none of a restart, which goes on from there: such as a summary, or
        # validation that is counted in other units.
        lower = {name for name in names if at < newest.get(name, at)}
        back = {name for name in lower if after[name] <= newest[name] and (name, at) in seen}
        # A loop that counts since its start has other counts then, such as 35 and 45 after 40 and
        # 50. All of its columns go back, and none does so more often than the program has started.
        if names == fall and all(
            after[name] <= newest[name]
            and often[name] <= restarts
            and among(kept, name, at, after[name])
            for name in names
        ):
            back = names
        if not back and all(times[name] < starts for name in lower):
            back = lower  # another column has told of the restart
        back |= anew
        seen.update((name, at) for name in names)
        times.update(back)
        if any(times[name] > starts for name in back):
            starts += 1
            # Others may be counted in batches of the validation.
            before = {each for each, of_it in kept if back & given(of_it)}
            again = (at, len(before) if at <= min(before, default=-math.inf) else 0)
            kept = [each for each in kept if each[0] <= at]
        elif back:
            # Such a row has no other numbers: columns that are written together go back together.
            kept = [each for each in kept if each[0] <= at or not back & given(each[1])]
        newest |= {name: at for name in names if name in back or at >= newest.get(name, at)}
        kept.append((at, row))
    # One that has only continued goes back nowhere.
    if again[1] and starts == restarts:
        tell(*again)
    return kept


def begun_again(rows: Sequence[Counted], restarts: int) -> list[set[str]]:
    """For each row the columns in which a program that had written one count only has begun with
    that again: they have another number than in the row before. A program that writes several rows
    of each count does that later too.
    """
    newest: dict[str, Counted] = {}
    found: list[set[str]] = []
    for at, row in rows:
        before = {name: newest[name] for name in given(row) & newest.keys()}
        found.append({name for name, (count, old) in before.items()
                      if count == at and not alike(old[name], row[name] or 0)})  # fmt: skip
        newest |= dict.fromkeys(given(row), (at, row))
    last = max((number for number, names in enumerate(found) if names), default=-1)
    often = max(Counter(name for names in found for name in names).values(), default=0)
    alone = len({at for at, _ in rows[: last + 1]}) == 1
    return found if alone and often <= restarts else [set() for _ in rows]


def rises_with_falls(rows: Sequence[Counted], count: str, counts: Collection[str]) -> bool:
    """Whether the epoch of a row is a later one although its count is lower: not because of a
    restart, which goes back in both.

    Raises:
        Refusal: the count is the same in several epochs, and numbers would be lost.
    """
    own = [each for each in rows if each[1].get(count) == each[0] and known_epoch(each[1])]
    if sum(is_still(*each, (count, *counts)) for each in pairwise(own)) > 1:
        refuse_anew(count)
    return any(
        one > other and (was["epoch"] or 0) < (now["epoch"] or 0)
        for (one, was), (other, now) in pairwise(own)
    )


def in_epochs(rows: Sequence[Mapping[str, float]], count: str) -> set[int]:
    """The numbers of the rows that count epochs in the column in which the others count steps, such
    as mmengine's of validation: they name no epoch, and each comes after rows of later steps of the
    epoch that it counts. If some come before any epoch, which have columns of their own, it is
    named after them.
    """
    newest, epoch = -math.inf, math.nan
    lags: set[float] = set()  # of steps behind their epochs
    # How far rows are ahead of the epoch that was named last, and of the next one.
    after: dict[int, float] = {}
    before: dict[int, float] = {}
    waiting: dict[int, float] = {}
    early: set[int] = set()  # before any epoch
    for step, row, places in in_blocks(
        (row.get(count, math.nan), row, at) for at, row in enumerate(rows)
    ):
        if known_epoch(row):
            newest, epoch = step, row["epoch"] or 0
            lags.add(step - epoch)
            before |= {place: at - epoch for place, at in waiting.items()}
            waiting = {}
        elif step < newest:
            waiting |= dict.fromkeys(places, step)
            if math.isnan(epoch):
                early.update(places)
            else:
                after |= dict.fromkeys(places, step - epoch)
        elif math.isnan(epoch):
            newest = step
    before |= {place: at - epoch - 1 for place, at in waiting.items()}
    # Where each has one step, nothing tells whether a row is only late.
    if not any(abs(lag) > 1 for lag in lags):
        return set()
    steps = {name for at, row in enumerate(rows) if at not in before for name in row}
    named_later = early and not any(steps & rows[at].keys() - {count} for at in early)
    # Epochs may begin with 0, and be counted from 1 when they are over.
    return next(
        ({*found} for found in (before if named_later else {}, after)
         if {*found.values()} in ({0}, {1})), set()
    )  # fmt: skip


def refuse_other_units(rows: Sequence[Counted], count: str, counts: Collection[str]) -> None:
    """Refuse rows that stand alone among those of later counts, have a column of their own, and
    would replace numbers of their count: they may be counted in other units, or be late.

    Raises:
        Refusal: naming a column of them, and one that they would replace.
    """
    blocks = in_blocks((at, row, 0) for at, row in rows if row.get(count) == at)
    newest = -math.inf
    # The count of each, how far it lags, its names, and those that it replaces.
    alone: list[tuple[float, float, set[str], set[str]]] = []
    others = {count, *counts}
    known: dict[float, dict[str, float | None]] = {}
    for number, (at, row, _) in enumerate(blocks, 1):
        old = known.setdefault(at, {})
        # Others go on from there, as after a restart.
        if at < newest and (number == len(blocks) or blocks[number][0] > newest):
            replaced = {name for name, value in row.items()
                        if name not in (count, *counts)
                        if value is not None and not alike(old.get(name), value)}  # fmt: skip
            alone.append((at, newest - at, {*row}, replaced))
        else:
            newest = at
            others |= {*row}
        old |= row
    alone = [
        (at, lag, names - others, replaced) for at, lag, names, replaced in alone if names - others
    ]
    # A number of their own may be repeated, after a restart.
    lost = {name for *_, replaced in alone for name in replaced & others}
    # Once, it may be a row after the last epoch. Validation of a step that comes late has the
    # counts of steps, and lags no further each time.
    places, lags = [each[0] for each in alone], [each[1] for each in alone]
    epochs = {*places} <= {*range(2 + len(places))} and places == sorted(places)
    if len(alone) > 1 and lost and epochs and all(one < two for one, two in pairwise(lags)):
        refuse_units(count, min(alone[0][2]), min(lost))


def in_blocks(
    rows: Iterable[tuple[float, Mapping[str, float | None], int]],
) -> list[tuple[float, dict[str, float | None], list[int]]]:
    """Rows that follow each other with the same count as one, as some writers give each number a
    row of its own; those without a count are left out.
    """
    found: list[tuple[float, dict[str, float | None], list[int]]] = []
    for count, row, place in rows:
        if not math.isfinite(count):
            continue
        if not found or found[-1][0] != count:
            found.append((count, {}, []))
        found[-1][1].update((name, row[name]) for name in given(row))
        found[-1][2].append(place)
    return found


def next_counts(rows: Sequence[Counted]) -> list[dict[str, float]]:
    """For each number of each row, the count of the next one in its column."""
    found: list[dict[str, float]] = []
    after: dict[str, float] = {}
    for at, row in reversed(rows):
        found.append({name: after.get(name, math.inf) for name in given(row)})
        after |= dict.fromkeys(given(row), at)
    return found[::-1]


def falls(rows: Sequence[Counted]) -> list[set[str]]:
    """For each row, the columns whose count is lower than in their row before."""
    found: list[set[str]] = []
    last: dict[str, float] = {}
    for at, row in rows:
        found.append({name for name in given(row) if at < last.get(name, at)})
        last |= dict.fromkeys(given(row), at)
    return found


def among(rows: Sequence[Counted], name: str, one: float, other: float) -> bool:
    """Whether two counts that follow each other are among those of a column, one of which is
    between them: others may begin below, such as of a test, or fill a gap, as rows that are late.
    """
    counts = {count for count, row in rows if row.get(name) is not None}
    return any(count < one for count in counts) and any(one < count < other for count in counts)


def known_epoch(row: Mapping[str, float | None]) -> bool:
    epoch = row.get("epoch")
    return epoch is not None and not math.isnan(epoch)


def is_still(one: Counted, other: Counted, counts: Collection[str]) -> bool:
    """Whether a row has the count of the one before in another epoch, and replaces a number."""
    replaced = (
        value is not None and not alike(one[1].get(name), value)
        for name, value in other[1].items()
        if name not in counts
    )
    return one[0] == other[0] and one[1]["epoch"] != other[1]["epoch"] and any(replaced)


def given(row: Mapping[str, float | None]) -> set[str]:
    """The names of its numbers."""
    return {name for name, value in row.items() if value is not None}


def refuse_units(count: str, name: str, lost: str) -> None:
    raise Refusal(
        f"metrics: rows with {shown(name)} go back in {count}, and would replace or lose "
        f"{shown(lost)}; count as in the others, or leave {count} out there; if the training is "
        "over, correct its file in work/"
    )


def refuse_anew(count: str) -> None:
    raise Refusal(
        f"metrics: {count} begins anew in each epoch, and rows are told apart by it; let it go on, "
        "or leave it out; if the training is over, correct its file in work/"
    )
