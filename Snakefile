"""Stage, train, evaluate and compare: one experiment as one graph. Keys: config/README.md."""

from snakemake.utils import min_version

min_version("9.0")


# One file is one experiment: --configfile replaces the quickstart.
if not workflow.overwrite_configfiles:

    configfile: "config/config.yaml"


report: "workflow/report/workflow.rst"


include: "workflow/rules/common.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/report.smk"


localrules:
    all,
    fetch,
    aggregate,
    plot,


rule all:
    default_target: True
    input:
        expand(
            "results/{experiment}/{run}/evaluation.json",
            experiment=EXPERIMENT.name,
            run=EXPERIMENT.runs,
        ),
        multiext(
            f"results/{EXPERIMENT.name}/",
            "summary.csv",
            "curves.csv",
            "report.html",
            "loss.svg",
            "accuracy.svg",
        ),
