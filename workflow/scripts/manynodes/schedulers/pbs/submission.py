"""PBS's part in a Snakemake command: every submission is tried before the first job."""

import shlex
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from manynodes.base.errors import Refusal
from manynodes.base.processes import ignore_interrupts
from manynodes.schedulers.base import TellState, Unanswered, Watch, jobs_to_submit, one_at_a_time
from manynodes.schedulers.pbs.commands import FULL, JOB_ID, error_of, run_pbs
from manynodes.schedulers.pbs.jobs import delete
from manynodes.schedulers.pbs.requests import options


class PbsWatch(Watch):
    """Tries the submissions of a Snakemake command and follows its jobs.

    Args:
        tell_state, tell: as in `Scheduler.watch`.
    """

    def __init__(self, tell_state: TellState, tell: Callable[[str], None]) -> None:
        super().__init__()
        self.tell_state, self.tell = one_at_a_time(tell_state), tell

    def start(self, workflow: Any) -> None:
        jobs = workflow.scheduler._executor.jobs
        jobs.tell_state, jobs.tell = self.tell_state, self.tell
        jobs.failures, jobs.logs = self.failures, self.logs
        tried: set[tuple[str, ...]] = set()
        for job in jobs_to_submit(workflow.dag, ("pbs_queue", "pbs_project")):
            wanted = tuple(options(job.resources, jobs.request))
            if wanted not in tried:
                tried.add(wanted)
                self.try_whole(wanted)

    def try_whole(self, wanted: tuple[str, ...]) -> None:
        """Try a submission to its end: after Ctrl-C meanwhile, the held job would stay for ever.

        Raises:
            Refusal: as `try_submission`, or Ctrl-C was pressed.
        """
        with ThreadPoolExecutor(1) as pool:
            tried = pool.submit(try_submission, wanted, self.tell)
            try:
                tried.result()
            except KeyboardInterrupt:
                ignore_interrupts()
                tried.result()
                raise Refusal("pbs: interrupted before the first job") from None


def try_submission(wanted: tuple[str, ...], tell: Callable[[str], None]) -> None:
    """Submit a job of this size that is held, and delete it: qsub has no other test. While a limit
    on jobs is reached, there is none.

    Args:
        tell: prints one line.

    Raises:
        Refusal: PBS does not accept it, or does not answer.
    """
    try:
        done = run_pbs("qsub", "-h", "-N", "test", "-o", "/dev/null", "-j", "oe", *wanted,
                       stdin="true\n")  # fmt: skip
        ids = JOB_ID.findall(done.stdout)
        if ids:
            # -W force -x would also remove it from the history, for operators only.
            if not delete(ids):
                tell(f"PBS does not answer; when it does: qdel {' '.join(ids)}")
        elif done.returncode and FULL.search(done.stderr):
            # Submitted when there is room.
            return
        if done.returncode or not ids:
            why = error_of(done) if done.returncode else "qsub gives no job id"
            raise Refusal(f"pbs: {why}; asked with qsub {shlex.join(wanted)}")
    except Unanswered as error:
        raise Refusal(f"pbs: {error}; try again once qstat answers") from None
