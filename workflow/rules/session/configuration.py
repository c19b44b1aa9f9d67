"""The configuration that jobs read: a copy of it as it was when they were submitted."""

import ast
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import Any

from manynodes.base import atomic
from manynodes.base.errors import Refusal
from manynodes.experiment.config import Experiment

# Copies of configuration files for jobs that wait, each in a folder of its own.
CONFIGURATIONS = Path(".snakemake/configurations")
# Beside a copy: the folder of the file, SHA-256 of the runs, and what of the experiment is `noted`.
ABOUT = ".about.json"


def keep(workflow: Any, experiment: Experiment, contents: Mapping[Path, bytes]) -> None:
    """Let jobs read the configuration as it is now: while they wait, its file may be edited for
    the next experiment.

    Args:
        contents: of the files, as Snakemake has parsed them.
    """
    kept = []
    for path, content in contents.items():
        about = {"folder": str(folder_of(path)), "runs": sums_of(experiment)}
        text = json.dumps(about | {"noted": experiment.noted})
        name = sha256(content + text.encode()).hexdigest()
        copy = CONFIGURATIONS / name[:16] / path.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(copy.with_name(ABOUT), text)
        atomic.write_text(copy, content.decode())
        kept.append(copy)
    workflow.config_settings.configfiles = kept


def of_site(workflow: Any) -> tuple[list[str], str]:
    """The modules and the lines of bash that a site's profile loads in every environment: two of
    its default-resources, which reach the Snakemake inside a job too. Of its `config`, a `--config`
    on the command line would leave nothing.
    """
    given = workflow.resource_settings.default_resources or {}
    modules, setup = (
        text_of(given[name]) if name in given else "" for name in ("site_modules", "site_setup")
    )
    return modules.split(), setup


def text_of(resource: Any) -> str:
    """The text of a resource that no rule has evaluated: without the quotes that keep it from being
    an expression.
    """
    text = str(getattr(resource, "raw", resource))
    with suppress(ValueError, SyntaxError):
        text = str(ast.literal_eval(text))
    return text


def sums_of(experiment: Experiment) -> dict[str, str]:
    """SHA-256 of the values of each run."""
    runs = experiment.runs.items()
    return {name: sha256(run.to_json().encode()).hexdigest() for name, run in runs}


def as_submitted(workflow: Any, experiment: Experiment) -> Experiment:
    """The experiment, in a job with what was known when that was submitted.

    Raises:
        Refusal: the run is another one now: a file that the configuration names, such as a table of
            runs, has changed.
    """
    for path in map(Path, workflow.configfiles):
        if is_copy(path):
            about = json.loads(path.with_name(ABOUT).read_text())
            known = about["runs"]
            if other := [name for name, value in sums_of(experiment).items()
                         if known.get(name) != value]:  # fmt: skip
                raise Refusal(
                    f"config: {other[0]} has other values than when this job was submitted: a "
                    "table of runs or parameters.yaml has changed; put it back, or run the "
                    "same command again"
                )
            # A job of an earlier version has none.
            experiment = experiment.as_noted(about.get("noted", {}))
    return experiment


def folder_of(configfile: Path) -> Path:
    """The folder that the paths in a configuration file are relative to, also of a copy of it."""
    if is_copy(configfile):
        return Path(json.loads(configfile.with_name(ABOUT).read_text())["folder"])
    return configfile.parent


def is_copy(configfile: Path) -> bool:
    """Whether a configuration file is one of `keep`."""
    within = configfile.parent.parent.parts[-2:] == CONFIGURATIONS.parts
    return within and configfile.with_name(ABOUT).exists()


def words_of_job(workflow: Any, option: str) -> list[str]:
    """The values of an option in the command of a job's Snakemake; none in the user's own.

    Snakemake itself tells a workflow only when it has read all rules.
    """
    if workflow.is_main_process or option not in sys.argv:
        return []
    values = sys.argv[sys.argv.index(option) + 1 :]
    return list(takewhile(lambda word: not word.startswith("-"), values))
