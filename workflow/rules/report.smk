"""In: the files of all runs. Out: the experiment's tables, figures and report.html."""

TARGETS = expand(
    "results/{experiment}/{run}/evaluation.json",
    experiment=EXPERIMENT.name,
    run=EXPERIMENT.runs,
) + multiext(
    f"results/{EXPERIMENT.name}/",
    "summary.csv",
    "curves.csv",
    "report.html",
    "loss.svg",
    "accuracy.svg",
)


localrules:
    aggregate,


rule aggregate:
    input:
        expand(
            "results/{{experiment}}/{run}/{file}",
            run=EXPERIMENT.runs,
            file=["evaluation.json", "history.csv", "run.json"],
        ),
    output:
        multiext(
            "results/{experiment}/",
            "confusion.csv",
            "incidents.csv",
            "confusion.svg",
            "SHA256SUMS",
            *["scaling.csv", "scaling.svg"] * EXPERIMENT.varies_in_size,
            *["accuracy_by_axis.svg"] * bool(EXPERIMENT.numeric_axes),
        ),
        report(
            "results/{experiment}/curves.csv",
            category="{experiment}",
            labels={"what": "curves", "form": "CSV"},
            caption="../report/curves.rst",
        ),
        report(
            "results/{experiment}/accuracy.svg",
            category="{experiment}",
            labels={"what": "accuracy", "form": "figure"},
            caption="../report/accuracy.rst",
        ),
        report(
            "results/{experiment}/loss.svg",
            category="{experiment}",
            labels={"what": "loss", "form": "figure"},
            caption="../report/loss.rst",
        ),
        report(
            "results/{experiment}/report.html",
            category="{experiment}",
            labels={"what": "report", "form": "page"},
            caption="../report/summary.rst",
        ),
        summary=report(
            "results/{experiment}/summary.csv",
            category="{experiment}",
            labels={"what": "summary", "form": "CSV"},
            caption="../report/summary.rst",
        ),
    log:
        "results/{experiment}/aggregate.log",
    conda:
        "../envs/ddp.yaml"
    params:
        aggregate=f"{SCRIPTS}/aggregate.py",
        config=EXPERIMENT.science,
        results=subpath(output.summary, parent=True),
        code=code_sha256("aggregate.py"),
    shell:
        "python {params.aggregate:q} --config {params.config:q} --results {params.results:q}"
        " --output {params.results:q} 2>&1 | tee {log:q}"
