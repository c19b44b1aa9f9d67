"""Show how far the runs of an experiment are, until all have ended or Ctrl-C.

It only reads files, on any machine that sees the results: python workflow/scripts/watch.py
results/quickstart. Without a terminal that can redraw, it prints a line when a run changes.
"""

import argparse
import signal
import sys
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import suppress
from itertools import accumulate, chain
from pathlib import Path

if __name__ == "__main__":
    # Ctrl-C ends it without a traceback while it imports the following, too.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

# Python looks there by itself, unless a site has set PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from manynodes.base.errors import one_line, told_in_one_line
from manynodes.reporting.progress import Progress, interval, looks, read_record
from manynodes.reporting.results import counted

# By what needs a look most.
COLOURS = {
    "failed": "red", "interrupted": "yellow", "running": "cyan", "staging": "cyan",
    "waiting": "dim", "trained": "green", "done": "green",
}  # fmt: skip
NUMBERS = "last epoch, or result"
LEAST = 16  # characters of them, for one with its name
# Columns that a narrow terminal has as far as there is room, by what is asked for most.
OPTIONAL = (NUMBERS, "left", "interruptions", "host", "saved")
BETWEEN = 3  # blanks between two columns


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="folder of the experiment's results")
    parser.add_argument("--once", action="store_true", help="show the present state and end")
    parser.add_argument(
        "--every", type=interval, default=2, metavar="SECONDS", help="between two looks"
    )
    args = parser.parse_args()
    with told_in_one_line("watch"), suppress(KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        experiment = read_record(args.results)
        console = Console()
        found = looks(experiment, args.results, None if args.once else args.every)
        # On a dumb terminal, Live shows nothing.
        if args.once or not console.is_terminal or console.is_dumb_terminal:
            print_changes(found)
            return
        # Drawn again only when there is something new.
        with Live(console=console, auto_refresh=False) as live:
            for each in found:
                live.update(view(experiment.name, each, console), refresh=True)


def print_changes(found: Iterable[list[Progress]]) -> None:
    """A line per run whenever it changes."""
    shown: dict[str, str] = {}
    for each in chain.from_iterable(found):
        # What changes with the clock alone is no news.
        key = f"{each.state} {each.epoch} {each.reason}"
        if shown.get(each.run) != key:
            shown[each.run] = key
            print(in_one_line(each), flush=True)


def in_one_line(each: Progress) -> str:
    parts = [f"{each.run}: {each.state}" + (f" on {each.where}" if each.where else "")]
    parts += [f"{each.counts} {progress(each)}"] if each.epoch is not None else []
    parts += [each.numbers] if each.numbers else []
    parts += [counted(each.interruptions, "interruption")] if each.interruptions else []
    parts += [f"{duration(each.left)} left"] if each.left is not None else []
    parts += [f"saved {duration(each.saved)} ago"] if each.saved is not None else []
    return one_line(", ".join(parts) + (f": {each.reason}" if each.reason else ""), 400)


def view(name: str, found: list[Progress], console: Console) -> Group:
    """The runs for a terminal: a table, and below it the reasons of those that have one. If there
    is no room for all that is known, each run is one line, and those that need a look come first.
    """
    urgent = sorted(found, key=lambda each: [*COLOURS].index(each.state))
    reasons = [
        Text.assemble((each.run, COLOURS[each.state]), f": {one_line(each.reason)}")
        for each in urgent
        if each.reason
    ]
    heights = accumulate(lines(reason, console) for reason in reasons)
    told = reasons[: max(1, bisect_right([*heights], console.height // 3))]
    if len(told) < len(reasons):
        told.append(Text(f"and {len(reasons) - len(told)} more reasons, which --once shows"))

    title = f"{escape(name)}: {summary(found)}"
    # The last line is the cursor's. `Live` cuts off what is too high, at its end.
    for edge in (True, False) if len(found) < console.height else ():
        whole = Group(table(title, found, edge=edge), *told)
        if lines(whole, console) < console.height:
            return whole

    def first(rows: int) -> Group:
        listed = found if rows == len(found) else urgent[:rows]
        more = [Text(f"and {summary(urgent[rows:])}")] if 0 < rows < len(found) else []
        return Group(table(title, listed, console.width) if listed else title, *more, *told)

    fits = bisect_right(
        range(min(len(found), console.height) + 1),
        console.height - 1,
        key=lambda rows: lines(first(rows), console),
    )
    return first(max(0, fits - 1))


def lines(shown: RenderableType, console: Console) -> int:
    """How many lines it takes."""
    return len(console.render_lines(shown, pad=False))


def summary(found: list[Progress]) -> str:
    """How many runs are in each state."""
    counts = {state: sum(each.state == state for each in found) for state in COLOURS}
    return ", ".join(f"{number} {state}" for state, number in counts.items() if number)


def table(title: str, found: list[Progress], width: int | None = None, edge: bool = True) -> Table:
    """The runs with what is known of them; columns without anything are left out.

    Args:
        width: of the terminal, in characters, if each run is to be one line, with as many columns
            as its name leaves room for.
        edge: an empty line above and below.
    """
    columns = {
        "run": [Text(each.run) for each in found],
        "state": [Text(each.state, COLOURS[each.state]) for each in found],
        "host": [Text(one_line(each.where)) for each in found],
        "epoch": [Text(progress(each)) for each in found],
        NUMBERS: [Text(one_line(each.numbers)) for each in found],
        "left": [Text(duration(each.left)) for each in found],
        "saved": [
            Text(f"{duration(each.saved)} ago" if each.saved is not None else "") for each in found
        ],
        "interruptions": [Text(str(each.interruptions or "")) for each in found],
    }
    wide = {
        column: max(len(column), *(cell.cell_len for cell in cells))
        for column, cells in columns.items()
        if any(cells)
    }
    room = 0
    if width is not None:
        room = width - 1 - sum(wide[each] + BETWEEN for each in wide if each not in OPTIONAL)
        for column in [each for each in OPTIONAL if each in wide]:
            least = min(wide[column], LEAST) if column == NUMBERS else wide[column]
            if least + BETWEEN > room:
                del wide[column]
            else:
                room -= least + BETWEEN
    shown = Table(title=title, title_justify="left", box=box.SIMPLE, show_edge=edge)
    for column in wide:
        if width is None or column == "run":
            shown.add_column(column, overflow="fold")
        else:
            most = min(wide[column], LEAST) + room if column == NUMBERS else None
            shown.add_column(column, no_wrap=True, overflow="ellipsis", max_width=most)
    for row in zip(*(columns[column] for column in wide), strict=True):
        shown.add_row(*row)
    return shown


def progress(each: Progress) -> str:
    if each.epoch is None:
        return ""
    done = f"{each.epoch}/{each.epochs}" if each.epochs else f"{each.epoch}"
    return done if not each.step else f"{done} + {each.step}/{each.steps}"


def duration(seconds: float | None) -> str:
    """Seconds in words, such as `1 h 05 min`."""
    if seconds is None:
        return ""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


if __name__ == "__main__":
    main()
