"""One measurement: a ratio or a duration from this run, what it is measured against, and what it
has to reach.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Measured:
    """A row of the table.

    Attributes:
        what: is measured.
        against: the peer, or the limit.
        value: of `what`, as a ratio to the peer where there is one, else in seconds or another unit
            that `against` names.
        least, most: what it has to reach, at least or at most; None where the row is only told.
        details: the numbers it comes from, JSON types, units in their names.
    """

    what: str
    against: str
    value: float
    least: float | None = None
    most: float | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def reached(self) -> bool:
        return (self.least is None or self.value >= self.least) and (
            self.most is None or self.value <= self.most
        )
