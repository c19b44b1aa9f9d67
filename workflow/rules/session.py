"""One Snakemake command: checks before its first job, messages and clean-up after its last.

The adapter between Snakemake and the library, with common.smk.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import Any

from snakemake.utils import available_cpu_count

from classifier import check
from classifier.models.names import code_of, with_network
from manynodes.base import atomic, failure
from manynodes.base.cpus import usable_cpus
from manynodes.base.errors import LONGEST_REPORT, Refusal, error_line, one_line
from manynodes.base.provenance import code_sha256, why_no_commit
from manynodes.base.reading import MOST, file_sha256, read_bytes, read_json
from manynodes.checkpointing import owner, replaced
from manynodes.checkpointing.replaced import FINISHED
from manynodes.data.files import below, fingerprint, read_files
from manynodes.data.folder import MANIFEST, SOURCE, DataFolder
from manynodes.data.user.declaration import UserData
from manynodes.experiment import command, job_size
from manynodes.experiment.config import Experiment, Run, facts, facts_of
from manynodes.experiment.environments import other_packages, packages_of
from manynodes.experiment.missing import refuse_missing
from manynodes.programs.folders import Folders, read_request
from manynodes.reporting import measures, progress, results, sums
from manynodes.schedulers import registry
from manynodes.schedulers.base import Watch
from patches import import_less_in_jobs

# Resources that --set-resources must not change, with the key to change instead.
FIXED = {"nodes": "nodes", "tasks": "nodes"}
# Processes per CPU of this machine. With more, each gets a few percent of a CPU.
MOST_PER_CPU = 8
# Executors that start no job.
NO_JOBS = ("dryrun", "touch")
# Runs that are listed one by one at the end.
MOST_SHOWN = 20
# What decides whether weights fit a network.
OF_NETWORK = ("initial_weights", "model", "widths", "model_args", "crop_size")
# CPUs from which on `--cores unlimited` is meant.
UNLIMITED = 1_000_000
# Of Snakemake, while a command runs.
LOCKS = Path(".snakemake/locks")
# Copies of configuration files for jobs that wait, each in a folder of its own.
CONFIGURATIONS = Path(".snakemake/configurations")
ABOUT = ".about.json"  # beside a copy: the folder of the file, and SHA-256 of the runs


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
        self.folders: dict[str, DataFolder] = {}
        self.states: dict[str, dict[str, str | bool]] = {}
        self.others: dict[str, dict[str, str | bool]] = {}
        self.set_aside: list[str] = []
        self.hashes: dict[Path, str] = {}
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
        self.use_usable_cpus()
        self.refuse_files_for_folders()
        # Another command may still have to begin the training that replaces them. One that was
        # killed leaves its lock too, for `--unlock`.
        if not any(LOCKS.glob("*.lock")):
            self.put_back(self.experiment.runs)
        self.refuse_other_geometry()
        self.refuse_software_deployment()
        self.refuse_storage()
        self.refuse_wrong_hosts()
        self.refuse_crowd()
        refuse_missing(self.experiment, self.results)
        if self.experiment.built_in:
            self.refuse_unfit_weights()
        else:
            # Looks at every file.
            _ = self.files_fingerprint
        if user_data := self.experiment.user_data:
            known = self.facts_of(user_data.name) | self.groups_of(user_data)
            self.experiment.check({user_data.name: known})
        tell(self.experiment.summary)
        self.tell_unseen_axes()
        self.tell_other_packages()
        if reason := why_no_commit():
            tell(f"warning: run.json will not name the commit: {reason}")
        self.tell_other_program()
        if changes := self.replaced(list(self.experiment.runs)):
            tell(results.replacement_line(self.experiment.name, changes))

    def tell_other_program(self) -> None:
        """Warn of finished runs of another program under the experiment's name."""
        with suppress(OSError, ValueError, Refusal):
            given = json.loads(read_bytes(self.results / progress.RECORD, MOST))
            now = json.loads(self.experiment.science)
            keys = ("program", "command")
            if not isinstance(given, dict) or all(given.get(key) == now.get(key) for key in keys):
                return
            before = progress.read_record(self.results)
            ours, theirs = (
                "the classifier" if each.built_in else each.program_name
                for each in (self.experiment, before)
            )
            others = before.runs.keys() - self.experiment.runs if theirs != ours else ()
            if finished := sum(is_whole(self.results / name) for name in others):
                tell(f"warning: tables and page of {self.results} are of {theirs}, and its "
                     f"{finished:,} finished runs will not be in them any more; give another "
                     "experiment name to keep both")  # fmt: skip

    def tell_unseen_axes(self) -> None:
        """Warn of what varies and does not reach the program: its runs would be repetitions."""
        geometry = ("nodes", "nproc_per_node", "cpus_per_proc", "device", "dataset")
        varying = [key for key, values in self.experiment.axes.items()
                   if len(values) > 1 and key not in geometry]  # fmt: skip
        words = next(iter(self.experiment.runs.values())).command
        if not self.experiment.built_in and (unseen := command.unseen(words, varying)):
            names = ", ".join(f"{{{name}}}" for name in unseen)
            tell(f"warning: no argument has {names}, and the program does not read its parameters "
                 "itself: these runs differ in their names only")  # fmt: skip

    def tell_other_packages(self) -> None:
        """Name the packages of a finished run that its environment has in another version now."""
        if not self.experiment.environment.answers_here:
            return
        for name in self.experiment.runs:
            # `check_results` refuses one that is damaged.
            with suppress(FileNotFoundError, Refusal):
                before = read_json(self.results / name / "environment.json", "environment", "")
                if not before.get("python"):
                    return
                one, other = (
                    {name: (version,) for name, version in packages_of(record).items()}
                    for record in (before, self.experiment.environment.here)
                )
                if changed := other_packages(one, other):
                    tell(f"{self.experiment.name}/{name}: since it was trained, {changed}")
                return

    def use_usable_cpus(self) -> None:
        """Let `--cores all` be the CPUs of this process: Snakemake sees no quota of a container."""
        cpus, settings = usable_cpus(), self.workflow.resource_settings
        if (settings.cores or 0) > UNLIMITED and not settings.nodes:
            settings.cores = self.workflow.global_resources["_cores"] = cpus
        if settings.cores == available_cpu_count() > cpus:
            tell(f"--cores {cpus}: the quota of this container, on {settings.cores} CPUs")
            settings.cores = self.workflow.global_resources["_cores"] = cpus

    def put_back(self, names: Iterable[str]) -> None:
        """Put back results of runs that a command which has ended was about to replace."""
        folders = [self.results / name for name in names]
        folders = [folder for folder in folders if (folder / replaced.FOLDER).is_dir()]
        alive = owner.living([folder / "state" for folder in folders])
        for folder in folders:
            if folder / "state" not in alive and replaced.put_back(folder):
                tell(f"{self.experiment.name}/{folder.name}: its earlier results are back")

    def replaced(self, names: Iterable[str], code: bool = True) -> dict[str, str]:
        """Finished runs that training again would replace, with what has changed.

        Args:
            code: whether the code of the built-in trainer counts.
        """
        found = {name: self.differences(name, code) for name in names}
        return {name: ", ".join(differences) for name, differences in found.items() if differences}

    def differences(self, name: str, code: bool) -> list[str]:
        """What a finished run was made of that is different now; empty for other runs."""
        run, folder = self.experiment.runs[name], self.results / name
        found = results.changed(folder / "run.json", run)
        if found or not (folder / "run.json").exists():
            return found
        about = results.read_about(folder / "run.json", results.form_of(run))
        user_data = self.experiment.user_data
        if user_data and self.stale:
            # Without the record, such as of a folder that was deleted, nothing is known of them.
            if (Path("results/data") / user_data.name / SOURCE).exists():
                found.append(f"other images of {user_data.name}")
        elif run.dataset and (data := self.data_folder(run.dataset)) is not None:
            found += ["other data"] * (about["data_sha256"] != data.sha256)
        if not self.experiment.built_in:
            config = self.experiment.config
            if about["sources_sha256"] != self.experiment.sources_sha256:
                what = " or its environment" * bool(self.experiment.environment.identity)
                found.append(f"{self.experiment.program_name}{what} has changed")
            found += [
                f"another value of {key}"
                for key in ("directory", "outputs")
                if about[key] != config[key]
            ]
            found += ["other files"] * bool(config["files"] and self.files_changed)
            return found
        if (initial := about.get("initial_sha256")) and initial != self.initial_sha256(run):
            found.append("other initial_weights")
        user_network = code_of(run.values["model"])
        if about["network_sha256"] != (user_network or None):
            found.append(f"{run.values['model'].rpartition(':')[0]} has changed")
        now = with_network(self.code, run.values["model"])
        if code and about["code_sha256"] != now:
            commit = (about["git"]["commit"] or "none")[:10]
            found.append(f"its code has changed since commit {commit}")
        return found

    def initial_sha256(self, run: Run) -> str:
        """SHA-256 of the weights from which a run would start; empty if they cannot be read."""
        path = Path(run.values["initial_weights"])
        if path not in self.hashes:
            self.hashes[path] = ""
            with suppress(OSError):
                self.hashes[path] = file_sha256(path)
        return self.hashes[path]

    @cached_property
    def code(self) -> str:
        """SHA-256 of the code of the built-in trainer."""
        return code_sha256("train.py")

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
        planned = {(job.rule.name, job.wildcards.get("run")) for job in self.jobs()
                   if self.workflow.dag.needrun(job)}  # fmt: skip
        wanted = {(job.rule.name, job.wildcards.get("run")) for job in self.jobs()}
        self.refuse_few_hosts(run for rule, run in planned if rule == "train")
        kept = [name for name in self.experiment.runs if ("train", name) in wanted - planned]
        rules = {rule for rule, _ in planned}
        # Runs of other code would not be compared: that is told before others are trained.
        if changes := self.replaced(kept, code={"train", "aggregate"} <= rules):
            # Snakemake sees no reason to train them, with `replace=true` neither.
            remedy = "put that back, or delete its run.json to train again"
            if self.experiment.config["replace"]:
                remedy += " (all of them: --forcerun train)"
            self.refuse_replacement(changes, remedy)
        for name in kept:
            if ("evaluate", name) in wanted - planned or not self.has_evaluation:
                with suppress(FileNotFoundError):
                    measures.line_of(self.experiment, name, self.results)
                    self.refuse_other_evaluation(name)
        if any(rule == "aggregate" for rule, _ in wanted - planned):
            with suppress(FileNotFoundError):
                if self.is_of_other_runs():
                    raise Refusal(
                        f"{self.results}/report.html and its tables are of other runs than these; "
                        "delete it and run the same command again"
                    )
                if file := sums.changed(self.results):
                    page = self.results / "report.html"
                    # Snakemake misses no file that is no target, such as a figure.
                    raise Refusal(
                        f"{page} was made from another {file} ({sums.FILE}); {sums.REMAKE}"
                        if "/" in file and not file.startswith("figures/")
                        else f"{self.results / file} is not as it was made ({sums.FILE}); delete "
                        f"{page} and run the same command again"
                    )

        if any(rule == "aggregate" for rule, _ in wanted) and not planned:
            # Nothing will begin, which would write it; another command may have.
            self.note_experiment()

    def refuse_other_evaluation(self, name: str) -> None:
        """Refuse the numbers of a run from another program of the user's, or other arguments of it,
        than the one that evaluates now.
        """
        if not self.experiment.evaluation:
            return
        path = self.results / name / measures.EVALUATED
        about = read_json(path, "evaluated", "delete evaluation.json")
        # Earlier versions noted the code alone.
        known = self.experiment.evaluation_sha256, self.experiment.evaluation_code
        if about["sources_sha256"] not in known:
            raise Refusal(
                f"{path.with_name('evaluation.json')} is of another evaluate, or of other "
                "arguments of it; delete it and run the same command again"
            )

    def is_of_other_runs(self) -> bool:
        """Whether the tables and the page are of other runs than this experiment's.

        Raises as `sums.read`.
        """
        named = {path.partition("/")[0] for path, _ in sums.read(self.results)
                 if path.count("/") == 1 and path.endswith("/run.json")}  # fmt: skip
        return named != self.experiment.runs.keys()

    def note_experiment(self) -> None:
        """Write what `aggregate`, `watch` and others read of the experiment."""
        if self.workflow.executor_plugin.name not in NO_JOBS:
            with suppress(OSError):
                record, text = self.results / progress.RECORD, self.experiment.science + "\n"
                if not record.exists() or record.read_bytes() != text.encode():
                    atomic.write_text(record, text)

    def refuse_replacement(self, changes: dict[str, str], remedy: str) -> None:
        """Refuse to train finished runs again.

        Raises:
            Refusal: always.
        """
        self.tell_after_a_touch()
        line = results.replacement_line(self.experiment.name, changes)
        raise Refusal(f"{line}; {remedy}")

    def tell_after_a_touch(self) -> None:
        """The command that accepts rewritten files with unchanged bytes."""
        made = []
        if self.experiment.user_data and self.stale:
            made.append(Path("results/data") / self.experiment.user_data.name / MANIFEST)
        if self.experiment.config.get("files") and self.files_changed:
            made.append(self.results / "files" / MANIFEST)
        for path in made:
            tell(f"if these files have the same bytes as before, first make {path} alone")

    @property
    def written_to(self) -> list[Path]:
        """The folders in which it makes files and folders."""
        return [self.results.parent, self.results, self.results.parent / "data"]

    def refuse_files_for_folders(self) -> None:
        for folder in self.written_to:
            if os.path.lexists(folder) and not folder.is_dir():
                raise Refusal(f"{folder} is not a folder; move it away")

    def refuse_read_only_folders(self) -> None:
        for folder in self.written_to:
            if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
                raise Refusal(
                    f"{folder} cannot be written to; change its mode, or run in another folder"
                )

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

    def refuse_wrong_hosts(self) -> None:
        """Refuse hosts that no rule would use, and a profile that needs hosts but has none."""
        wanted = self.workflow.resource_settings.overwrite_resources.get("train", {})
        transport = wanted.get("transport")
        by_ssh = "ssh" in str(getattr(transport, "raw", transport))
        if by_ssh and not self.experiment.hosts:
            registry.on_hosts([]).allocation(1)
        # A cluster's profile gives jobs, this machine's cores.
        if self.experiment.hosts and self.workflow.resource_settings.nodes and not by_ssh:
            raise Refusal(
                "config: hosts: a scheduler's jobs have nodes of their own; leave hosts out, or "
                "use profiles/ssh"
            )
        if self.experiment.hosts:
            # Reads and checks their names.
            registry.on_hosts(self.experiment.hosts)

    def refuse_few_hosts(self, names: Iterable[str]) -> None:
        """Refuse runs that want more hosts than there are."""
        if not self.experiment.hosts:
            return
        hosts = registry.on_hosts(self.experiment.hosts).hosts
        wanted = max((self.experiment.runs[name].nodes for name in names), default=0)
        if len(hosts) < wanted:
            raise Refusal(
                f"config: nodes: a run wants {wanted}, hosts has {len(hosts)}: "
                f"{results.shortened(hosts)}; name more hosts, or lower nodes"
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

    def refuse_storage(self) -> None:
        """Refuse results elsewhere than in files: runs resume from what lies beside them."""
        if provider := self.workflow.storage_settings.default_storage_provider:
            raise Refusal(
                f"--default-storage-provider {provider}: runs resume from files beside their "
                "results; leave the option out, and copy the results when they are finished"
            )

    def refuse_unknown_executor(self, executor: str) -> None:
        """Refuse an executor whose jobs have nodes that `launch` cannot reach: all of them would
        be started on one machine.
        """
        several = any(run.nodes > 1 for run in self.experiment.runs.values())
        known = registry.of_executor(executor) or executor in NO_JOBS or self.experiment.hosts
        if several and not known:
            executors = {s.executor for s in registry.SCHEDULERS.values() if not s.takes_hosts}
            raise Refusal(
                f"--executor {executor}: the nodes of its jobs are not known here; use one of "
                f"{', '.join(sorted(executors))}, or in a job profiles/ssh with a host file (hosts)"
            )

    def refuse_crowd(self) -> None:
        """Refuse more processes than this machine can run; a cluster's scheduler knows its own
        nodes.
        """
        # Before the first job, and in a dry run, only this distinguishes the profiles.
        if self.workflow.resource_settings.nodes:
            return
        cpus = usable_cpus()
        for run in self.experiment.runs.values():
            if run.world_size > MOST_PER_CPU * cpus and not self.experiment.hosts:
                raise Refusal(
                    f"config: nproc_per_node: {run.world_size} processes ({run.nodes} x "
                    f"{run.nproc_per_node}) on this machine's {cpus} "
                    f"CPUs; use at most {MOST_PER_CPU * cpus}, or a cluster's profile"
                )

    def refuse_unfit_weights(self) -> None:
        """Refuse weights to start from that are of another network."""
        # A user's network may take a while to be made.
        different = {
            json.dumps([run.dataset, *(run.values[key] for key in OF_NETWORK)]): run
            for run in self.experiment.runs.values()
            if run.dataset
        }
        for run in different.values():
            try:
                check.refuse_unfit_weights(run, self.facts_of(str(run.dataset)))
            except Refusal as refusal:
                raise Refusal(f"config: {refusal}") from None

    def facts_of(self, dataset: str) -> dict[str, Any]:
        """The images of a data set, as far as they are known, for a program's `check`."""
        user_data = self.experiment.user_data
        if user_data is None:
            return facts_of(dataset)
        if (data := self.data_folder(user_data.name)) is not None:
            images = data.manifest["images"]
            known = (data.image_shape, data.classes, images, data.class_names)
            return facts(user_data.name, *known)
        shape = (*(user_data.image_size or (None, None)), user_data.channels)
        return facts(user_data.name, shape, user_data.classes, {})

    def groups_of(self, user_data: UserData) -> dict[str, Any]:
        """The groups and labels of the user's training images, for a `check`; empty if they are not
        known, or there are no groups. This reads them.
        """
        data = self.data_folder(user_data.name)
        if data is None or (groups := data.extra("groups")) is None:
            return {}
        return {"train_groups": groups, "train_labels": data.split("train")[1]}

    @property
    def images_option(self) -> str:
        """The option of `aggregate` for the user's folder of images; empty without one."""
        user_data = self.experiment.user_data
        if user_data is None or user_data.kind != "folder":
            return ""
        return f" --images={shlex.quote(user_data.path)}"

    def data_folder(self, dataset: str) -> DataFolder | None:
        """The data set, if it has been fetched from what the configuration names."""
        if dataset not in self.folders and not self.stale:
            with suppress(Refusal, OSError):
                self.folders[dataset] = DataFolder.read(Path("results/data") / dataset)
        return self.folders.get(dataset)

    @cached_property
    def fingerprint(self) -> str | None:
        """Of the user's images, see `UserData`; computed once, as it looks at every file."""
        return self.experiment.user_data.fingerprint if self.experiment.user_data else None

    @cached_property
    def files_fingerprint(self) -> str:
        """Of the files that the user's program reads."""
        return fingerprint(map(Path, self.experiment.config["files"]))

    @cached_property
    def files_bytes(self) -> int:
        """Of those files together. The Snakemake inside a job does not look at every file again."""
        if not (self.workflow.is_main_process and self.files_changed):
            with suppress(Refusal, OSError):
                return read_files(self.results / "files").bytes
        paths = map(Path, self.experiment.config["files"])
        return sum(file.stat().st_size for path in paths for _, file in below(path))

    @cached_property
    def files_changed(self) -> bool:
        """Whether they would be hashed again."""
        record = self.results / "files" / SOURCE
        try:
            return record.read_text() != self.files_fingerprint
        except OSError:
            return True

    @property
    def stale(self) -> bool:
        """Whether the user's images would be imported again."""
        user_data = self.experiment.user_data
        if user_data is None:
            return False
        try:
            return (Path("results/data") / user_data.name / SOURCE).read_text() != self.fingerprint
        except OSError:
            return True

    def images_of(self, dataset: str | None) -> job_size.Images:
        """The size of a data set and of its images; a usual size if it is not known yet."""
        data = self.data_folder(dataset) if self.experiment.user_data and dataset else None
        found = job_size.USUAL
        if data is not None:
            found = job_size.Images(*data.image_shape[:2], data.bytes)
        files = self.files_bytes if self.experiment.config["files"] else 0
        return replace(found, bytes=(found.bytes if dataset else 0) + files)

    def parameters_of(self, run: Run) -> int:
        """How many parameters the network of a run has, see `classifier.check.parameters`."""
        # A job has its memory already, and torch takes two seconds to count.
        if not (self.workflow.is_main_process and self.experiment.built_in) or run.dataset is None:
            return 0
        return check.parameters(run, self.facts_of(run.dataset))

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
        self.refuse_read_only_folders()
        planned = {
            job.wildcards.run: job for job in self.jobs("train") if self.workflow.dag.needrun(job)
        }
        names = list(planned)
        changes = self.replaced(names)
        if changes and not self.experiment.config["replace"]:
            remedy = "give another experiment name, or add --config replace=true"
            self.refuse_replacement(changes, remedy)
        alive = owner.living([self.results / name / "state" for name in names])
        for folder, record in alive.items():
            raise Refusal(owner.still_there(folder / "owner.json", record))
        executor = self.workflow.executor_plugin.name
        self.refuse_unknown_executor(executor)
        self.tell_waiting_jobs({*planned, *(
            job.wildcards.run for job in self.jobs("evaluate") if self.workflow.dag.needrun(job)
        )})  # fmt: skip
        if not self.workflow.touch:
            # Nothing is refused after this but by the scheduler.
            self.keep_finished(planned)
        if executor not in (*NO_JOBS, registry.SCHEDULERS[registry.LOCAL].executor):
            refuse_unquoted(sys.executable)
            self.keep_configuration()
            unneeded = (s.unneeded_in_jobs for s in registry.SCHEDULERS.values())
            import_less_in_jobs(self.workflow.scheduler._executor, filter(None, unneeded))
        hosts = self.experiment.hosts
        if executor == registry.SCHEDULERS[registry.LOCAL].executor and not hosts:
            for every in registry.SCHEDULERS.values():
                if warning := every.idle_nodes(os.environ):
                    tell(f"warning: {warning}")
            cores, usable = self.workflow.resource_settings.cores, usable_cpus()
            if cores > usable:
                tell(
                    f"warning: --cores {cores}, but this process may use {usable} CPUs (affinity, "
                    f"or the quota of its container); give --cores {usable}"
                )
        scheduler = registry.on_hosts(hosts) if hosts else registry.of_executor(executor)
        if scheduler:
            self.watch = scheduler.watch(partial(self.tell_state, executor), tell)
            self.watch.start(self.workflow)
        # For `aggregate`, and for `watch`, which shows runs that have not begun too. Nothing is
        # refused after this.
        atomic.write_text(self.results / progress.RECORD, self.experiment.science + "\n")

    def keep_configuration(self) -> None:
        """Let jobs read the configuration as it is now: while they wait, its file may be edited for
        the next experiment.
        """
        kept = []
        for path, content in self.contents.items():
            about = {"folder": str(folder_of(path)), "runs": self.sums_of_runs}
            text = json.dumps(about)
            name = sha256(content + text.encode()).hexdigest()
            copy = CONFIGURATIONS / name[:16] / path.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(copy.with_name(ABOUT), text)
            atomic.write_text(copy, content.decode())
            kept.append(copy)
        self.workflow.config_settings.configfiles = kept

    @property
    def sums_of_runs(self) -> dict[str, str]:
        """SHA-256 of the values of each run."""
        runs = self.experiment.runs.items()
        return {name: sha256(run.to_json().encode()).hexdigest() for name, run in runs}

    def refuse_other_configuration(self) -> None:
        """Refuse to go on in a job if its run is another one than when it was submitted.

        Raises:
            Refusal: a file that the configuration names, such as a table of runs, has changed.
        """
        for path in map(Path, self.workflow.configfiles):
            if is_copy(path):
                known = json.loads(path.with_name(ABOUT).read_text())["runs"]
                if other := [name for name, value in self.sums_of_runs.items()
                             if known.get(name) != value]:  # fmt: skip
                    raise Refusal(
                        f"config: {other[0]} has other values than when this job was submitted: a "
                        "table of runs or parameters.yaml has changed; put it back, or run the "
                        "same command again"
                    )

    def tell_waiting_jobs(self, names: Iterable[str]) -> None:
        """Refuse these runs while jobs of them are in the queue that a command which was killed has
        left: they would begin beside those of this command, and delete their results.

        Raises:
            Refusal: with the command that cancels the jobs.
        """
        known = progress.read_quietly(self.results / progress.JOBS, "jobs")
        # Not what a command would take for an option.
        every = {entry["job"]: name for name, entry in known.items()
                 if entry["job"][:1].isalnum()}  # fmt: skip
        planned = {*names}
        runs = {job: name for job, name in every.items() if name in planned}
        scheduler, unended = registry.of_executor(self.workflow.executor_plugin.name), None
        # Without a lock they may be of a command that lives.
        if scheduler and every and self.workflow.execution_settings.lock:
            unended = scheduler.unended([*every])
        self.others = {every[job]: known[every[job]] for job in unended or () if job not in runs}
        left = None if unended is None else [job for job in unended if job in runs]
        if scheduler and left:
            cancel, more = f"{scheduler.canceller} {left[0]}", ""
            if len(left) > 1:
                # Not in the refusal, which would be cut.
                for start in range(0, len(left), MOST_SHOWN):
                    some = left[start : start + MOST_SHOWN]
                    tell(f"to cancel them: {scheduler.canceller} {' '.join(some)}")
                cancel, more = "cancel them", f" and {len(left) - 1:,} more"
            raise Refusal(f"job {left[0]} ({runs[left[0]]}){more} of an earlier command "
                          f"{'are' if more else 'is'} still in the queue: {cancel}, then run the "
                          "same command again")  # fmt: skip
        waited = [f"{job} ({name})" for job, name in runs.items() if known[name]["waits"]]
        if waited and left is None:
            tell(f"warning: when an earlier command was killed, these jobs waited: "
                 f"{results.shortened(waited)}; cancel them, if they still do")  # fmt: skip

    def keep_finished(self, planned: Mapping[str, Any]) -> None:
        """Set aside what the planned trainings will replace: Snakemake removes it before they
        begin.

        Raises:
            Refusal: a finished run would be trained again, and nothing of it has changed.
        """
        for name, job in planned.items():
            folder = self.results / name
            if not is_whole(folder):
                # What there is beside run.json comes back if the training fails.
                replaced.set_aside(folder)
                self.set_aside += [name] * (folder / replaced.FOLDER).exists()
                continue
            # A Snakemake that was killed has not seen the end of the job. Its state is there, from
            # which the job gives its files again.
            unseen = self.workflow.async_run(self.workflow.persistence.incomplete(job))
            ended = unseen and is_state_of(folder, self.experiment)
            if not ended and not self.experiment.config["replace"]:
                reason = self.workflow.dag.reason(job)
                fetched = {
                    str(job.output[0]) for job in (*self.jobs("fetch"), *self.jobs("collect"))
                }
                made = sorted(fetched & {*map(str, reason.updated_input_run)})
                words = (
                    "an attempt to replace it was ended" if unseen
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
                    tell(f"to keep it, first make {made[0]} alone: this command, with that path")
                keep = "make that alone first" if made else "keep it with --touch"
                raise Refusal(
                    f"{self.experiment.name}/{name} is finished and nothing of it has changed "
                    f"({words}); {keep}, or train it again with --config replace=true"
                )
            replaced.set_aside(folder)
            self.set_aside.append(name)

    def tell_state(self, executor: str, job: Any, number: str, state: str, waits: bool) -> None:
        """Print the new state of a job, and note it for `watch`."""
        tell(f"{executor}: job {number}, {self.describe(job)}: {state}")
        since = time.strftime("%H:%M:%S")
        for part in parts(job):
            self.states[part.wildcards.run] = {
                "job": number, "state": state, "waits": waits, "since": since,
            }  # fmt: skip
        with suppress(OSError):
            self.write_jobs()

    def write_jobs(self) -> None:
        """Note the jobs of this command, and those of killed ones that are in the queue."""
        text = json.dumps(self.others | self.states) + "\n"
        atomic.write_text(self.results / progress.JOBS, text)

    def end(self) -> None:
        """Print how each run ended, and make a partial report if runs are missing."""
        if not self.workflow.is_main_process:
            return
        self.states = {}
        with suppress(OSError):
            if self.others:
                self.write_jobs()
            elif self.workflow.executor_plugin.name not in NO_JOBS:
                (self.results / progress.JOBS).unlink()
        last = "evaluate" if self.jobs("evaluate") else "train"
        measured = last == "evaluate" or not self.has_evaluation
        names = list(dict.fromkeys(job.wildcards.run for job in self.jobs(last)))
        lines: dict[str, str] = {}
        missing = []
        for name in names:
            try:
                if measured and self.workflow.touch:
                    self.refuse_other_evaluation(name)
                lines[name] = (
                    measures.line_of(self.experiment, name, self.results)
                    if measured
                    else self.read_trained(name)
                )
            except FileNotFoundError:
                missing.append(self.why_missing(name))
            except Refusal as refusal:
                also = "; or leave --touch out" * self.workflow.touch
                missing.append(results.Missing(name, f"{refusal}{also}"))
        for name, line in list(lines.items())[:MOST_SHOWN]:
            tell(f"{self.experiment.name}/{name}: {line}")
        if self.workflow.touch:
            # They are kept; what had ended an attempt to replace them says nothing of them.
            for name in lines:
                failure.end(self.results / name)
        # What another command has set aside, whose job has yet to begin, is its own.
        self.put_back(self.set_aside)
        self.forget_states()
        partial = self.results / "partial"
        tables = self.jobs("aggregate")
        if not missing and tables and self.has_report():
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

    def read_trained(self, name: str) -> str:
        """That a run is trained; raises as `measures.line_of`."""
        results.read_about_of(self.results / name, self.experiment.runs[name])
        return "trained"

    @property
    def has_evaluation(self) -> bool:
        """A program of the user's without `evaluate` has its numbers from the training."""
        return self.experiment.built_in or bool(self.experiment.evaluation)

    def has_report(self) -> bool:
        """Whether the report is there, and of the files that are there."""
        with suppress(FileNotFoundError, Refusal):
            return sums.changed(self.results) is None and not self.is_of_other_runs()
        return False

    def why_missing(self, name: str) -> results.Missing:
        """The reason for a missing run: from its own log, or in the scheduler's words."""
        if self.workflow.touch:
            return results.Missing(name, "some of its files are missing; leave --touch out")
        found = results.why_missing(name, self.results / name)
        told = next((
            results.Missing(name, reason, self.watch.logs.get(job, ""))
            for job, reason in self.watch.failures.items()
            if any(part.wildcards.get("run") == name for part in parts(job))
        ), None)  # fmt: skip
        # That of an earlier command says nothing about a job that was refused or never started.
        if found.log and self.is_new(self.results / name / failure.FILE):
            record = failure.read(self.results / name)
            if told and record and record.kind is failure.Kind.PREEMPTED:
                # Such as that its time was up: the program itself knows only that it was stopped.
                return replace(found, reason=f"{found.reason}; {told.reason}")
            return found
        if told:
            return told
        return self.why_without_data(name) or self.earlier(found, self.results / name)

    def earlier(self, found: results.Missing, folder: Path) -> results.Missing:
        """A reason that seems to be of an earlier command, with when it was."""
        record = failure.read(folder)
        if not (found.log and record):
            return found
        return replace(
            found, reason=f"at {record.time}, perhaps of an earlier command: {found.reason}"
        )

    def why_without_data(self, name: str) -> results.Missing | None:
        """The reason for a missing run, or for anything else, if its data, files or environment are
        missing.
        """
        for job in (*self.jobs("fetch"), *self.jobs("collect"), *self.jobs("pack")):
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
        data = ["--data", str(self.results.parent / "data"), *shlex.split(self.images_option)]
        folders = ["--results", str(self.results), *data, "--output", str(folder)]
        command = [sys.executable, str(self.scripts / "aggregate.py"), *folders, *common]
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
            return
        tell(
            f"partial report of {len(self.experiment.runs) - len(missing)} of "
            f"{len(self.experiment.runs)} runs: {folder}/report.html"
        )

    def forget_states(self) -> None:
        """Remove the states of runs whose results are there: of these runs, and complete.

        What Snakemake takes for finished may have been touched only.
        """
        for name in dict.fromkeys(job.wildcards.run for job in self.jobs("train")):
            folder = self.results / name
            try:
                self.read_trained(name)
            except (FileNotFoundError, Refusal):
                continue
            if not is_whole(folder) or not is_state_of(folder, self.experiment):
                continue
            if not self.experiment.built_in:
                # A program may have left its only result there.
                with suppress(OSError):
                    Folders(folder).finished.touch()
            else:
                shutil.rmtree(folder / "state", ignore_errors=True)

    def jobs(self, rule: str = "") -> list[Any]:
        """The jobs of a rule, or all."""
        return [job for job in self.workflow.dag.jobs if rule in ("", job.rule.name)]

    def describe(self, job: Any) -> str:
        """A submitted job in a few words, with the log of its last rule."""
        rules = [part.rule.name for part in parts(job)]
        last = next(part for part in parts(job) if part.rule.name == sorted(rules)[-1])
        run = f"{self.experiment.name}/{last.wildcards.run}"
        return f"{' and '.join(sorted(rules))} of {run}, log {last.log[0]}"


def folder_of(configfile: Path) -> Path:
    """The folder that the paths in a configuration file are relative to, also of a copy of it."""
    if is_copy(configfile):
        return Path(json.loads(configfile.with_name(ABOUT).read_text())["folder"])
    return configfile.parent


def is_copy(configfile: Path) -> bool:
    """Whether a configuration file is one of `Session.keep_configuration`."""
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


def refuse_unquoted(interpreter: str) -> None:
    """Refuse a Python that a job's shell would not find: Snakemake writes its path unquoted."""
    if not re.fullmatch(r"[\w@+=:,./~-]+", interpreter):
        raise Refusal(
            f"{interpreter}: Snakemake's jobs cannot start a Python in a path with blanks, quotes "
            "or %; make the environment in a folder without them"
        )


def is_whole(folder: Path) -> bool:
    """Whether the results of a finished training are all there."""
    try:
        files = json.loads(read_bytes(folder / "run.json", MOST))["files"]
        return all((folder / name).is_file() for name in files)
    except (OSError, ValueError, KeyError, TypeError):
        # One of an earlier version is complete if it is there at all.
        return (folder / "run.json").is_file()


def is_state_of(folder: Path, experiment: Experiment) -> bool:
    """Whether the state in a run's folder is of the training that has written its results, and not
    of one that is to replace them.
    """
    with suppress(OSError, Refusal):
        if not experiment.built_in:
            about = results.read_about(folder / "run.json", "program_run")
            return bool(read_request(Folders(folder))["attempts"] == about["attempts"])
        return (folder / "state" / FINISHED).read_text() == file_sha256(folder / "run.json")
    return False


def parts(job: Any) -> Iterable[Any]:
    """The jobs of a group, or the job itself."""
    return list(job) if job.is_group() else [job]


def tell(line: str) -> None:
    # The line may contain text from results and logs.
    print(one_line(line, LONGEST_REPORT), file=sys.stderr, flush=True)
