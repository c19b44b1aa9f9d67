"""Snakemake's executor for PBS. Snakemake finds it by its name in a folder on Python's path.

There is none among Snakemake's published plugins. `make` adds this folder to the path of its
environment; elsewhere, set PYTHONPATH=workflow/executors.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

# Snakemake reads these annotations itself: it knows Optional[str], not str | None.
from typing import Any, Optional

from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor
from snakemake_interface_executor_plugins.jobs import JobExecutorInterface
from snakemake_interface_executor_plugins.settings import CommonSettings, ExecutorSettingsBase

common_settings = CommonSettings(
    non_local_exec=True,
    implies_no_shared_fs=False,
    job_deploy_sources=False,
    auto_deploy_default_storage_provider=False,
    init_seconds_before_status_checks=5,
)


@dataclass
class ExecutorSettings(ExecutorSettingsBase):
    """Options --pbs-request and --pbs-init; in a profile, pbs-request and pbs-init."""

    request: Optional[str] = field(  # noqa: UP045
        default="select",
        metadata={
            "help": "How a job asks for its size: `select`, chunks of one node each, or `totals` "
            "over all nodes, as NCI's Gadi wants it."
        },
    )
    init: Optional[str] = field(  # noqa: UP045
        default=None,
        metadata={"help": "Shell commands at the start of every job, such as `module load cuda`."},
    )


class Executor(RemoteExecutor):
    """Submits jobs with qsub and follows them with qstat."""

    def __post_init__(self) -> None:
        # Imported here: the library is that of the checkout whose Snakefile runs.
        from manynodes.schedulers.pbs.jobs import Jobs

        settings = self.workflow.executor_settings
        self.jobs = Jobs(settings.request or "select", settings.init or "")

    def run_job(self, job: JobExecutorInterface) -> None:
        info = SubmittedJobInfo(job)
        error = self.jobs.submit(info, self.get_jobname(job), self.format_job_exec(job))
        if error:
            self.report_job_error(info, msg=f"{error}. ")
        else:
            self.report_job_submission(info)

    async def check_active_jobs(
        self, active_jobs: list[SubmittedJobInfo]
    ) -> AsyncGenerator[SubmittedJobInfo, None]:
        async with self.status_rate_limiter:
            ended = await self.jobs.ended(active_jobs)
        for info in active_jobs:
            good = ended.get(id(info))
            if good is None:
                yield info
            elif good:
                self.report_job_success(info)
            else:
                why, log = self.jobs.failures[info.job], self.jobs.logs[info.job]
                self.report_job_error(info, msg=f"{why}. ", aux_logs=[log] if log else None)

    def cancel_jobs(self, active_jobs: list[Any]) -> None:  # noqa: ARG002
        # Not the given list: while check_active_jobs runs, Snakemake's is empty.
        self.jobs.cancel()
