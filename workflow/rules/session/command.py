"""One Snakemake command on one experiment, from its first check to its last line."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from snakemake.utils import available_cpu_count

from manynodes.base import atomic, failure
from manynodes.base.cpus import usable_cpus
from manynodes.base.errors import Refusal, error_line
from manynodes.base.provenance import why_no_commit
from manynodes.checkpointing import owner, replaced
from manynodes.data.files import read_files
from manynodes.data.unpacking import refuse_foreign
from manynodes.experiment import command
from manynodes.experiment.config import Experiment
from manynodes.experiment.keys import GEOMETRY
from manynodes.experiment.missing import refuse_missing
from manynodes.programs.folders import Folders
from manynodes.reporting import measures, progress, results
from manynodes.schedulers import registry
from manynodes.schedulers.base import Watch, parts
from patches import force, import_less_in_jobs
from session import configuration, refusals, tell
from session.finished import FinishedRuns, is_state_of, is_whole
from session.inputs import Inputs
from session.queue import Queue
from session.refusals import NO_JOBS

# Runs that are listed one by one at the end.
MOST_SHOWN = 20
# CPUs from which on `--cores unlimited` is meant.
UNLIMITED = 1_000_000
# Of Snakemake, while a command runs.
LOCKS = Path(".snakemake/locks")


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
        self.inputs = Inputs(experiment, self.results)
        self.finished = FinishedRuns(experiment, self.results, self.inputs)
        self.queue = Queue(workflow, experiment, self.results)
        self.set_aside: list[str] = []
        # As Snakemake has just parsed them.
        self.contents = {path: path.read_bytes() for path in map(Path, workflow.configfiles)}

    def check_command_line(self) -> None:
        """Refuse incompatible options, and print the experiment and what it would replace.

        Only once: the Snakemake inside a job does nothing here.

        Raises:
            Refusal: an option is incompatible with this workflow.
        """
        if not self.workflow.is_main_process:
            return
        # Before Snakemake makes its own there.
        refusals.refuse_read_only_place(LOCKS, self.workflow.output_settings.dryrun)
        self.use_usable_cpus()
        refusals.refuse_files_for_folders(self.results)
        # Another command may still have to begin the training that replaces them. One that was
        # killed leaves its lock too, for `--unlock`.
        if not any(LOCKS.glob("*.lock")):
            self.finished.put_back(self.experiment.runs)
        refusals.refuse_options(self.workflow, self.experiment)
        refuse_missing(self.experiment, self.results)
        if self.experiment.built_in:
            self.inputs.refuse_unfit_weights()
        else:
            # Looks at every file.
            _ = self.inputs.files_fingerprint
        if user_data := self.experiment.user_data:
            known = self.inputs.facts_of(user_data.name) | self.inputs.groups_of(user_data.name)
            self.experiment.check({user_data.name: known})
        tell(self.experiment.summary)
        self.tell_unseen_parameters()
        self.tell_unhashed()
        self.finished.tell_other_packages()
        if reason := why_no_commit():
            tell(f"warning: run.json will not say what this checkout has changed: {reason}")
        self.finished.tell_other_program()
        self.finished.tell_other_reads()
        if changes := self.finished.replaced(list(self.experiment.runs)):
            tell(results.replacement_line(self.experiment.name, changes))
            force(lambda: self.to_replace(list(changes)))

    def to_replace(self, names: list[str]) -> Iterator[str]:
        """The run.json of changed runs that are to be trained again, also where Snakemake sees no
        change: after an added output, or once a training has failed that was to replace them.
        """
        if self.workflow.touch or not self.experiment.config["replace"]:
            return
        # Otherwise they would be trained on the earlier ones, where Snakemake sees no change.
        yield from map(str, self.inputs.changed())
        for name in self.finished.replaced(names, code=False):
            about = self.results / name / "run.json"
            # Of one that is damaged, it is not known what it stands for.
            with suppress(OSError, Refusal):
                results.read_about(about, results.form_of(self.experiment.runs[name]))
                yield str(about)

    def tell_unseen_parameters(self) -> None:
        """Warn of parameters that reach no program: their columns in tables would be wrong."""
        experiment = self.experiment
        if experiment.built_in:
            return
        varying = [key for key, values in experiment.axes.items()
                   if len(values) > 1 and key not in (*GEOMETRY, "dataset")]  # fmt: skip
        first = next(iter(experiment.runs.values()))
        own = [key for key in first.parameters if key not in experiment.keys.of_run]
        programs = [words for words in (first.command, experiment.evaluation) if words]
        names = dict.fromkeys([*varying, *own])
        directory, setup = experiment.config["directory"], experiment.environment.setup
        if unseen := command.unseen(programs, names, directory, setup):
            listed = ", ".join(f"{{{name}}}" for name in unseen)
            tell(f"warning: no argument has {listed}, and the program does not read its parameters "
                 "itself (LAUNCH_PARAMETERS), as far as its files show: another value may change "
                 "nothing")  # fmt: skip

    def tell_unhashed(self) -> None:
        """Warn of installed modules that no hash covers, if a command names nothing else."""
        if self.experiment.built_in:
            return
        for program in (self.experiment.installed, self.experiment.installed_evaluation):
            if program and program.alone and not program.sources:
                tell(f"warning: the module {program.module} is {program.place}: a change of it "
                     "trains nothing again, unless files names it")  # fmt: skip

    def use_usable_cpus(self) -> None:
        """Let `--cores all` be the CPUs of this process: Snakemake sees no quota of a container."""
        cpus, settings = usable_cpus(), self.workflow.resource_settings
        unlimited = (settings.cores or 0) > UNLIMITED and not settings.nodes
        if unlimited or settings.cores == available_cpu_count() > cpus:
            if not unlimited:
                tell(f"--cores {cpus}: the quota of this container, on {settings.cores} CPUs")
            settings.cores = self.workflow.global_resources["_cores"] = cpus

    def check_results(self) -> None:
        """Refuse results that are not what they stand for, of runs that Snakemake will not run
        again: it knows times and parameters only, and nothing of what was copied or touched.

        Raises:
            Refusal: a file is damaged, or of another run.
        """
        if not self.workflow.is_main_process:
            return
        if self.workflow.execution_settings.no_hooks:
            raise Refusal(
                "--no-hooks: a hook keeps finished runs from being replaced; leave the option out"
            )
        if self.workflow.group_settings.group_components:
            raise Refusal(
                "--group-components: every run is a job of its own size; leave the option out"
            )
        planned = {(job.rule.name, job.wildcards.get("run")) for job in self.jobs()
                   if self.workflow.dag.needrun(job)}  # fmt: skip
        wanted = {(job.rule.name, job.wildcards.get("run")) for job in self.jobs()}
        trained = sorted(run for rule, run in planned if rule == "train")
        refusals.refuse_few_hosts(self.experiment, trained)
        # One process takes the results of a program that has ended.
        begun = [name for name in trained if not Folders(self.results / name).has_ended]
        refusals.refuse_few_cpus(self.workflow, self.experiment, begun)
        kept = [name for name in self.experiment.runs if ("train", name) in wanted - planned]
        rules = {rule for rule, _ in planned}
        replaces = self.experiment.config["replace"]
        older = self.finished.replaced(kept, code={"train", "aggregate"} <= rules)
        if changes := self.finished.replaced(older, code=False):
            # Snakemake sees no reason to train them; with `replace=true` if they are damaged.
            remedy = "put that back, or delete its run.json to train again"
            if replaces:
                remedy += " (all of them: --forcerun train)"
            self.finished.refuse_replacement(changes, remedy)
        # Runs of other code would not be compared: that is told before others are trained.
        if older:
            name, change = next(iter(older.items()))
            also = f"{'--forcerun train' if replaces else '--config replace=true'} to train all"
            raise Refusal(
                f"{self.experiment.name}: {trained[0]} would be of other code than {name} "
                f"({change}); give another experiment name, or add {also}"
            )
        exact = self.experiment.config["resume"] == "exact" and not self.workflow.touch
        if self.experiment.built_in and exact:
            for name in trained:
                self.finished.refuse_other_state(name)
        for name in kept:
            if ("evaluate", name) in wanted - planned or not self.experiment.has_evaluation:
                with suppress(FileNotFoundError):
                    measures.told(self.experiment, self.results / name)
                    self.finished.refuse_other_evaluation(name)
        if any(rule == "aggregate" for rule, _ in wanted - planned):
            self.finished.refuse_other_report()
        if self.workflow.output_settings.dryrun and not self.workflow.touch:
            self.tell_repetition()
        if any(rule == "aggregate" for rule, _ in wanted) and not planned:
            # Nothing will begin, which would write it; another command may have.
            self.note_experiment()

    def note_experiment(self) -> None:
        """Write what `aggregate`, `watch` and others read of the experiment."""
        if self.workflow.executor_plugin.name not in NO_JOBS:
            with suppress(OSError):
                record, text = self.results / progress.RECORD, self.experiment.science + "\n"
                if not record.exists() or record.read_bytes() != text.encode():
                    atomic.write_text(record, text)

    def start(self) -> None:
        """Check what the jobs need, before the first one starts.

        Raises:
            Refusal: finished results would be replaced, another job trains a run, or the scheduler
                would not accept a job.
        """
        if not self.workflow.is_main_process:
            return
        refusals.refuse_read_only_folders(self.results, bool(self.planned("fetch")))
        planned = {job.wildcards.run: job for job in self.planned("train")}
        names = list(planned)
        changes = self.finished.replaced(names)
        if changes and not self.experiment.config["replace"]:
            remedy = "give another experiment name, or add --config replace=true"
            if not self.finished.replaced(names, code=False) and self.has_other_code(planned):
                remedy = "keep them with --rerun-triggers mtime, or add --config replace=true"
            self.finished.refuse_replacement(changes, remedy)
        alive = owner.living([self.results / name / "state" for name in names])
        for folder, record in alive.items():
            raise Refusal(owner.still_there(folder / "owner.json", record))
        executor = self.workflow.executor_plugin.name
        here = executor == registry.SCHEDULERS[registry.LOCAL].executor
        refusals.refuse_unknown_executor(self.experiment, executor)
        evaluated = {job.wildcards.run for job in self.planned("evaluate")}
        self.queue.refuse_left(planned.keys() | evaluated)
        if not self.workflow.touch:
            for name in evaluated - planned.keys():
                # Snakemake removes the earlier evaluation before the job finds that out, and sees
                # no reason to train again.
                self.finished.refuse_loss(name, "delete its run.json to train it again")
        environment = self.experiment.environment
        read = names or (evaluated and not environment.is_ours)
        if environment.stage and read and not self.planned("pack"):
            refuse_foreign(read_files(self.results / "environment"))
        if not self.workflow.touch:
            for name in names:
                self.finished.refuse_links(name)
            # Nothing is refused after this but by the scheduler.
            self.keep_finished(planned)
        if not here and executor not in NO_JOBS:
            refusals.refuse_unquoted(sys.executable)
            configuration.keep(self.workflow, self.experiment, self.contents)
            unneeded = (s.unneeded_in_jobs for s in registry.SCHEDULERS.values())
            import_less_in_jobs(self.workflow.scheduler._executor, filter(None, unneeded))
        hosts = self.experiment.hosts
        if here and not hosts:
            self.tell_of_other_cpus()
        scheduler = registry.on_hosts(hosts) if hosts else registry.of_executor(executor)
        if scheduler:
            self.watch = scheduler.watch(self.workflow, self.queue.tell_state, tell)
        # For `aggregate`, and for `watch`, which shows runs that have not begun too. Nothing is
        # refused after this.
        atomic.write_text(self.results / progress.RECORD, self.experiment.science + "\n")
        # By the clock that stamps the files: a file server's own.
        self.began = (self.results / progress.RECORD).stat().st_mtime

    def tell_of_other_cpus(self) -> None:
        """Warn if this machine alone is used although there are more, or has fewer CPUs."""
        for every in registry.SCHEDULERS.values():
            if warning := every.idle_nodes(os.environ):
                tell(f"warning: {warning}")
        cores, usable = self.workflow.resource_settings.cores, usable_cpus()
        if cores > usable:
            tell(
                f"warning: --cores {cores}, but this process may use {usable} CPUs (affinity, "
                f"or the quota of its container); give --cores {usable}"
            )

    def keep_finished(self, planned: Mapping[str, Any]) -> None:
        """Set aside what the planned trainings will replace: Snakemake removes it before they
        begin.

        Raises:
            Refusal: as `refuse_repetition`.
        """
        for name, job in planned.items():
            self.refuse_repetition(name, job)
            folder = self.results / name
            # Of a part of a run, what there is beside run.json comes back if the training fails.
            replaced.set_aside(folder)
            self.set_aside += [name] * replaced.has_kept(folder)

    def tell_repetition(self) -> None:
        """In a dry run: the first of the planned trainings that would be refused."""
        for job in self.planned("train"):
            name = job.wildcards.run
            try:
                if not self.finished.replaced([name]):
                    self.refuse_repetition(name, job)
            except Refusal as refusal:
                tell(f"without -n this is refused: {refusal}")
                return

    def refuse_repetition(self, name: str, job: Any) -> None:
        """Refuse to train a finished run again of which nothing has changed, or files are gone."""
        folder = self.results / name
        # Its state is there, from which the job gives its files again.
        ended = self.is_unseen(job) and is_state_of(folder, self.experiment)
        if ended or self.experiment.config["replace"]:
            return
        if is_whole(folder):
            self.refuse_unchanged(name, job)
        # Of what an earlier command was about to replace, Snakemake has removed some.
        if not replaced.has_kept(folder):
            self.finished.refuse_loss(name)

    def has_other_code(self, planned: Mapping[str, Any]) -> bool:
        """Whether Snakemake would train them for nothing but code and parameters."""
        reasons = [self.workflow.dag.reason(job) for job in planned.values()]
        return not any(
            each.forced or each.missing_output or not (each.code_changed or each.params_changed)
            for each in reasons
        )

    def refuse_unchanged(self, name: str, job: Any) -> NoReturn:
        """Refuse to train a finished run again of which nothing has changed, and say why Snakemake
        would.
        """
        self.inputs.refuse_damaged(self.experiment.runs[name].dataset)
        reason = self.workflow.dag.reason(job)
        fetched = {str(job.output[0]) for job in self.jobs("fetch", "collect")}
        made = sorted(fetched & {*map(str, reason.updated_input_run)})
        words = (
            "an attempt to replace it was ended" if self.is_unseen(job)
            else "--force, --forcerun or -R" if reason.forced
            else "Snakemake's record has other parameters" if reason.params_changed
            else "its input is made again, see snakemake -n" if reason.updated_input_run
            else "its rule has other code" if reason.code_changed
            else "it has other input files" if reason.input_changed
            else "its environment is another" if reason.software_stack_changed
            else "its input is newer"
        )  # fmt: skip
        if made:
            # Not in the refusal, which would be cut.
            tell(f"to keep it, first make {made[0]} alone: this command --force {made[0]}")
        keep = "make that alone first" if made else "keep it with --touch"
        raise Refusal(
            f"{self.experiment.name}/{name} is finished and nothing of it has changed "
            f"({words}); {keep}, or train it again with --config replace=true"
        )

    def end(self) -> None:
        """Print how each run ended, and make a partial report if runs are missing."""
        if not self.workflow.is_main_process:
            return
        self.queue.end()
        last = "evaluate" if self.jobs("evaluate") else "train"
        measured = last == "evaluate" or not self.experiment.has_evaluation
        names = list(dict.fromkeys(job.wildcards.run for job in self.jobs(last)))
        told: dict[str, measures.Told] = {}
        missing = []
        for name in names:
            try:
                if measured and self.workflow.touch:
                    self.finished.refuse_other_evaluation(name)
                if measured:
                    told[name] = measures.told(self.experiment, self.results / name)
                else:
                    results.read_about_of(self.results / name, self.experiment.runs[name])
                    told[name] = measures.Told(line="trained")
            except FileNotFoundError:
                missing.append(self.why_missing(name))
            except Refusal as refusal:
                also = "; or leave --touch out" * self.workflow.touch
                missing.append(results.Missing(name, f"{refusal}{also}"))
        self.tell_results(told)
        if self.workflow.touch:
            # They are kept; what had ended an attempt to replace them says nothing of them.
            for name in told:
                failure.end(self.results / name)
        # What another command has set aside, whose job has yet to begin, is its own.
        self.finished.put_back(self.set_aside)
        seen = [job.wildcards.run for job in self.jobs("train") if not self.is_unseen(job)]
        self.finished.forget_states(dict.fromkeys(seen))
        partial = self.results / "partial"
        tables = self.jobs("aggregate")
        if not missing and tables and self.finished.has_report():
            shutil.rmtree(partial, ignore_errors=True)
            tell(f"report: {self.results}/report.html; table: {self.results}/summary.csv")
        if missing and tables and len(missing) < len(self.experiment.runs):
            try:
                self.draw_partial(missing, partial)
            except OSError as error:
                tell(f"no partial report: {error_line(error)}")
        for run in missing:
            tell(
                f"{self.experiment.name}/{run.run}: not finished: {run.reason}"
                + (f"; log: {run.log}" if run.log else "")
            )
        if not missing and (found := self.why_without_data("")):
            earlier = "; the results are the earlier ones" if names else ""
            tell(f"{found.reason}{earlier}; log: {found.log}")

    def tell_results(self, told: dict[str, measures.Told]) -> None:
        """Print the numbers of runs that have ended, under the names of the summary."""
        numbers = [each.numbers for each in told.values()]
        for name in self.experiment.runs.keys() - told.keys() if any(numbers) else ():
            # What cannot be read of them is told where it matters.
            with suppress(FileNotFoundError, Refusal):
                numbers.append(measures.told(self.experiment, self.results / name).numbers)
        columns = measures.columns_of(self.experiment.axes, numbers)
        for name, each in list(told.items())[:MOST_SHOWN]:
            said = [each.words(columns) or "finished", *filter(None, [each.remark])]
            tell(f"{self.experiment.name}/{name}: {'; '.join(said)}")

    def is_unseen(self, job: Any) -> bool:
        """Whether Snakemake has not seen the end of a job, and will run it again: it was killed, or
        was told to end and did not wait for the job.
        """
        return bool(self.workflow.async_run(self.workflow.persistence.incomplete(job)))

    def why_missing(self, name: str) -> results.Missing:
        """The reason for a missing run: from its own log, or in the scheduler's words."""
        if self.workflow.touch:
            return results.Missing(name, "some of its files are missing; leave --touch out")
        folder = self.results / name
        found, record = results.why_missing(name, folder), failure.read(folder)
        told = next((
            results.Missing(name, reason, self.watch.logs.get(job, ""))
            for job, reason in self.watch.failures.items()
            if any(part.wildcards.get("run") == name for part in parts(job))
        ), None)  # fmt: skip
        # That of an earlier command says nothing about a job that was refused or never started.
        if found.log and self.is_new(folder / failure.FILE):
            if told and record and record.kind is failure.Kind.PREEMPTED:
                # Such as that its time was up: the program itself knows only that it was stopped.
                return replace(found, reason=f"{found.reason}; {told.reason}")
            return found
        if other := told or self.why_without_data(name):
            return other
        if found.log and record:
            when = f"at {record.time}, perhaps of an earlier command"
            return replace(found, reason=f"{when}: {found.reason}")
        return found

    def why_without_data(self, name: str) -> results.Missing | None:
        """The reason for a missing run, or for anything else, if its data, files or environment are
        missing.
        """
        for job in self.jobs("fetch", "collect", "pack"):
            log, output = Path(job.log[0]), Path(job.output[0])
            if output.exists() or not self.is_new(log):
                continue
            why = failure.read(output.parent)
            # They leave a record, if they are not killed.
            killed = "was interrupted or killed, perhaps for its memory; run it again"
            reason = why.line if why else killed
            return results.Missing(name, f"{job.rule.name}: {reason}", str(log))
        return None

    def is_new(self, path: Path) -> bool:
        """Whether a file is there, and was written since this command began."""
        with suppress(FileNotFoundError):
            return path.stat().st_mtime >= self.began
        return False

    def draw_partial(self, missing: list[results.Missing], folder: Path) -> None:
        """Tables, figures and report of the finished runs, until the rules can make the
        complete ones.
        """
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        results.write_missing(missing, folder / "missing.csv")
        record = folder / progress.RECORD
        atomic.write_text(record, self.experiment.science + "\n")
        common = ["--missing", str(folder / "missing.csv"), "--config", f"@{record}"]
        images = shlex.split(self.inputs.images_option)
        data = ["--data", str(self.results.parent / "data"), *images]
        folders = ["--results", str(self.results), *data, "--output", str(folder)]
        program = [sys.executable, str(self.scripts / "aggregate.py"), *folders, *common]
        if subprocess.run(program, stdout=subprocess.DEVNULL, check=False).returncode:
            return
        tell(
            f"partial report of {len(self.experiment.runs) - len(missing)} of "
            f"{len(self.experiment.runs)} runs: {folder}/report.html"
        )

    def planned(self, rule: str) -> list[Any]:
        """The jobs of a rule that will run."""
        return [job for job in self.jobs(rule) if self.workflow.dag.needrun(job)]

    def jobs(self, *rules: str) -> list[Any]:
        """The jobs of some rules, or all."""
        return [job for job in self.workflow.dag.jobs if not rules or job.rule.name in rules]
