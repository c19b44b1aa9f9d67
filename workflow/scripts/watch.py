"""Show how far the runs of an experiment are, until all have ended or Ctrl-C.

It only reads files, on any machine that sees the results: python workflow/scripts/watch.py
results/quickstart. Without a terminal that can redraw, it prints a line when a run changes.
"""

import argparse
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path

if __name__ == "__main__":
    # Ctrl-C ends it without a traceback while it imports the following, too.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

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
AROUND = 7  # lines around the rows of the table


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
                live.update(view(experiment.name, each, console.height), refresh=True)


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


def view(name: str, found: list[Progress], height: int) -> Group:
    """The runs for a terminal of so many lines: a table, and below it the reasons of those that
    have one. If there is no room for all, those that need a look come first.
    """
    urgent = sorted(found, key=lambda each: [*COLOURS].index(each.state))
    reasons = [
        f"[{COLOURS[each.state]}]{escape(each.run)}[/]: {escape(one_line(each.reason))}"
        for each in urgent
        if each.reason
    ]
    # On a narrow terminal, each takes two lines or three.
    told = reasons[: max(1, height // 6)]
    room = max(1, height - AROUND - 2 * len(told))
    listed = found if len(found) <= room else urgent[:room]
    more = [f"and {summary(urgent[room:])}"] if len(listed) < len(found) else []
    if len(told) < len(reasons):
        told.append(f"and {len(reasons) - len(told)} more reasons, which --once shows")
    return Group(table(f"{escape(name)}: {summary(found)}", listed), *more, *told)


def summary(found: list[Progress]) -> str:
    """How many runs are in each state."""
    counts = {state: sum(each.state == state for each in found) for state in COLOURS}
    return ", ".join(f"{number} {state}" for state, number in counts.items() if number)


def table(title: str, found: list[Progress]) -> Table:
    """The runs with what is known of them; columns without anything are left out."""
    columns = {
        "run": [escape(each.run) for each in found],
        "state": [f"[{COLOURS[each.state]}]{each.state}[/]" for each in found],
        "host": [escape(one_line(each.where)) for each in found],
        "epoch": [progress(each) for each in found],
        "last epoch, or result": [escape(one_line(each.numbers, 200)) for each in found],
        "left": [duration(each.left) for each in found],
        "saved": [
            f"{duration(each.saved)} ago" if each.saved is not None else "" for each in found
        ],
        "interruptions": [str(each.interruptions or "") for each in found],
    }
    shown = Table(title=title, title_justify="left", box=box.SIMPLE)
    told = {column: cells for column, cells in columns.items() if any(cells)}
    for column in told:
        shown.add_column(column, overflow="fold")
    for row in zip(*told.values(), strict=True):
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
