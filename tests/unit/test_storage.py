"""Trainings on full or read-only storage: the message names the file, and with space they resume.

On real file systems of a few hundred kB.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from classifier.states import state
from manynodes.base.errors import Refusal
from programs import ROOT
from session import refusals
from trainings import ALONE_AND_NOT, CONNECTED, Training, complete, newest_place, result
from waiting import until

ROOMY = 4_000_000


class Disk:
    """A file system in memory with a folder `out`."""

    def __init__(self, path: Path) -> None:
        self.path, self.output = path, path / "out"
        path.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOMY}", "tmpfs", path], check=True)

    def remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", self.path], check=True)

    def leave_free(self, kilobytes: int) -> None:
        """Leave so much space on it from now on, in pages of 4 kB."""
        usage = os.statvfs(self.path)
        self.remount(f"size={(usage.f_blocks - usage.f_bfree + kilobytes // 4) * usage.f_frsize}")

    def make_room(self) -> None:
        self.remount(f"size={ROOMY}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount file systems")
    disk = Disk(tmp_path / "disk")
    yield disk
    subprocess.run(["umount", "--lazy", disk.path], check=True)


def refused(training: Training) -> str:
    """Its last line."""
    assert training.end() == 1, training.said
    assert "Traceback" not in training.said
    return training.said.splitlines()[-1]


# Its folder may be shortened.
FULL = (
    r"No space left on device: 0\.\d{3} MB needed, (0\.\d{3}) MB free; free some space "
    r"there and try again"
)


@pytest.mark.faults
def test_a_folder_that_is_read_only_while_another_rank_waits_as_with_nccl(
    digits, disk, tmp_path
) -> None:
    disk.output.mkdir()
    disk.remount("ro")
    how = {"environment": CONNECTED["nccl"], "logs": tmp_path / "logs"}
    said = refused(Training(disk.output, digits, processes=2, **how))
    line = rf"rank 0 on \S+: {disk.output}/state: Read-only file system; choose a folder that "
    assert re.match(f"launch: train failed: {line}", said), said


@pytest.mark.faults
def test_a_state_that_does_not_fit_and_a_folder_that_is_read_only(
    digits, reference, interrupted, disk
) -> None:
    shutil.copytree(interrupted, disk.output)
    there = {path: path.read_bytes() for path in disk.output.rglob("*") if path.is_file()}
    disk.remount("ro")
    said = refused(Training(disk.output, digits))
    assert re.fullmatch(
        (
            rf"train: {disk.output}/state/owner\S*\.json: Read-only file system; choose a "
            rf"folder that can be written to"
        ),
        said,
    ), said
    assert {path: path.read_bytes() for path in disk.output.rglob("*") if path.is_file()} == there
    disk.remount("rw")
    # A state takes 68 kB; there is room for metrics.csv and all that is smaller.
    disk.leave_free(48)
    place, before = (
        newest_place(disk.output),
        [path.name for path, _ in state.states(disk.output / "state")],
    )
    said = refused(Training(disk.output, digits))
    found = re.fullmatch(r"train: \S+/state/epoch=(\d+)_step=000000\.safetensors: " + FULL, said)
    assert found, said
    assert int(found[1]) == place[0] + 1
    assert 0 < float(found[2]) < 0.06
    assert newest_place(disk.output) == place
    assert [path.name for path, _ in state.states(disk.output / "state")] == before
    (disk.output / "state" / "owner.json").unlink()
    disk.make_room()
    assert (
        f"train: resumed after {state.progress(*place)}, of 16 epochs"
        in complete(disk.output, digits).said
    )
    assert result(disk.output) == reference(1)


@pytest.mark.faults
@ALONE_AND_NOT
def test_a_disk_that_fills_up_while_the_metrics_are_written(
    digits, reference, disk, tmp_path, processes, environment
) -> None:
    disk.output.mkdir()
    options = ["--save-every-epochs", 8, "--save-every-seconds", 1000]
    how = {"processes": processes, "environment": environment, "logs": tmp_path / "logs"}
    training = Training(disk.output, digits, *options, **how)
    training.reach(9)
    # Written in the background.
    until(lambda: newest_place(disk.output) == (8, 0), training.process)
    with (disk.path / "ballast").open("wb", 0) as ballast:

        def filled() -> bool:
            # Again and again: with every metrics.csv that is replaced a page comes free.
            try:
                while True:
                    ballast.write(bytes(4096))
            except OSError:
                return training.process.poll() is not None

        until(filled)
    said = refused(training)
    who = "train" if processes == 1 else r"launch: train failed: rank 0 on \S+"
    assert re.match(rf"{who}: \S+/metrics.csv: {FULL}", said), said
    assert newest_place(disk.output) == (8, 0)
    (disk.path / "ballast").unlink()
    again = complete(disk.output, digits, *options, **how)
    assert "train: resumed after epoch 8, of 16 epochs" in again.said
    assert result(disk.output) == reference(processes)


@pytest.mark.faults
def test_weights_that_do_not_fit(digits, finished: Callable[[int], Path], reference, disk) -> None:
    """The training is complete; only the outputs are written when there is space."""
    shutil.copytree(finished(1), disk.output)
    (disk.output / "state" / "owner.json").unlink()
    # A start removes it, which makes room.
    (disk.output / "state" / "live.json").unlink(missing_ok=True)
    size = (disk.output / "model.safetensors").stat().st_size
    shutil.rmtree(disk.output / "checkpoints")
    (disk.output / "model.safetensors").unlink()
    # The four kept checkpoints, of 24 kB each, fit, and the weights do not.
    disk.leave_free(4 * 24 + 20)
    said = refused(Training(disk.output, digits))
    assert f"/model.safetensors: No space left on device: {size / 1e6:.3f} MB needed, " in said
    assert newest_place(disk.output) == (16, 0)
    disk.make_room()
    assert complete(disk.output, digits).epochs == []
    assert result(disk.output) == reference(1)


@pytest.mark.faults
def test_logs_that_do_not_fit_are_no_reason_to_stop(digits, reference, disk, tmp_path) -> None:
    # Of nothing, tmpfs makes no limit.
    (disk.path / "ballast").write_bytes(bytes(4096))
    disk.leave_free(0)
    with pytest.raises(OSError, match="No space left"):
        (disk.path / "more").write_bytes(b"x")
    how = {"environment": CONNECTED["nccl"], "logs": disk.path}
    training = complete(tmp_path / "out", digits, processes=2, **how)
    assert training.epochs == list(range(1, 17))
    assert result(tmp_path / "out") == reference(2)


def test_data_on_a_read_only_disk_are_refused_only_if_they_are_to_be_fetched(
    disk, tmp_path
) -> None:
    results = tmp_path / "results/x"
    results.mkdir(parents=True)
    (results.parent / "data").symlink_to(disk.path)
    disk.remount("ro")
    refusals.refuse_read_only_folders(results, fetches=False)
    with pytest.raises(Refusal, match="/data cannot be written to; change its mode, or run in an"):
        refusals.refuse_read_only_folders(results, fetches=True)


@pytest.mark.parametrize("place", ["", ".snakemake", ".snakemake/locks"])
def test_a_working_folder_that_is_read_only_is_refused_with_the_option_for_another(
    disk, tmp_path, monkeypatch, place
) -> None:
    locks = Path(".snakemake/locks")
    if place:
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).symlink_to(disk.path)
    monkeypatch.chdir(tmp_path if place else disk.path)
    refusals.refuse_read_only_place(locks, False)
    disk.remount("ro")
    with pytest.raises(
        Refusal,
        match=f"^{place or 'the working folder'} cannot be written to; .*: --directory FOLDER$",
    ):
        refusals.refuse_read_only_place(locks, False)


def test_make_in_a_read_only_checkout_says_who_installs_it_and_how_to_use_it(disk) -> None:
    for name in ("Makefile", "requirements.txt"):
        shutil.copy(ROOT / name, disk.path)
    disk.remount("ro")
    # Without what the make that runs the tests hands on.
    ours = {name: value for name, value in os.environ.items()
            if not name.startswith(("MAKE", "MFLAGS"))}  # fmt: skip
    made = subprocess.run(
        ["make", "--no-print-directory", "run"], cwd=disk.path, capture_output=True, text=True,
        check=False, env=ours,
    )  # fmt: skip
    assert made.returncode == 2
    assert re.match(
        rf"make: {disk.path} cannot be written to: who has installed it runs `make run` once; then "
        rf"snakemake --snakefile {disk.path}/Snakefile --directory FOLDER …\n",
        made.stderr,
    ), made.stderr


@pytest.mark.parametrize("room", [0, 256])
def test_make_has_snakemake_s_cache_elsewhere_if_the_home_folder_is_full(disk, room) -> None:
    (disk.path / ".cache/snakemake").mkdir(parents=True)
    (disk.path / "ballast").write_bytes(bytes(4096))
    disk.leave_free(room)
    # Nothing is made: only what it exports is shown.
    shown = subprocess.run(
        ["make", "--no-print-directory", "-f", "-", "shown"], cwd=ROOT, capture_output=True,
        input="include Makefile\nshown:\n\t@echo $${XDG_CACHE_HOME:-home}\n", text=True,
        env={"PATH": os.environ["PATH"], "HOME": str(disk.path)}, check=True,
    )  # fmt: skip
    assert shown.stdout == ("home\n" if room else f"{ROOT}/.snakemake/cache\n")
    assert not list((disk.path / ".cache/snakemake").iterdir())
