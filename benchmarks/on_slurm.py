"""On a Slurm of four nodes that share this machine: python benchmarks/on_slurm.py VENV OUTPUT

The CPU seconds of whole jobs whose program does nothing. And the seconds until the first step of a
training in VENV, which has torch, where opening a file of it takes 5 ms (`slow_opens.c`): shared,
staged by this job, and staged by one before. At last the nodes have an empty folder in its place,
and a training on all of them ends.

Each node mounts VENV anew for each job, so that it has nothing of it in memory; the machine, which
is the file server, may. Needs root, a C compiler, and Debian's libfuse3-dev and pkg-config. Prints
medians, and writes all numbers to on_slurm.json in the folder OUTPUT.
"""

import argparse
import itertools
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "workflow" / "scripts")]

from checkout import SlurmCheckout  # type: ignore[import-not-found]  # noqa: E402
from cluster.handle import PROGRAM, Cluster  # type: ignore[import-not-found]  # noqa: E402
from manynodes.experiment.config import Experiment  # noqa: E402

SIZES = (1, 2, 4)
MILLISECONDS = 5
CASES = ("shared", "staged", "staged before")
NOTHING = "import launched\n"
FIRST_STEP = """
import json, os, time
import torch
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
network = DistributedDataParallel(torch.nn.Linear(100, 100))
optimizer = torch.optim.AdamW(network.parameters())
network(torch.ones(1, 100)).square().sum().backward()
optimizer.step()


# Seconds since the oldest process of this node with this word on its command line began.
def age(word):
    begun = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline") as words, open(f"/proc/{pid}/stat") as numbers:
                if word in words.read():
                    begun.append(int(numbers.read().rpartition(")")[2].split()[19]))
        except OSError:
            pass
    return time.clock_gettime(time.CLOCK_BOOTTIME) - min(begun) / os.sysconf("SC_CLK_TCK")


if os.environ["RANK"] == "0":
    with open("result.json", "w") as file:
        json.dump({"since_job": age("slurm_script"), "since_launch": age("launch.py")}, file)
"""


