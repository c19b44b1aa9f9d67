"""In: a data set's manifest. Out: a run's weights, checkpoints, metrics.csv and run.json."""

NUMBERS = ["evaluation.json", "predictions.csv", "metrics.csv", "run.json"]
# What changes no result.
SETTINGS = shlex.join(
    f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}")
    for key, value in {
        **EXPERIMENT.parameters_for(False),
        "resume": EXPERIMENT.config["resume"],
    }.items()
    if value is not False
)


rule train:
    input:
        manifest=data_of,
        packed=ancient(PACKED),
        staging=ancient("results/{experiment}/{run}/staging.json"),
        initial=initial_of_run,
    output:
        model="results/{experiment}/{run}/model.safetensors",
        metrics="results/{experiment}/{run}/metrics.csv",
        about="results/{experiment}/{run}/run.json",
        checkpoints=directory("results/{experiment}/{run}/checkpoints"),
    log:
        "results/{experiment}/{run}/train.log",
    group:
        "training"
    conda:
        "../envs/manynodes.yaml"
    threads: cpus_of
    resources:
        **TRAINING,
        settings=SETTINGS,
    params:
        launch=f"{SCRIPTS}/launch.py",
        train=f"{SCRIPTS}/train.py",
        run=lambda wildcards: run_of(wildcards).to_json(),
        changes=lambda wildcards: EXPERIMENT.changes(run_of(wildcards)),
        geometry=geometry_options,
        data=subpath(input.manifest, parent=True),
        results=subpath(output.model, parent=True),
        code=code_of_program("train.py"),
        network=lambda wildcards: code_of(run_of(wildcards).model),
    shell:
        f"{LAUNCH}"
        " --log {log:q}"
        " --rank-logs {params.results:q}/logs"
        " --state {params.results:q}/state"
        " --"
        " {params.train:q}"
        " --run {params.changes:q}"
        " --data {params.data:q}"
        " --scratch {resources.scratch}"
        " --output {params.results:q}"
        " {resources.settings}"
