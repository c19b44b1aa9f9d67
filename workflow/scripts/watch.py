"""Show how far the runs of an experiment are, until all have ended or Ctrl-C.

It only reads files, on any machine that sees the results: python workflow/scripts/watch.py
results/quickstart. Without a terminal that can redraw, it prints a line when a run changes.
"""

import argparse
import sys
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path

from rich import box
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

# Python looks there by itself, unless a site has set PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from manynodes.base.errors import one_line, told_in_one_line
from manynodes.reporting.progress import Progress, interval, looks, read_record
from manynodes.reporting.scaling import counted

COLOURS = {
    "running": "cyan", "done": "green", "trained": "green", "failed": "red",
    "interrupted": "yellow", "staging": "cyan", "waiting": "dim",
}  # fmt: skip


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
        experiment = read_record(args.results)
        console = Console()
        found = looks(experiment, args.results, None if args.once else args.every)
        # On a dumb terminal, Live shows nothing.
        if args.once or not console.is_terminal or console.is_dumb_terminal:
            print_changes(found)
            return
        with Live(console=console, refresh_per_second=4) as live:
            for each in found:
                live.update(table(experiment.name, each))


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


def table(name: str, found: list[Progress]) -> Table:
    """The runs as a table for a terminal."""
    counts = {state: sum(each.state == state for each in found) for state in COLOURS}
    said = ", ".join(f"{number} {state}" for state, number in counts.items() if number)
    view = Table(title=f"{escape(name)}: {said}", title_justify="left", box=box.SIMPLE)
    for column in (
        "run",
        "state",
        "host",
        "epoch",
        "last epoch, or result",
        "left",
        "saved",
        "interruptions",
    ):
        view.add_column(column, overflow="fold")
    for each in found:
        view.add_row(
            escape(each.run),
            f"[{COLOURS[each.state]}]{each.state}[/]",
            escape(one_line(each.where)),
            progress(each),
            escape(one_line(each.reason or each.numbers, 200)),
            duration(each.left),
            f"{duration(each.saved)} ago" if each.saved is not None else "",
            str(each.interruptions or ""),
        )
    return view


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
