"""Stage, train, evaluate and compare: one experiment as one graph. Keys: config/README.md."""

from pathlib import Path

from snakemake.utils import min_version

min_version("9.17")

# As a module or an include, it would have another workflow's folder, configuration and hooks.
# Resolved: of --snakefile ../CHECKOUT/Snakefile, Snakemake keeps the dots in one of the two.
if Path(str(workflow.current_basedir)).resolve() != Path(workflow.basedir).resolve():
    raise SystemExit(
        "this workflow is no module of another one; run it by itself: snakemake --snakefile "
        f"{workflow.current_basedir}/Snakefile --directory FOLDER --configfile FILE"
    )


# One file is one experiment: --configfile replaces the quickstart.
if not workflow.overwrite_configfiles:

    configfile: "config/config.yaml"


report: "workflow/report/workflow.rst"


include: "workflow/rules/common.smk"
include: "workflow/rules/inputs.smk"
include: "workflow/rules/stage.smk"


if EXPERIMENT.built_in:
    if reads("train"):

        include: "workflow/rules/train.smk"

    if reads("evaluate"):

        include: "workflow/rules/evaluate.smk"

else:

    include: "workflow/rules/program.smk"


if reads("aggregate"):

    include: "workflow/rules/aggregate.smk"

    rule all:
        default_target: True
        input:
            TARGETS,
