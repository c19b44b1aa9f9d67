"""One measurement: a ratio or a duration, its peer, and its target."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Measured:
    """A row of the table.

    Attributes:
        what: the measured quantity.
        against: the peer, or the unit.
        value: a ratio to the peer if there is one; otherwise seconds or another unit named by
            `against`.
        least, most: the target; None if there is none.
        details: the numbers behind it, as JSON types, with units in their names.
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
