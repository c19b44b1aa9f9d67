"""In: a program of the user's, and what it reads. Out: each run's outputs and numbers."""

SETTINGS = EXPERIMENT.config
OUTPUTS = {
    path: f"results/{{experiment}}/{{run}}/outputs/{path}"
    for path in SETTINGS["outputs"]
}
NUMBERS = ["run.json", "metrics.csv", "result.json"] + ["evaluation.json"] * bool(
    SETTINGS["evaluate"]
)


rule train:
    input:
        sources=sources_of,
        packed=ancient(PACKED),
        staging=ancient(
            ["results/{experiment}/{run}/staging.json"]
            * bool(SETTINGS["dataset"] or FILES or PACKED)
        ),
    output:
        *[
            directory(path) if name.endswith("/") else path
            for name, path in OUTPUTS.items()
        ],
        about="results/{experiment}/{run}/run.json",
        metrics="results/{experiment}/{run}/metrics.csv",
        result="results/{experiment}/{run}/result.json",
    log:
        "results/{experiment}/{run}/train.log",
    group:
        "training"
    conda:
        "../envs/manynodes.yaml"
    threads: cpus_of
    resources:
        **TRAINING,
        resume=SETTINGS["resume"],
        # Change no result, so they train nothing again; what does is part of `sources`.
        environment=json.dumps(EXPERIMENT.environment.pinned),
        code=EXPERIMENT.code_sha256,
        settings=json.dumps(EXPERIMENT.parameters_for(False)),
        reads=json.dumps(EXPERIMENT.reads),
        preflight=str(SETTINGS["preflight"]).lower(),
    params:
        launch=f"{SCRIPTS}/launch.py",
        preflight=f"{SCRIPTS}/preflight.py",
        publish=f"{SCRIPTS}/publish.py",
        command=lambda wildcards: [word or EMPTY for word in run_of(wildcards).command],
        run=lambda wildcards: run_of(wildcards).to_json(),
        sources=EXPERIMENT.sources_sha256,
        geometry=geometry_options,
        places=places_of,
        packed=PACKED_OF_PROGRAM,
        directory=lambda wildcards: (
            # What begins with a dash would be an option.
            f" --directory{'=' if SETTINGS['directory'][0] == '-' else ' '}"
            f"{shlex.quote(SETTINGS['directory'])}"
            if SETTINGS["directory"]
            else ""
        ),
        outputs=SETTINGS["outputs"],
        results=subpath(output.about, parent=True),
    shell:
        "launch() {{ "
        f"{LAUNCH}"
        " --rank-logs {params.results:q}/logs"
        " --state {params.results:q}/state"
        ' "$@"; }}\n'
        # As Snakemake removes the log of a rule.
        "rm -f {params.results:q}/preflight.log\n"
        # Nothing starts if the program has ended, and its results are checked again.
        "[ {resources.preflight} = false ] || {{ [ {resources.resume} = exact ]"
        " && [ -e {params.results:q}/state/ended ] && [ ! -e {params.results:q}/state/finished ]; }} ||"
        " launch --log {params.results:q}/preflight.log -- {params.preflight:q}\n"
        "launch"
        " --log {log:q}"
        " --output {params.results:q}"
        " --run {params.run:q}"
        " --settings {resources.settings:q}"
        " --sources={params.sources} --code={resources.code}{params.places}{params.packed}{params.directory}"
        " --scratch {resources.scratch}"
        " --environment {resources.environment:q}"
        " --reads {resources.reads:q}"
        " --resume {resources.resume}"
        " --"
        " {params.command:q}\n"
        "python {params.publish:q}"
        " --outputs {params.outputs:q}"
        " --reads {resources.reads:q}"
        " --output {params.results:q}"
        " 2>&1 | tee -a {log:q}"


rule evaluate:
    input:
        *OUTPUTS.values(),
        sources=sources_of,
        packed=ancient(PACKED * bool(PACKED_OF_PROGRAM)),
        about="results/{experiment}/{run}/run.json",
    output:
        "results/{experiment}/{run}/evaluation.json",
    log:
        "results/{experiment}/{run}/evaluate.log",
    conda:
        "../envs/manynodes.yaml"
    threads: job_size.EVALUATE_CPUS
    resources:
        **sized_by(
            job_size.evaluation_size_of_program, environment=bool(PACKED_OF_PROGRAM)
        ),
        runtime=30,
        gpus_here=gpus_to_evaluate,
        scratch=SCRATCH,
        environment=json.dumps(EXPERIMENT.environment.pinned),
    params:
        launch=f"{SCRIPTS}/launch.py",
        publish=f"{SCRIPTS}/publish.py",
        command=lambda wildcards: [word or EMPTY for word in EXPERIMENT.evaluation],
        device=lambda wildcards: run_of(wildcards).device,
        # A function: a text with {name} would be taken for a wildcard.
        settings=lambda wildcards: json.dumps(EXPERIMENT.parameters_for("evaluation")),
        sources=EXPERIMENT.evaluation_sha256,
        run=lambda wildcards: run_of(wildcards).to_json(),
        places=places_of,
        packed=PACKED_OF_PROGRAM,
        results=subpath(input.about, parent=True),
    shell:
        "python {params.launch:q}"
        " --transport local"
        " --launcher none"
        " --cpus {threads}"
        " --device {params.device}"
        " --end-with $PPID"
        " --log {log:q}"
        " --evaluate"
        " --output {params.results:q}"
        " --run {params.run:q}"
        " --settings {params.settings:q}{params.places}{params.packed}"
        " --scratch {resources.scratch}"
        " --environment {resources.environment:q}"
        " --"
        " {params.command:q}\n"
        "python {params.publish:q}"
        " --evaluation={params.sources}"
        " --output {params.results:q}"
        " 2>&1 | tee -a {log:q}"
