"""One Snakemake command: what is checked before its first job, and what is said and left behind after its last.

With slurm_plugin.py the only part of the library that knows Snakemake.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ddp import owner, results, slurm
from ddp.config import Experiment
from ddp.datasets import SOURCES
from ddp.errors import LONGEST_REPORT, Refusal, one_line
from ddp.slurm_plugin import Follower, check_version, submission

SCRIPTS = Path(__file__).resolve().parents[1]
# Resources that follow from a run's geometry, with the key of the configuration that they follow from.
GEOMETRY = {"nodes": "nodes", "tasks": "nodes"}
# Processes for each CPU of this machine, beyond which nothing is to be learned: each gets a few percent of a CPU.
MOST_PER_CPU = 8
# Runs that are named one by one at the end.
MOST_SHOWN = 20


class Session:
    """One Snakemake command on one experiment.

    Args:
        workflow: Snakemake's.
    """

    def __init__(self, workflow: Any, experiment: Experiment) -> None:
        self.workflow, self.experiment = workflow, experiment
        self.results = Path("results") / experiment.name
        self.follower = Follower(self.describe, lambda line: tell(f"slurm: {line}"))

    def check_command_line(self) -> None:
        """Name the experiment and what it would replace; for the command itself, not for the Snakemakes inside its jobs.

        Raises:
            Refusal: an option that does not go with this workflow.
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
            for resource, key in GEOMETRY.items():
                value = getattr(given.get(resource), "raw", given.get(resource))
                wrong = [run for run in self.experiment.runs.values() if value is not None and str(value) != str(getattr(run, key))]
                if wrong:
                    raise Refusal(
                        f"--set-resources {rule}:{resource}={value}: the run has {key}: {getattr(wrong[0], key)}; "
                        f"change {key} in the configuration instead"
                    )

    def refuse_software_deployment(self) -> None:
        methods = {method.name for method in self.workflow.deployment_settings.deployment_method}
        if "APPTAINER" in methods:
            raise Refusal("--sdm apptainer: no container is defined here; run Snakemake inside yours instead (docs/environments.md)")
        if "CONDA" in methods and not shutil.which("conda"):
            raise Refusal("--sdm conda: there is no conda on PATH; leave the option out, the environment of `make` is used")

    def refuse_crowd(self) -> None:
        """Refuse more processes than this machine could ever run side by side; on a cluster the scheduler knows its nodes."""
        # So early, and in a dry run, the profiles differ by this alone: a cluster's has jobs, this machine's has cores.
        if self.workflow.resource_settings.nodes:
            return
        cpus = os.cpu_count() or 1
        for run in self.experiment.runs.values():
            if run.world_size > MOST_PER_CPU * cpus:
                raise Refusal(
                    f"config: nproc_per_node: {run.world_size} processes ({run.nodes} x {run.nproc_per_node}) on this machine's {cpus} "
                    f"CPUs; use at most {MOST_PER_CPU * cpus}, or a cluster's profile"
                )

    def refuse_missing_archive(self) -> None:
        """Refuse a path that fetch would not find, before it is fetch's turn."""
        settings = self.experiment.config["dataset"]
        archive = settings["archive"] if settings["source"] in ("auto", "archive") else None
        wanted = {run.dataset for run in self.experiment.runs.values() if "archive" in SOURCES[run.dataset]}
        fetched = all(Path(f"results/data/{dataset}/manifest.json").exists() for dataset in wanted)
        if archive and not fetched and not Path(archive).expanduser().is_file():
            raise Refusal(f"config: dataset.archive: {archive} is not there, or not a file; give the path of the official archive")

    def start(self) -> None:
        """Check what the jobs will need, before the first one starts.

        Raises:
            Refusal: finished results would be replaced, a run is being trained, or Slurm would not accept a job.
        """
        if not self.workflow.is_main_process:
            return
        if self.workflow.group_settings.group_components:
            raise Refusal("--group-components: every run is a job of its own size; leave the option out")
        names = [job.wildcards.run for job in self.jobs("train") if self.workflow.dag.needrun(job)]
        changes = results.replaced(self.experiment, names, self.results)
        if changes and not self.experiment.config["replace"]:
            line = results.replacement_line(self.experiment.name, changes)
            raise Refusal(f"{line}; give another experiment name, or add --config replace=true")
        alive = owner.living([self.results / name / "state" for name in names])
        for folder, record in alive.items():
            raise Refusal(owner.still_there(folder / "owner.json", record))
        executor = self.workflow.executor_plugin.name
        if executor == "slurm":
            self.prepare_slurm()
        elif executor == "local" and (warning := slurm.idle_nodes(os.environ)):
            tell(f"warning: {warning}")

    def prepare_slurm(self) -> None:
        """Check every submission, and follow the jobs.

        Raises:
            Refusal: Slurm's controller does not answer, or would never run a job.
        """
        settings, executor = self.workflow.executor_settings, self.workflow.scheduler._executor
        try:
            check_version(lambda line: tell(f"slurm: {line}"))
            settings.status_command, why = slurm.status_command(settings.status_command)
            tell(f"slurm: {why}")
            self.check_submissions(executor)
        except Refusal as refusal:
            raise Refusal(f"slurm: {refusal}") from None
        # A requeued job appends to its own output, which would otherwise be lost with what it says of the interruption.
        os.environ.setdefault("SBATCH_OPEN_MODE", "append")
        self.follower.attach(executor)

    def check_submissions(self, executor: Any) -> None:
        partitions = slurm.partitions()
        checked: set[tuple[str, ...]] = set()
        dag = self.workflow.dag
        for job in dict.fromkeys(dag.get_job_group(job) or job for job in dag.needrun_jobs()):
            if job.is_local:
                continue
            if job.is_group():
                job.finalize()
            slurm.refuse_foreign_account(str(job.resources.get("slurm_account") or ""))
            options = submission(executor, job)
            if options in checked:
                continue
            checked.add(options)
            if objection := slurm.try_submission(options):
                tell(f"slurm: {objection}")
            partition = partitions.get(option_value(options, "-p"))
            if partition:
                slurm.refuse_too_large(job.resources, partition)

    def end(self) -> None:
        """Say how each run ended, and draw what there is if some runs are missing."""
        if not self.workflow.is_main_process:
            return
        self.forget_states()
        jobs = [job for rule in ("stage", "train", "evaluate") for job in self.jobs(rule)]
        unfinished = {job.wildcards.run for job in jobs if not self.workflow.dag.noneedrun_finished(job)}
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
            tell(f"{self.experiment.name}/{run.run}: not finished: {run.reason}" + (f"; log: {run.log}" if run.log else ""))

    def why_missing(self, name: str) -> results.Missing:
        """Why a run is missing: from its own log, or else in the scheduler's words."""
        found = results.why_missing(name, self.results / name)
        if found.log:
            return found
        for job, reason in self.follower.failures.items():
            if any(part.wildcards.get("run") == name for part in parts(job)):
                return results.Missing(name, reason, self.follower.logs.get(job, ""))
        return found

    def draw_partial(self, missing: list[results.Missing], folder: Path) -> None:
        """Tables, figures and report of the runs that there are; the rules make the whole ones once no run is missing."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        results.write_missing(missing, folder / "missing.csv")
        common = ["--missing", str(folder / "missing.csv"), "--config", self.experiment.science]
        aggregate = [str(SCRIPTS / "aggregate.py"), "--results", str(self.results), "--output", str(folder)]
        plot = [str(SCRIPTS / "plot.py"), "--tables", str(folder), "--output", str(folder)]
        for program in (aggregate, plot):
            if subprocess.run([sys.executable, *program, *common], stdout=subprocess.DEVNULL, check=False).returncode:
                return
        tell(f"partial report of {len(self.experiment.runs) - len(missing)} of {len(self.experiment.runs)} runs: {folder}/report.html")

    def forget_states(self) -> None:
        """Remove what finished trainings could have resumed from, now that Snakemake knows that they are finished.

        Not before: Snakemake runs again what it has not seen finished, because it was killed meanwhile.
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
        return f"{' and '.join(sorted(rules))} of {self.experiment.name}/{last.wildcards.run}, log {last.log[0]}"


def parts(job: Any) -> Iterable[Any]:
    """The jobs of a group, or the job itself."""
    return list(job) if job.is_group() else [job]


def option_value(options: tuple[str, ...], name: str) -> str:
    return options[options.index(name) + 1] if name in options else ""


def tell(line: str) -> None:
    # With what was read from results and logs in it.
    print(one_line(line, LONGEST_REPORT), file=sys.stderr, flush=True)
