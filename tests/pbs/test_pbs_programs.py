"""Programs of the user's through PBS and over ssh."""

import json
import re
import subprocess
import sys
import sysconfig

import pytest

from checkout import PbsCheckout
from cluster.handle import PbsCluster

pytestmark = pytest.mark.faults
EXAMPLES = "examples/programs"


def example(name: str) -> list[str]:
    return ["--configfile", f"{EXAMPLES}/{name}.yaml"]


def test_a_loop_in_its_own_environment_comes_to_the_same_numbers_through_pbs_and_over_ssh(
    cluster: PbsCluster, checkout: PbsCheckout
) -> None:
    venv = checkout.path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "torch.pth").write_text(sysconfig.get_path("purelib"))
    environment = json.dumps({"python": str(venv)})
    one = [*example("loop"), "--config", "parameters={lr: 0.1}", "preflight=false",
           "cpus_per_proc=1", "evaluate=null", f"environment={environment}"]  # fmt: skip
    said = checkout.run("--until", "train", *one)
    assert re.search(r"loop/run: accuracy 0\.9", said), said
    done = cluster.run(
        sys.executable, "-m", "snakemake", "--profile", "profiles/ssh", "--cores", "3",
        "--until", "train", *one, "hosts=[n1, n2, n3]", "experiment=loop-ssh",
        cwd=checkout.path, node="n1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [checkout.path / f"results/{name}/run" for name in ("loop", "loop-ssh")]
    for name in ("metrics.csv", "result.json"):
        by_pbs, by_ssh = ((run / name).read_bytes() for run in runs)
        assert by_pbs == by_ssh
    for run in runs:
        found = json.loads((run / "environment.json").read_text())
        assert found["interpreter"] == str(venv / "bin/python")
