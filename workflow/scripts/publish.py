"""Check and publish what a user's program has left, when all of its processes have ended with 0.

It writes to --output:

    outputs/        the declared outputs
    environment.json  the program's Python with all of its packages, and its repository
    metrics.csv     the program's rows, each count once
    result.json     the program's numbers
    run.json        provenance
    evaluated.json  with --evaluation: of which run.json and program evaluation.json is
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from manynodes.base import atomic
from manynodes.base.errors import LONGEST_REPORT, Refusal, one_line, told_in_one_line
from manynodes.base.failure import recorded
from manynodes.base.provenance import git_state, now
from manynodes.base.reading import read_json
from manynodes.base.showing import show
from manynodes.checkpointing import incidents, replaced
from manynodes.experiment.config import parse_option
from manynodes.programs.folders import (
    ENVIRONMENT,
    REPOSITORY,
    Folders,
    read_request,
    trace,
)
from manynodes.programs.outputs import publish
from manynodes.programs.user_numbers import (
    metrics_of,
    newest_last,
    note_anew,
    read_user_result,
)
from manynodes.reporting.measures import (
    EVALUATED,
    READ_BY,
    parse_result,
    read_result,
    write_result,
)
from manynodes.reporting.metrics import write_metrics
from manynodes.reporting.results import shortened
from manynodes.reporting.sums import of_files

# Packages whose versions are in run.json too, imported or not.
USUAL = ("torch", "torchvision", "numpy")
# Seconds by which clocks may differ.
CLOCKS = 60
# Packages that are imported under another name.
NAMES = {"sklearn": "scikit-learn", "PIL": "pillow", "cv2": "opencv-python", "yaml": "pyyaml"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--outputs", nargs="*", default=[], metavar="PATH", help="what must be there")
    add("--output", type=Path, required=True, metavar="FOLDER", help="of this run")
    add("--reads", default="{}", metavar="JSON", help="metrics and result, as in config/README.md")
    add("--evaluation", metavar="SHA256",
        help="of a program that evaluates: only its numbers, to evaluation.json")  # fmt: skip
    args = parser.parse_args()
    folders = Folders(args.output)
    stage = "train" if args.evaluation is None else "evaluate"
    with told_in_one_line("publish"), recorded(args.output, stage):
        if args.evaluation is not None:
            refuse_changed_program(folders, args.evaluation)
            result = read_result(folders.evaluation / "result.json")
            if not result.numbers:
                tell("the evaluation ended with status 0 and wrote no number to result.json")
            write_result(folders.run / "evaluation.json", result)
            evaluated = {
                "sources_sha256": args.evaluation,
                "files": of_files(folders.run, ["evaluation.json", "run.json"]),
            }
            atomic.write_json(folders.run / EVALUATED, evaluated)
            return
        reads = parse_option("--reads", args.reads)
        metrics = metrics_of(
            folders.run, reads.get("metrics"), lambda *again: note_anew(folders, *again)
        )
        result = (
            parse_result(read_user_result(folders.work, given), folders.work / given)
            if (given := reads.get("result"))
            else read_result(folders.work / "result.json")
        )
        (folders.run / "evaluation.json").unlink(missing_ok=True)
        publish(folders, args.outputs)
        tell_old(folders, args.outputs)
        tell_anew(folders)
        if not (metrics or result.numbers or trace(folders.work, [folders.saved]).files):
            tell_empty(folders)
        tell_unmatched(folders, reads.get("snapshots", ()))
        environment = read_environment(folders)
        atomic.write_json(folders.run / ENVIRONMENT, environment)
        write_metrics(folders.run / "metrics.csv", metrics)
        write_result(folders.run / "result.json", result)
        found = about(folders, args.outputs, environment)
        read_by = {key: reads.get(key) for key in READ_BY}
        atomic.write_json(folders.run / "run.json", found | {"reads": read_by})
        replaced.forget(folders.run)


def refuse_changed_program(folders: Folders, sha256: str) -> None:
    """Refuse the numbers of a program that was edited since the command began, as far as `launch`
    could see.

    Raises:
        Refusal: it was.
    """
    with suppress(FileNotFoundError):
        if {sha256} != {*folders.evaluated_by.read_text(encoding="utf-8").splitlines()}:
            raise Refusal(
                "the program that evaluates has changed since this command began; run the same "
                "command again"
            )


def tell_empty(folders: Folders) -> None:
    """Warn of a program that left nothing, such as one that was started with `--help`."""
    text = (
        "the program ended with status 0 and left nothing: no metrics, result, output or state; "
        "check its arguments, and what it says in logs/"
    )
    tell(text)
    if not any(each.kind == incidents.EMPTY for each in incidents.read(folders.state)):
        incidents.add(folders.state, incidents.EMPTY, text)


def tell_unmatched(folders: Folders, patterns: Sequence[str]) -> None:
    """Warn of snapshots that are not there: a wrong pattern shows only when it is too late."""
    if unmatched := [each for each in patterns if not newest_last(folders.work, each)]:
        text = (
            f"snapshots: nothing in {folders.work} matches {shortened(unmatched)}: after an "
            "interruption the program would not continue from there (a program may remove them at "
            "its end)"
        )
        tell(one_line(text, LONGEST_REPORT))


def tell_old(folders: Folders, outputs: Sequence[str]) -> None:
    """Warn of outputs that the program has not written since it was last started: one that starts
    over without a state may write elsewhere, and its numbers are of other weights.
    """
    *before, last = read_request(folders)["attempts"]
    begun = datetime.fromisoformat(last["started"]).timestamp()
    traces = {path: trace((folders.work / path).resolve()) for path in outputs if before}
    # By the clock of the file server.
    old = [path for path, found in traces.items()
           if found.files and found.newest < (begun - CLOCKS) * 1e9]  # fmt: skip
    if old:
        text = (
            f"outputs: {shortened(old)} in {folders.work} was written before the program last "
            "started; its numbers may be of another attempt"
        )
        tell(one_line(text, LONGEST_REPORT))


def tell_anew(folders: Folders) -> None:
    """Warn of rows that are left out, see `note_anew`."""
    for each in incidents.read(folders.state):
        if each.kind == incidents.ANEW:
            tell(one_line(each.text, LONGEST_REPORT))


def tell(warning: str) -> None:
    show(sys.stderr, f"publish: warning: {warning}\n")


def read_environment(folders: Folders) -> dict[str, Any]:
    """What rank 0 has found where the program ran, and `launch` in the program's repository."""
    found: dict[str, Any] = {}
    for name in (ENVIRONMENT, REPOSITORY):
        with suppress(FileNotFoundError):
            found |= read_json(folders.state / name, "environment", "delete it")
    return found


