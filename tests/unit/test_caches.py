"""Caches of compiled code are where nobody else can write."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from manynodes.base.caches import CACHES, private_caches
from programs import SCRIPTS, program

SAY = "from torch._inductor.runtime.cache_dir_utils import cache_dir; print(cache_dir())"


@pytest.mark.faults
def test_torch_keeps_its_compiled_code_in_the_user_s_own_folder(tmp_path: Path) -> None:
    """Not in a folder of a predictable name that somebody else may have made."""
    script = tmp_path / "program.py"
    script.write_text(SAY)
    home = tmp_path / "home"
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in CACHES}
    done = program("supervise", script, env=environment | {"HOME": str(home)})
    assert done.returncode == 0, done.stderr
    folder = home / ".cache/manynodes"
    assert done.stdout.split() == [str(folder / "torchinductor")]
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("spoil", ["writable", "link", "no home"])
def test_a_home_that_others_can_change_is_not_used(tmp_path: Path, spoil: str) -> None:
    home = tmp_path / "home"
    (home / ".cache").mkdir(parents=True)
    if spoil == "writable":
        (home / ".cache").chmod(0o777)
    if spoil == "link":
        (tmp_path / "theirs").mkdir()
        (tmp_path / "theirs").chmod(0o777)
        (home / ".cache/manynodes").symlink_to(tmp_path / "theirs")
    with private_caches({} if spoil == "no home" else {"HOME": str(home)}) as found:
        folders = {Path(value).parent for value in found.values()}
        (folder,) = folders
        assert not folder.is_relative_to(tmp_path)
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


@pytest.mark.faults
def test_a_home_in_which_nothing_can_be_executed_is_not_used(tmp_path: Path) -> None:
    script, home = tmp_path / "program.py", tmp_path / "home"
    script.write_text(SAY)
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in CACHES}
    inside = f'mount -t tmpfs -o noexec,mode=700 tmpfs {home} && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", inside, "sh", sys.executable,
         SCRIPTS / "supervise.py", script],
        env=environment | {"HOME": str(home)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert not done.stdout.startswith(str(home))


def test_what_the_user_has_chosen_stays() -> None:
    with private_caches(os.environ | {"TORCHINDUCTOR_CACHE_DIR": "/own"}) as found:
        assert "TORCHINDUCTOR_CACHE_DIR" not in found
