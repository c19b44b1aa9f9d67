"""The programs of docs/guides.md, each in the environment that its configuration names."""

import json
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import yaml

from checkout import Checkout

EXAMPLES = "examples/guides"
UV = Path(sys.executable).with_name("uv")
# The columns of each one's curve, and its environment's folder.
GUIDES = {
    "multiple-nodes": (["epoch", "loss"], "multiple-nodes/venv"),
    "nci": (["epoch", "loss"], "nci/pytorch"),
    "mila": (["epoch", "val_loss", "val_accuracy"], "mila/.venv"),
    "princeton": (["epoch", "loss", "test_loss", "test_accuracy"], "princeton/torch-env"),
    "trixie": (["epoch", "loss"], "trixie/pytorch-1.7.1"),
    "trixie-accelerate": (["epoch", "loss"], "trixie/pytorch-1.7.1"),
}

CONDA = ("torch-env", "pytorch-1.7.1")


def make_environments(checkout: Checkout) -> None:
    """Environments that have torch by its path, and no Snakemake, as nothing can be downloaded."""
    guides = checkout.path / EXAMPLES
    packages = checkout.path / "packages"
    packages.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "snakemake" not in entry.name and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    project = guides / "mila/pyproject.toml"
    project.write_text(re.sub(r"(?s)dependencies = \[.*?\]\n", "", project.read_text()))
    sync = [UV, "sync", "--offline", "--quiet", "--python", sys.executable]
    subprocess.run(sync, cwd=project.parent, env=checkout.environment, check=True)
    for folder in {guides / folder for _, folder in GUIDES.values()}:
        if not folder.exists():
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        if folder.name in CONDA:
            # Without its activation script, it has no torch.
            script = folder / "etc/conda/activate.d/path.sh"
            script.parent.mkdir(parents=True)
            script.write_text(f"export PYTHONPATH={shlex.quote(str(packages))}:$PYTHONPATH\n")
        else:
            (site,) = folder.glob("lib/python*/site-packages")
            (site / "packages.pth").write_text(f"{packages}\n")


def modules_of(checkout: Checkout, name: str) -> list[str]:
    given = yaml.safe_load((checkout.path / EXAMPLES / f"{name}.yaml").read_text())
    return given["environment"].get("modules", [])


def command_of(checkout: Checkout, name: str) -> list[str]:
    """Options of Snakemake with the guide's configuration; modules of its site are made here."""
    options = ["cpus_per_proc=1", "preflight=false"]
    if modules := modules_of(checkout, name):
        # The path of a module has no space.
        folder = checkout.path.parent / "modules"
        made = [folder / module for module in modules]
        for path in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("#%Module\n")
        options.append("environment=" + json.dumps({"modules": list(map(str, made))}))
    return ["--configfile", f"{EXAMPLES}/{name}.yaml", "--until", "train", "--config", *options]


def assert_ran(checkout: Checkout, name: str, experiment: str = "") -> None:
    """With its curve, in its environment, and in no other."""
    columns, folder = GUIDES[name]
    run = checkout.path / f"results/{experiment or name}/run"
    header, *rows = (run / "metrics.csv").read_text().splitlines()
    assert header.split(",") == columns
    assert len(rows) >= 5
    record = json.loads((run / "environment.json").read_text())
    assert record["interpreter"] == f"{checkout.path}/{EXAMPLES}/{folder}/bin/python"
    assert "torch" in record["distributions"]
    loaded = {"/".join(Path(module).parts[-2:]) for module in record["modules"]}
    assert loaded >= set(modules_of(checkout, name))
    assert not [package for package in record["distributions"] if "snakemake" in package]
