"""Progress bars in what a program prints."""

import re

# tqdm's progress bar, also one without a known end, in front of a line that was printed meanwhile.
BAR = re.compile(
    r"^(?:[^|]*\d%\|[^|]*\| \S+ \[|(?:[^|]*: )?\d[\d.]*[A-Za-z]\w* \[\d+:[\d:]+, )"
    r"[^\[\]]*(?:\[[^\]]*\][^\[\]]*)*\](?=\s*\S)"
)


def parts_of(text: str) -> tuple[str, ...]:
    """A line, apart from a progress bar in front of it that has not ended its own."""
    bar = BAR.match(text)
    return (text[: bar.end()], text[bar.end() :]) if bar else (text,)
