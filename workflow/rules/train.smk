"""In: a data set's manifest. Out, for a run: staging.json, the weights and checkpoints, history.csv and run.json.

`stage` and `train` form a group: one job, one allocation, so that what is staged is where the training runs.
"""


rule stage:
    input:
        manifest=data_of,
    output:
        report="results/{experiment}/{run}/staging.json",
    log:
        "results/{experiment}/{run}/stage.log",
    conda:
        "../envs/ddp.yaml"
    params:
        nodes=lambda wildcards: run_of(wildcards).nodes,
        data=subpath(input.manifest, parent=True),
    group:
        "training"
    shell:
        "python {SCRIPTS:q}/launch.py --launcher none --nodes {params.nodes}"
        " --log {log:q} --collect {output.report:q} --"
        " {SCRIPTS:q}/stage.py --data {params.data:q} --scratch {SCRATCH:q}"


rule train:
    input:
        manifest=data_of,
        staging="results/{experiment}/{run}/staging.json",
    output:
        model="results/{experiment}/{run}/model.safetensors",
        history="results/{experiment}/{run}/history.csv",
        about="results/{experiment}/{run}/run.json",
        checkpoints=directory("results/{experiment}/{run}/checkpoints"),
    log:
        "results/{experiment}/{run}/train.log",
    conda:
        "../envs/ddp.yaml"
    params:
        run=lambda wildcards: run_of(wildcards).to_json(),
        geometry=geometry_of,
        data=subpath(input.manifest, parent=True),
        results=subpath(output.model, parent=True),
        code=code_sha256("train.py"),
    threads: cpus_of
    group:
        "training"
    shell:
        "python {SCRIPTS:q}/launch.py {params.geometry} --cpus {threads} --log {log:q} --"
        " {SCRIPTS:q}/train.py --run {params.run:q} --data {params.data:q}"
        " --scratch {SCRATCH:q} --output {params.results:q}"
