"""In: the files of all runs. Out: the experiment's tables, figures and report.html."""

NUMBERS_OF_RUNS = expand(
    "results/{{experiment}}/{run}/{file}", run=EXPERIMENT.runs, file=NUMBERS
)
# The numbers too: a report of other runs may be there under the same name. And the sums, without
# which nothing is compared.
TARGETS = [
    *expand(NUMBERS_OF_RUNS, experiment=EXPERIMENT.name),
    *multiext(
        f"results/{EXPERIMENT.name}/",
        "summary.csv",
        "curves.csv",
        "report.html",
        "SHA256SUMS",
    ),
]


localrules:
    aggregate,


rule aggregate:
    input:
        NUMBERS_OF_RUNS,
    output:
        multiext(
            "results/{experiment}/",
            "incidents.csv",
            "SHA256SUMS",
            *["confusion.csv"] * EXPERIMENT.built_in,
            *["scaling.csv"] * EXPERIMENT.varies_in_size,
        ),
        report(
            directory("results/{experiment}/figures"),
            patterns=["{name}.svg"],
            category="{experiment}",
            labels={"what": "{name}", "form": "figure"},
        ),
        report(
            "results/{experiment}/report.html",
            category="{experiment}",
            labels={"what": "report", "form": "page"},
        ),
        summary=report(
            "results/{experiment}/summary.csv",
            category="{experiment}",
            labels={"what": "summary", "form": "CSV"},
        ),
        curves=report(
            "results/{experiment}/curves.csv",
            category="{experiment}",
            labels={"what": "curves", "form": "CSV"},
        ),
    log:
        "results/{experiment}/aggregate.log",
    conda:
        "../envs/manynodes.yaml"
    params:
        aggregate=f"{SCRIPTS}/aggregate.py",
        # So that a change is seen, as the file is no input; and another command may write another
        # experiment of this name meanwhile.
        sha256=sha256(f"{EXPERIMENT.science}\n".encode()).hexdigest(),
        images=lambda wildcards: SESSION.inputs.images_option,
        results=subpath(output.summary, parent=True),
        code=code_of_program("aggregate.py"),
    shell:
        "python {params.aggregate:q}"
        " --config @{params.results:q}/experiment.json"
        " --sha256 {params.sha256}"
        " --results {params.results:q}"
        " --data results/data{params.images}"
        " --output {params.results:q}"
        " 2>&1 | tee {log:q}"
