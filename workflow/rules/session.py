"""One Snakemake command: checks before its first job, messages and clean-up after its last.

The adapter between Snakemake and the library, with common.smk.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ddp.base.errors import LONGEST_REPORT, Refusal, one_line
from ddp.checkpointing import owner
from ddp.data.datasets import DATASETS
from ddp.experiment.config import Experiment
from ddp.reporting import results
from ddp.schedulers import registry
from ddp.schedulers.base import Watch

# Resources that --set-resources must not change, with the key to change instead.
FIXED = {"nodes": "nodes", "tasks": "nodes"}
# Processes per CPU of this machine. With more, each gets a few percent of a CPU.
MOST_PER_CPU = 8
# Runs that are listed one by one at the end.
MOST_SHOWN = 20


class Session:
    """One Snakemake command on one experiment.

    Args:
        workflow: Snakemake's.
        scripts: folder of the programs.
    """

    def __init__(self, workflow: Any, experiment: Experiment, scripts: str) -> None:
        self.workflow, self.experiment, self.scripts = workflow, experiment, Path(scripts)
        self.results = Path("results") / experiment.name
        self.watch = Watch()
        self.began = time.time()

    def check_command_line(self) -> None:
        """Refuse incompatible options, and print the experiment and what it would replace.

        Only once: the Snakemake inside a job does nothing here.

        Raises:
            Refusal: an option is incompatible with this workflow.
        """
        if not self.workflow.is_main_process:
            return
        self.refuse_other_geometry()
        self.refuse_software_deployment()
        self.refuse_crowd()
        self.refuse_missing_archive()
        tell(self.experiment.summary)
        if changes := results.replaced(self.experiment, list(self.experiment.runs), self.results):
            tell(results.replacement_line(self.experiment.name, changes))

    def refuse_other_geometry(self) -> None:
        for rule in ("stage", "train"):
            given = self.workflow.resource_settings.overwrite_resources.get(rule, {})
            for resource, key in FIXED.items():
                value = getattr(given.get(resource), "raw", given.get(resource))
                wrong = [
                    run
                    for run in self.experiment.runs.values()
                    if value is not None and str(value) != str(getattr(run, key))
                ]
                if wrong:
                    raise Refusal(
                        f"--set-resources {rule}:{resource}={value}: the run has {key}: "
                        f"{getattr(wrong[0], key)}; "
                        f"change {key} in the configuration instead"
                    )

    def refuse_software_deployment(self) -> None:
        methods = {method.name for method in self.workflow.deployment_settings.deployment_method}
        if "APPTAINER" in methods:
            raise Refusal(
                "--sdm apptainer: no container is defined here; run Snakemake inside yours instead "
                "(docs/environments.md)"
            )
        if "CONDA" in methods and not shutil.which("conda"):
            raise Refusal(
                "--sdm conda: there is no conda on PATH; leave the option out, the environment of "
                "`make` is used"
            )

    def refuse_crowd(self) -> None:
        """Refuse more processes than this machine can run; a cluster's scheduler knows its own
        nodes.
        """
        # Before the first job, and in a dry run, only this distinguishes the profiles: a cluster's
        # gives jobs, this machine's cores.
        if self.workflow.resource_settings.nodes:
            return
        cpus = os.cpu_count() or 1
        for run in self.experiment.runs.values():
            if run.world_size > MOST_PER_CPU * cpus:
                raise Refusal(
                    f"config: nproc_per_node: {run.world_size} processes ({run.nodes} x "
                    f"{run.nproc_per_node}) on this machine's {cpus} "
                    f"CPUs; use at most {MOST_PER_CPU * cpus}, or a cluster's profile"
                )

    def refuse_missing_archive(self) -> None:
        """Refuse a missing archive before fetch would."""
        settings = self.experiment.config["dataset"]
        archive = settings["archive"] if settings["source"] in ("auto", "archive") else None
        wanted = {
            run.dataset
            for run in self.experiment.runs.values()
            if "archive" in DATASETS[run.dataset].sources
        }
        fetched = all(Path(f"results/data/{dataset}/manifest.json").exists() for dataset in wanted)
        if archive and not fetched and not Path(archive).expanduser().is_file():
            raise Refusal(
                f"config: dataset.archive: {archive} is not there, or not a file; give the path of "
                "the official archive"
            )

    def start(self) -> None:
        """Check what the jobs need, before the first one starts.

        Raises:
            Refusal: finished results would be replaced, another job trains a run, or the scheduler
                would not accept a job.
        """
        if not self.workflow.is_main_process:
            return
        if self.workflow.group_settings.group_components:
            raise Refusal(
                "--group-components: every run is a job of its own size; leave the option out"
            )
        names = [job.wildcards.run for job in self.jobs("train") if self.workflow.dag.needrun(job)]
        changes = results.replaced(self.experiment, names, self.results)
        if changes and not self.experiment.config["replace"]:
            line = results.replacement_line(self.experiment.name, changes)
            raise Refusal(f"{line}; give another experiment name, or add --config replace=true")
        alive = owner.living([self.results / name / "state" for name in names])
        for folder, record in alive.items():
            raise Refusal(owner.still_there(folder / "owner.json", record))
        executor = self.workflow.executor_plugin.name
        if executor == registry.SCHEDULERS[registry.LOCAL].executor:
            for every in registry.SCHEDULERS.values():
                if warning := every.idle_nodes(os.environ):
                    tell(f"warning: {warning}")
        if scheduler := registry.of_executor(executor):
            self.watch = scheduler.watch(self.describe, tell)
            self.watch.start(self.workflow)

    def end(self) -> None:
        """Print how each run ended, and make a partial report if runs are missing."""
        if not self.workflow.is_main_process:
            return
        self.forget_states()
        jobs = [job for rule in ("stage", "train", "evaluate") for job in self.jobs(rule)]
        unfinished = {
            job.wildcards.run for job in jobs if not self.workflow.dag.noneedrun_finished(job)
        }
        names = list(dict.fromkeys(job.wildcards.run for job in self.jobs("evaluate")))
        for name in [name for name in names if name not in unfinished][:MOST_SHOWN]:
            tell(f"{self.experiment.name}/{name}: {results.read_accuracy(self.results / name)}")
        missing = [self.why_missing(name) for name in self.experiment.runs if name in unfinished]
        partial = self.results / "partial"
        tables = self.jobs("plot")
        if not missing and tables and all(map(self.workflow.dag.noneedrun_finished, tables)):
            shutil.rmtree(partial, ignore_errors=True)
            tell(f"report: {self.results}/report.html; table: {self.results}/summary.csv")
        if missing and tables and len(missing) < len(self.experiment.runs):
            self.draw_partial(missing, partial)
        for run in missing:
            tell(
                f"{self.experiment.name}/{run.run}: not finished: {run.reason}"
                + (f"; log: {run.log}" if run.log else "")
            )

    def why_missing(self, name: str) -> results.Missing:
        """The reason for a missing run: from its own log, or in the scheduler's words."""
        found = results.why_missing(name, self.results / name)
        # The log of an earlier command says nothing about a job that was refused or never started.
        if found.log and Path(found.log).stat().st_mtime >= self.began:
            return found
        for job, reason in self.watch.failures.items():
            if any(part.wildcards.get("run") == name for part in parts(job)):
                return results.Missing(name, reason, self.watch.logs.get(job, ""))
        return found

    def draw_partial(self, missing: list[results.Missing], folder: Path) -> None:
        """Tables, figures and report of the finished runs, until the rules can make the
        complete ones.
        """
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        results.write_missing(missing, folder / "missing.csv")
        common = ["--missing", str(folder / "missing.csv"), "--config", self.experiment.science]
        aggregate = [
            str(self.scripts / "aggregate.py"),
            "--results",
            str(self.results),
            "--output",
            str(folder),
        ]
        plot = [str(self.scripts / "plot.py"), "--tables", str(folder), "--output", str(folder)]
        for program in (aggregate, plot):
            if subprocess.run(
                [sys.executable, *program, *common], stdout=subprocess.DEVNULL, check=False
            ).returncode:
                return
        tell(
            f"partial report of {len(self.experiment.runs) - len(missing)} of "
            f"{len(self.experiment.runs)} runs: {folder}/report.html"
        )

    def forget_states(self) -> None:
        """Remove the states of finished trainings, now that Snakemake knows that they are
        finished.

        A Snakemake that was killed reruns what it has not seen finished, and then needs the states.
        """
        for job in self.jobs("train"):
            if self.workflow.dag.noneedrun_finished(job):
                shutil.rmtree(f"{job.params.results}/state", ignore_errors=True)

    def jobs(self, rule: str) -> list[Any]:
        return [job for job in self.workflow.dag.jobs if job.rule.name == rule]

    def describe(self, job: Any) -> str:
        """A submitted job in a few words, with the log of its last rule."""
        rules = [part.rule.name for part in parts(job)]
        last = next(part for part in parts(job) if part.rule.name == sorted(rules)[-1])
        run = f"{self.experiment.name}/{last.wildcards.run}"
        return f"{' and '.join(sorted(rules))} of {run}, log {last.log[0]}"


def parts(job: Any) -> Iterable[Any]:
    """The jobs of a group, or the job itself."""
    return list(job) if job.is_group() else [job]


def tell(line: str) -> None:
    # The line may contain text from results and logs.
    print(one_line(line, LONGEST_REPORT), file=sys.stderr, flush=True)
