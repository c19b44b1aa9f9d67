"""In: the manifests of a run's inputs. Out: staging.json, where each node has its copies.

`stage` and `train` form a group: one job, one allocation, so that what is staged is where the training runs.
"""


rule stage:
    input:
        sources_of,
        # What is packed anew is staged by the processes that need it; see `train`.
        ancient(PACKED),
    output:
        report="results/{experiment}/{run}/staging.json",
    log:
        "results/{experiment}/{run}/stage.log",
    group:
        "training"
    conda:
        "../envs/manynodes.yaml"
    resources:
        **IN_JOB,
        runtime=10,
    params:
        launch=f"{SCRIPTS}/launch.py",
        stage=f"{SCRIPTS}/stage.py",
        nodes=lambda wildcards: run_of(wildcards).nodes,
        places=places_of,
        packed=PACKED_OPTION,
    shell:
        "python {params.launch:q}"
        " --transport {resources.transport}{resources.hosts}"
        " --launcher none"
        " --nodes {params.nodes}"
        " --restart"
        " --log {log:q}"
        " --collect {output.report:q}"
        " --"
        " {params.stage:q}{params.places}{params.packed}"
        " --scratch {resources.scratch}"
