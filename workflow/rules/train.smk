"""In: a data set's manifest. Out: staging.json, and a run's weights, checkpoints, history.csv and run.json.

`stage` and `train` form a group: one job, one allocation, so that what is staged is where the training runs.
"""

NUMBERS = ["evaluation.json", "history.csv", "run.json"]
SAVING = (
    f"--save-every-epochs {EXPERIMENT.config['save_every_epochs']}"
    f" --save-every-seconds {EXPERIMENT.config['save_every_seconds']}"
    f" --resume {EXPERIMENT.config['resume']}"
)


rule stage:
    input:
        manifest=data_of,
    output:
        report="results/{experiment}/{run}/staging.json",
    log:
        "results/{experiment}/{run}/stage.log",
    group:
        "training"
    conda:
        "../envs/ddp.yaml"
    resources:
        **sized_by(job_size.training_size),
        runtime=10,
        transport=transport,
        hosts=HOSTS,
        scratch=SCRATCH,
    params:
        launch=f"{SCRIPTS}/launch.py",
        stage=f"{SCRIPTS}/stage.py",
        nodes=lambda wildcards: run_of(wildcards).nodes,
        data=subpath(input.manifest, parent=True),
    shell:
        "python {params.launch:q} --transport {resources.transport}{resources.hosts} --launcher none --resume --nodes {params.nodes}"
        " --log {log:q} --collect {output.report:q} --"
        " {params.stage:q} --data {params.data:q} --scratch {resources.scratch}"


rule train:
    input:
        manifest=data_of,
        staging=ancient("results/{experiment}/{run}/staging.json"),
        initial=lambda wildcards: run_of(wildcards).initial_weights or [],
    output:
        model="results/{experiment}/{run}/model.safetensors",
        history="results/{experiment}/{run}/history.csv",
        about="results/{experiment}/{run}/run.json",
        checkpoints=directory("results/{experiment}/{run}/checkpoints"),
    log:
        "results/{experiment}/{run}/train.log",
    group:
        "training"
    conda:
        "../envs/ddp.yaml"
    threads: cpus_of
    resources:
        **sized_by(job_size.training_size),
        runtime=120,
        transport=transport,
        hosts=HOSTS,
        launcher=LAUNCHER,
        scratch=SCRATCH,
        timeout=EXPERIMENT.config["timeout"],
        saving=SAVING,
        images_in=EXPERIMENT.config["images_in"],
        probe=" --probe" if EXPERIMENT.config["probe"] else "",
    params:
        launch=f"{SCRIPTS}/launch.py",
        train=f"{SCRIPTS}/train.py",
        run=lambda wildcards: run_of(wildcards).to_json(),
        changes=lambda wildcards: EXPERIMENT.changes(run_of(wildcards)),
        geometry=geometry_of,
        data=subpath(input.manifest, parent=True),
        results=subpath(output.model, parent=True),
        code=code_sha256("train.py"),
        network=lambda wildcards: code_of(run_of(wildcards).model),
    shell:
        "python {params.launch:q} --transport {resources.transport}{resources.hosts} --launcher {resources.launcher}"
        " --end-with $PPID --resume --timeout {resources.timeout} {params.geometry} --cpus {threads} --cpus-per-node {resources.cpus_per_task}"
        " --log {log:q} --rank-logs {params.results:q}/logs --state {params.results:q}/state --"
        " {params.train:q} --run {params.changes:q} --data {params.data:q}"
        " --scratch {resources.scratch} --output {params.results:q} --images-in {resources.images_in}{resources.probe} {resources.saving}"
