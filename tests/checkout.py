"""A checkout of the tests' own, and Snakemake run in it as a user would."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class Checkout:
    """A copy of the project's files in a folder with a space in its name, with results and scratch of its own."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "a checkout"
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        listed = ["git", "-c", "safe.directory=*", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0"):
            if name and (ROOT / name).is_file():
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.path / name)

    def snakemake(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`snakemake --profile profiles/local` and the arguments; output as text, both streams in one."""
        command = [sys.executable, "-m", "snakemake", "--profile", "profiles/local", *arguments]
        environment = os.environ | {"TMPDIR": str(self.scratch)}
        environment.pop("SLURM_TMPDIR", None)
        return subprocess.run(command, cwd=self.path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, timeout=900, check=False)  # fmt: skip

    def run(self, *arguments: str) -> str:
        done = self.snakemake(*arguments)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def jobs(self, *arguments: str) -> dict[str, int]:
        """What a dry run would run: jobs by rule."""
        said = self.run("--dry-run", *arguments)
        if "Nothing to be done" in said:
            return {}
        table = re.search(r"^job +count\n-+ +-+\n(.*?)^total", said, re.MULTILINE | re.DOTALL)
        assert table, said
        return {rule: int(count) for rule, count in (line.split() for line in table[1].splitlines())}