class Bench:
    """Experiments in a checkout on the cluster."""

    def __init__(self, cluster: Cluster, venv: Path) -> None:
        self.cluster, self.venv = cluster, venv
        self.checkout = SlurmCheckout(cluster)
        self.folder = self.checkout.path / "site"
        # Without a mount, an empty folder.
        self.mounted = cluster.shared / "environment"
        for folder in (self.folder, self.mounted):
            folder.mkdir()
        flags = subprocess.check_output(["pkg-config", "--cflags", "--libs", "fuse3"], text=True)
        self.slow_opens = cluster.shared / "slow_opens"
        source = Path(__file__).with_name("slow_opens.c")
        compiler = ["cc", "-O2", source, *shlex.split(flags), "-o", self.slow_opens]
        subprocess.run(compiler, check=True)

    def write(self, name: str, program: str, **keys: Any) -> dict[tuple[int, int], str]:
        """An experiment; returns the names of its runs by nodes and seed."""
        (self.folder / f"{name}.py").write_text(program)
        config = {
            "experiment": name, "program": f"{name}.py", "cpus_per_proc": 1, "preflight": False,
            "scratch": ["/scratch"], **keys,
        }  # fmt: skip
        (self.folder / f"{name}.yaml").write_text(json.dumps(config))
        here = Experiment.from_config(config | {"program": str(self.folder / f"{name}.py")})
        return {(run.nodes, run.seed): each for each, run in here.runs.items()}

    def make(self, name: str, target: str) -> Path:
        """Let Snakemake make a file of an experiment; returns its folder."""
        target = f"results/{name}/{target}"
        done = subprocess.run(
            [*self.checkout.command, "--configfile", f"site/{name}.yaml", "--", target],
            cwd=self.checkout.path, env=self.checkout.environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stdout[-4000:] + done.stderr[-4000:])
        return (self.checkout.path / target).parent

    def on(self, nodes: Sequence[str | None], *command: object) -> None:
        """Run a command on nodes; None is the login node."""
        for node in nodes:
            done = self.cluster.run(*command, node=node)
            if done.returncode:
                raise RuntimeError(done.stdout + done.stderr)

    @contextmanager
    def slow(self, nodes: Sequence[str | None]) -> Iterator[None]:
        """They see the environment, each through a mount of its own."""
        self.on(nodes, self.slow_opens, self.venv, MILLISECONDS, self.mounted, "-o", "ro")
        try:
            yield
        finally:
            self.on(nodes, "umount", "--lazy", self.mounted)

    def first_step(self, name: str, run: str) -> dict[str, float]:
        """Seconds from the begin of the job, and of `launch`, to the end of a first step."""
        folder = self.make(name, f"{run}/result.json")
        found = json.loads((folder / "environment.json").read_text())["interpreter"]
        if (name == "staged") != found.startswith("/scratch/"):
            raise RuntimeError(f"{folder}: it ran in {found}")
        return json.loads((folder / "result.json").read_text())

    def first_steps(self, rounds: int) -> Iterator[dict[str, Any]]:
        """The cases in turns."""
        kind, runs = {"python": str(self.mounted)}, {}
        axes = {"nodes": list(SIZES), "seed": list(range(2 * rounds + 1)), "launcher": "srun"}
        with self.slow([None]):
            for name, given in (("shared", kind), ("staged", kind | {"stage": True})):
                runs[name] = self.write(name, FIRST_STEP, environment=given, **axes)
            begun = time.perf_counter()
            self.make("staged", "environment/manifest.json")
            yield {"case": "packing", "seconds": time.perf_counter() - begun}
            for number, size in itertools.product(range(rounds), SIZES):
                self.on(self.cluster.nodes, "sh", "-c", "rm -rf /scratch/*")
                for case, seed in zip(CASES, (number, number, rounds + number), strict=True):
                    name = case.split()[0]
                    with self.slow(self.cluster.nodes):
                        found = self.first_step(name, runs[name][size, seed])
                    yield {"case": case, "nodes": size, **found}
            # Of the last round, it is staged on all nodes.
            found = self.first_step("staged", runs["staged"][SIZES[-1], 2 * rounds])
            yield {"case": "an empty folder in its place", "nodes": SIZES[-1], **found}

    def jobs(self, rounds: int) -> Iterator[dict[str, Any]]:
        """CPU seconds of jobs whose program does nothing, by launcher and part of the job."""
        launchers = ("srun", "torchrun")
        runs = {
            launcher: self.write(f"of-{launcher}", NOTHING, launcher=launcher,
                                 nodes=[1, 2], seed=list(range(rounds)))
            for launcher in launchers
        }  # fmt: skip
        for seed, size, launcher in itertools.product(range(rounds), (1, 2), launchers):
            folder = self.make(f"of-{launcher}", f"{runs[launcher][size, seed]}/result.json")
            (attempt,) = json.loads((folder / "run.json").read_text())["attempts"]
            parts = self.cpu_seconds(attempt["by"].split()[-1])
            yield {"case": f"job, {launcher}", "nodes": size, "cpu": sum(parts.values()), **parts}

    def cpu_seconds(self, job: str) -> dict[str, float]:
        """Those of its steps, of which the first is the batch script."""
        asked = ["sacct", "--noheader", "--parsable2", f"--jobs={job}"]
        shown = self.cluster.run(*asked, "--format=JobID,TotalCPU").stdout.split()
        steps = dict(line.split("|") for line in shown)
        return {
            name.partition(".")[2]: sum(
                float(part) * 60**power for power, part in enumerate(reversed(time.split(":")))
            )
            for name, time in steps.items()
            if "." in name
        }


def medians(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Lines with the median of each number over the rows with the same case and nodes."""
    key = itemgetter("case", "nodes")
    for (case, nodes), same in itertools.groupby(sorted(rows, key=key), key):
        each = list(same)
        numbers = {
            name: statistics.median(row[name] for row in each)
            for name in each[0]
            if name not in ("case", "nodes") and all(name in row for row in each)
        }
        said = ", ".join(f"{name} {value:.2f}" for name, value in numbers.items())
        yield f"{case}, nodes {nodes}, of {len(each)}: {said}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("venv", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    variables, up = Cluster.environment(), ["up", "--end-with-parent", "--nodes", str(SIZES[-1])]
    subprocess.run([*PROGRAM, *up], env=variables, check=True)
    try:
        bench = Bench(Cluster(), args.venv.resolve())
        for row in itertools.chain(bench.jobs(args.rounds), bench.first_steps(args.rounds)):
            print(row, flush=True)
            rows.append({"nodes": 0, **row})
            (args.output / "on_slurm.json").write_text(json.dumps(rows, indent=2) + "\n")
    finally:
        subprocess.run([*PROGRAM, "down"], env=variables, check=True)
    print("", *medians(rows), sep="\n")


if __name__ == "__main__":
    main()
