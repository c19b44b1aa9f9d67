"""What each process of a run is given."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PATHS = ("output", "data", "files", "packed")


@dataclass(frozen=True)
class Task:
    """What `launch` passes on to the processes that it starts, as one word of their command line.

    Attributes:
        command: words with `{names}`, which starts the program.
        output: folder of the run.
        values: of its parameters and its geometry, by name.
        data, files: folders of the shared data set and of the user's files; None without.
        packed: folder of the packed environment; None unless it is to be staged.
        scratch: node-local folders to stage them in; `$NAME` is expanded on the node.
        directory: where the program starts; None for its results folder.
        environment: of the program, as in the configuration; None for the Python that runs this.
        reads: the keys `metrics` and `snapshots` of the experiment, and `installed`, see
            `command.words_sha256`.
        evaluates: the program evaluates a finished training.
        token: of the launch, see `folders.of_another_launch`.
    """

    command: tuple[str, ...]
    output: Path
    values: Mapping[str, Any]
    data: Path | None = None
    files: Path | None = None
    packed: Path | None = None
    scratch: tuple[str, ...] = ()
    directory: str | None = None
    environment: Mapping[str, Any] | None = None
    reads: Mapping[str, Any] = field(default_factory=dict)
    evaluates: bool = False
    token: str = ""

    def to_json(self) -> str:
        # torchrun takes $$ and $local_rank in the words of a command for its own.
        return json.dumps(asdict(self), default=str).replace("$", "\\u0024")

    @staticmethod
    def from_json(text: str) -> "Task":
        fields = json.loads(text)
        paths = {name: Path(fields[name]) for name in PATHS if fields[name]}
        lists = {name: tuple(fields[name]) for name in ("command", "scratch")}
        return Task(**fields | paths | lists)
