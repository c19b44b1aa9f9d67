"""Start a program on every node of a run, and tell the truth about how it ended.

The nodes are agents on this machine, joined over loopback. The program and its arguments follow `--`.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ddp import atomic
from ddp.agents import run_all
from ddp.errors import Refusal, told_in_one_line
from ddp.plan import Geometry, NodeCommand, local_plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=positive, default=1)
    parser.add_argument("--nproc-per-node", type=positive, default=1)
    parser.add_argument("--cpus", type=positive, default=1, help="CPUs of this machine to share out among all processes")
    parser.add_argument("--cpus-per-proc", type=positive, help="CPUs of each process; an even share if not given")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu")
    parser.add_argument("--launcher", choices=("torchrun", "none"), default="torchrun", help="none: the program once a node")
    parser.add_argument("--log", type=Path, help="file for everything the processes write")
    parser.add_argument("--collect", type=Path, metavar="FILE", help="write the nodes' reports there, as JSON")
    parser.add_argument("--end-with-parent", action="store_true", help="stop when whoever started this is gone")
    parser.add_argument("--dry-run", action="store_true", help="print every node's environment and command, and start nothing")
    parser.add_argument("program", nargs="+", help="Python program and its arguments")
    args = parser.parse_args()
    with told_in_one_line("launch"):
        world_size = args.nodes * args.nproc_per_node
        share = max(1, args.cpus // world_size)
        if args.cpus_per_proc and args.cpus_per_proc > share:
            raise Refusal(
                f"cpus_per_proc: {world_size} processes of {args.cpus_per_proc} CPUs need {world_size * args.cpus_per_proc}, "
                f"{args.cpus} are given; use auto, or more --cores"
            )
        geometry = Geometry(args.nodes, args.nproc_per_node, args.cpus_per_proc or share)
        gpus = usable_gpus(args.device, world_size)
        with tempfile.TemporaryDirectory(prefix="launch-") as folder:
            plan = local_plan(args.launcher, geometry, args.program, free_port(), folder, gpus)
            if args.dry_run:
                print(*plan, sep="\n")
            else:
                launch(plan, Path(folder), args)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def launch(plan: Sequence[NodeCommand], folder: Path, args: argparse.Namespace) -> None:
    """Run the plan; with --collect, gather the report that each node writes to the file in its NODE_REPORT."""
    reports = [folder / f"{command.node_rank}.json" for command in plan]
    if args.collect:
        plan = [
            replace(command, environment={**command.environment, "NODE_REPORT": str(report)})
            for command, report in zip(plan, reports, strict=True)
        ]
    if args.log:
        args.log.parent.mkdir(parents=True, exist_ok=True)
    with open(args.log or os.devnull, "a") as sink:
        error = run_all(plan, sink, folder / "errors", args.end_with_parent)
    if error:
        raise Refusal(f"{Path(args.program[0]).stem} failed: {error}" + (f"; see {args.log}" if args.log else ""))
    if args.collect:
        nodes = [{"node_rank": rank, **json.loads(report.read_text())} for rank, report in enumerate(reports)]
        atomic.write_text(args.collect, json.dumps({"nodes": nodes}, indent=2) + "\n")


def free_port() -> int:
    """A port that can be bound now, outside the ephemeral range, which any outgoing connection may take from under us."""
    first = os.getpid() % 10_000
    for offset in range(10_000):
        port = 20_000 + (first + offset) % 10_000
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise Refusal("no port from 20000 to 29999 is free on 127.0.0.1; end what holds them")


def usable_gpus(device: str, world_size: int) -> list[str]:
    """The GPUs to share out; none if the device is `cpu`, or `auto` and there are fewer than processes.

    Raises:
        Refusal: the device is `cuda` and there are fewer GPUs than processes.
    """
    gpus = [] if device == "cpu" else visible_gpus()
    if device == "cuda" and len(gpus) < world_size:
        raise Refusal(f"device: cuda needs {world_size} GPUs, one per process; {socket.gethostname()} has {len(gpus)}")
    return gpus if len(gpus) >= world_size else []


def visible_gpus() -> list[str]:
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        raise Refusal(f"nvidia-smi does not answer on {socket.gethostname()}; its GPUs need an administrator") from None
    return done.stdout.split() if done.returncode == 0 else []


if __name__ == "__main__":
    main()
