"""Write TensorBoard's event files of an experiment, up to date until its runs have ended.

    python workflow/scripts/events.py results/quickstart &
    tensorboard --logdir results

Each run gets the folder events/. The program only reads the run's other files, so it costs a
training nothing, and may be started, stopped and started again at any time.
"""

import argparse
import sys
from contextlib import suppress
from pathlib import Path

# Python looks there by itself, unless a site has set PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from manynodes.base.errors import told_in_one_line
from manynodes.reporting.events import RunEvents, points_of
from manynodes.reporting.progress import interval, looks, read_record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="folder of the experiment's results")
    parser.add_argument("--once", action="store_true", help="write the present state and end")
    parser.add_argument(
        "--every", type=interval, default=5, metavar="SECONDS", help="between two looks"
    )
    args = parser.parse_args()
    with told_in_one_line("events"), suppress(KeyboardInterrupt):
        experiment = read_record(args.results)
        runs: dict[str, RunEvents] = {}
        for _ in looks(experiment, args.results, None if args.once else args.every):
            for name, (points, times) in points_of(experiment, args.results).items():
                if points and name not in runs:
                    settings = experiment.axis_values(name)
                    del settings["run"]
                    runs[name] = RunEvents(args.results / name / "events", settings)
                if name in runs:
                    runs[name].update(points, times)
        for run in runs.values():
            run.close()
        print(f"{len(runs)} of {len(experiment.runs)} runs: tensorboard --logdir {args.results}")


if __name__ == "__main__":
    main()
