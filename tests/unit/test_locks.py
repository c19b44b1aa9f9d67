"""A lock held by another real process is reported, and given up in time."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from manynodes.base import locks
from manynodes.base.locks import NotLocked, locked
from manynodes.data.folder import DataFolder
from programs import SCRIPTS, program
from waiting import until

HOLDER = """
import sys, time
from pathlib import Path
from manynodes.base.locks import locked
with locked(Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(1e9)
"""


@pytest.fixture
def held(tmp_path: Path):
    path = tmp_path / "x.lock"
    command = [sys.executable, "-c", HOLDER, str(path)]
    holder = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(SCRIPTS)}
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    yield path, holder
    holder.kill()
    holder.wait()


def test_the_holder_is_named_and_the_wait_has_an_end(held, monkeypatch: pytest.MonkeyPatch) -> None:
    path, holder = held
    monkeypatch.setattr(locks, "TELL", 0.5)
    told: list[str] = []
    with pytest.raises(NotLocked) as refused, locked(path, told.append, give_up=2):
        pass
    who = rf"process {holder.pid} on \S+ since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
    assert re.search(
        rf"held by {who} after 2 s; end that process and try again$", str(refused.value)
    )
    (line,) = told
    assert re.search(rf"^waiting for .*, held by {who}; giving up after 2 s$", line)
    holder.kill()
    with locked(path, told.append, give_up=20):
        assert len(told) == 1


def test_a_lock_is_not_made_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "x.lock").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"), locked(tmp_path / "x.lock", print):
        pass
    assert victim.read_text() == "precious"


def test_staging_reads_the_shared_copy_where_the_lock_is_never_given_back(
    digits: Path, tmp_path: Path
) -> None:
    folder = tmp_path / f"ddp-data-{os.getuid()}"
    folder.mkdir(mode=0o700)
    name = f"digits-{DataFolder.read(digits).sha256[:12]}.lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder / name)],
        env=os.environ | {"PYTHONPATH": str(SCRIPTS)},
    )
    try:
        until(lambda: (folder / name).exists() and (folder / name).read_text())
        quick = "from manynodes.base import locks; locks.TELL, locks.GIVE_UP = 0.3, 1.0"
        body = (
            f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); {quick}; import stage; stage.main()"
        )
        command = [sys.executable, "-c", body, "--data", str(digits), "--scratch", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert f"held by process {holder.pid} on " in done.stderr
        assert "warning: using the shared copy, because " in done.stdout
        assert f"is still held by process {holder.pid}" in done.stdout
    finally:
        holder.kill()
        holder.wait()
    assert "fresh" in program("stage", "--data", digits, "--scratch", tmp_path).stdout
