"""In: a program of the user's, and what it reads. Out: each run's outputs and numbers.

`stage` and `train` form a group: one job, one allocation, so that what is staged is where the program runs.
"""

SETTINGS = EXPERIMENT.config
OUTPUTS = {
    path: f"results/{{experiment}}/{{run}}/outputs/{path}"
    for path in SETTINGS["outputs"]
}
NUMBERS = ["run.json", "metrics.csv", "result.json"] + ["evaluation.json"] * bool(
    SETTINGS["evaluate"]
)
READS = bool(SETTINGS["dataset"] or SETTINGS["files"])


localrules:
    collect,


rule collect:
    output:
        manifest="results/{experiment}/files/manifest.json",
    log:
        "results/{experiment}/collect.log",
    conda:
        "../envs/ddp.yaml"
    params:
        collect=f"{SCRIPTS}/collect.py",
        files=lambda wildcards: SETTINGS["files"],
        content=lambda wildcards: SESSION.files_fingerprint,
        folder=subpath(output.manifest, parent=True),
    shell:
        "python {params.collect:q} --files {params.files:q} --name {wildcards.experiment}-files --content {params.content}"
        " --output {params.folder:q} 2>&1 | tee {log:q}"


rule stage:
    input:
        sources_of,
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
        places=places_of,
    shell:
        "python {params.launch:q} --transport {resources.transport}{resources.hosts} --launcher none --resume --nodes {params.nodes}"
        " --log {log:q} --collect {output.report:q} --"
        " {params.stage:q}{params.places} --scratch {resources.scratch}"


rule train:
    input:
        sources=sources_of,
        staging=ancient(["results/{experiment}/{run}/staging.json"] * READS),
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
        "../envs/ddp.yaml"
    threads: cpus_of
    resources:
        **sized_by(job_size.training_size),
        runtime=120,
        transport=transport,
        hosts=HOSTS,
        launcher=LAUNCHER,
        scratch=SCRATCH,
        timeout=SETTINGS["timeout"],
        resume=SETTINGS["resume"],
        # Changes no result, so it trains nothing again.
        settings=json.dumps(EXPERIMENT.parameters_for(False)),
        preflight=str(SETTINGS["preflight"]).lower(),
    params:
        prepare=f"{SCRIPTS}/prepare.py",
        launch=f"{SCRIPTS}/launch.py",
        preflight=f"{SCRIPTS}/preflight.py",
        program=f"{SCRIPTS}/run_program.py",
        publish=f"{SCRIPTS}/publish.py",
        name=EXPERIMENT.program_name,
        run=lambda wildcards: run_of(wildcards).to_json(),
        sources=EXPERIMENT.sources_sha256,
        geometry=geometry_of,
        places=places_of,
        directory=lambda wildcards: (
            f" --directory {shlex.quote(SETTINGS['directory'])}"
            if SETTINGS["directory"]
            else ""
        ),
        outputs=SETTINGS["outputs"],
        results=subpath(output.about, parent=True),
    shell:
        "python {params.prepare:q} --run {params.run:q} --sources={params.sources}{params.places}{params.directory} --resume {resources.resume}"
        " --output {params.results:q} 2>&1 | tee {log:q}\n"
        "launch() {{ python {params.launch:q} --transport {resources.transport}{resources.hosts}"
        " --launcher {resources.launcher} --end-with $PPID --resume --timeout {resources.timeout} {params.geometry}"
        " --cpus {threads} --cpus-per-node {resources.cpus_per_task}"
        ' --rank-logs {params.results:q}/logs --state {params.results:q}/state "$@"; }}\n'
        "[ {resources.preflight} = false ] ||"
        " launch --log {params.results:q}/preflight.log -- {params.preflight:q}\n"
        "launch --log {log:q} --name {params.name:q} -- {params.program:q}"
        " --run {params.run:q} --settings {resources.settings:q}{params.places}{params.directory}"
        " --scratch {resources.scratch} --output {params.results:q}\n"
        "python {params.publish:q} --outputs {params.outputs:q}"
        " --output {params.results:q} 2>&1 | tee -a {log:q}"


rule evaluate:
    input:
        *OUTPUTS.values(),
        sources=sources_of,
        about="results/{experiment}/{run}/run.json",
    output:
        "results/{experiment}/{run}/evaluation.json",
    log:
        "results/{experiment}/{run}/evaluate.log",
    conda:
        "../envs/ddp.yaml"
    threads: job_size.EVALUATE_CPUS
    resources:
        **sized_by(job_size.evaluation_size),
        runtime=30,
        scratch=SCRATCH,
    params:
        program=f"{SCRIPTS}/run_program.py",
        publish=f"{SCRIPTS}/publish.py",
        command=lambda wildcards: json.dumps(EXPERIMENT.evaluation),
        settings=json.dumps(EXPERIMENT.parameters_for("evaluation")),
        sources=EXPERIMENT.evaluation_sha256,
        run=lambda wildcards: run_of(wildcards).to_json(),
        places=places_of,
        results=subpath(input.about, parent=True),
    shell:
        "(OMP_NUM_THREADS={threads} python {params.program:q} --evaluation {params.command:q}"
        " --run {params.run:q} --settings {params.settings:q}{params.places} --scratch {resources.scratch} --output {params.results:q}\n"
        "python {params.publish:q} --evaluation={params.sources} --output {params.results:q}"
        ") 2>&1 | tee {log:q}"