def versions(environment: dict[str, Any]) -> dict[str, str]:
    """Of the program's Python and of the packages that it imports."""
    if not environment.get("python"):
        return {}
    imports = environment.get("imports", [])
    names = [NAMES.get(name, name) for name in (*imports, *USUAL)]
    wanted = {name.replace("_", "-").lower() for name in names}
    return {"python": environment["python"]} | {
        name: version
        for name, version in environment.get("distributions", {}).items()
        if name.replace("_", "-").lower() in wanted
    }


def about(folders: Folders, outputs: list[str], environment: dict[str, Any]) -> dict[str, Any]:
    """run.json; notes the end of the last attempt."""
    found = read_request(folders)
    request, attempts = found["request"], found["attempts"]
    attempts[-1]["ended"] = now()
    with suppress(FileNotFoundError, ValueError):
        # Of `launch`; publishing may be done again later.
        ended = folders.ended.read_text(encoding="utf-8")
        datetime.fromisoformat(ended)
        attempts[-1]["ended"] = ended
    atomic.write_json(folders.request, found)
    seconds = [
        (
            datetime.fromisoformat(attempt["ended"]) - datetime.fromisoformat(attempt["started"])
        ).total_seconds()
        for attempt in attempts
        if "ended" in attempt
    ]
    # The program's code was read at the start of the attempt.
    git = {key: attempts[-1].get(key) for key in ("commit", "dirty")}
    incidents.note_checkout(folders.state, git["commit"], git_state()["commit"])
    left = (path for path in folders.outputs.rglob("*") if path.is_file())
    names = [str(path.relative_to(folders.run)) for path in sorted(left)]
    return {
        "config": found["run"],
        "git": git,
        **(
            {"repository": {key: of[key] for key in of if key != "diff"}}
            if (of := environment.get("repository"))
            else {}
        ),
        "files": of_files(folders.run, [*names, ENVIRONMENT, "metrics.csv", "result.json"]),
        **{key: request[key] for key in ("sources_sha256", "data_sha256", "files_sha256")},
        "versions": versions(environment),
        "attempts": attempts,
        "incidents": [asdict(each) for each in incidents.read(folders.state)],
        "started": attempts[0]["started"],
        "ended": attempts[-1]["ended"],
        "seconds": sum(max(0.0, each) for each in seconds),
        "directory": request["directory"],
        "outputs": outputs,
    }


if __name__ == "__main__":
    main()
