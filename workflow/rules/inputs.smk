"""In: the configuration. Out: data sets as arrays with a manifest, and the hashes of the user's files."""


localrules:
    fetch,
    collect,
    pack,


ORIGIN = shlex.join(
    [f"--user-data={EXPERIMENT.user_data.to_json()}"]
    if EXPERIMENT.user_data
    else [
        f"--{key}={EXPERIMENT.config['dataset'][key]}"
        for key in ("source", "archive", "url")
        if (EXPERIMENT.config["dataset"] or {}).get(key) is not None
    ]
)


rule fetch:
    output:
        manifest="results/data/{dataset}/manifest.json",
        arrays=expand(
            "results/data/{{dataset}}/{array}.npy",
            array=["train_images", "train_labels", "test_images", "test_labels"],
        ),
    log:
        "results/data/{dataset}/fetch.log",
    conda:
        "../envs/manynodes.yaml"
    resources:
        origin=ORIGIN,
    params:
        fetch=f"{SCRIPTS}/fetch.py",
        # Changes with the user's own images, and with the form of the manifest.
        content=lambda wildcards: SESSION.inputs.fingerprint or "2",
        folder=subpath(output.manifest, parent=True),
    shell:
        "python {params.fetch:q}"
        " --dataset {wildcards.dataset}"
        " {resources.origin}"
        " --output {params.folder:q}"
        " 2>&1 | tee {log:q}"


rule collect:
    output:
        manifest="results/{experiment}/files/manifest.json",
    log:
        "results/{experiment}/collect.log",
    conda:
        "../envs/manynodes.yaml"
    params:
        collect=f"{SCRIPTS}/collect.py",
        # What begins with a dash would be an option.
        files=lambda wildcards: [
            f"./{path}" if path[:1] == "-" else path
            for path in EXPERIMENT.config["files"]
        ],
        content=lambda wildcards: SESSION.inputs.files_fingerprint,
        folder=subpath(output.manifest, parent=True),
    shell:
        "python {params.collect:q}"
        " --files {params.files:q}"
        " --name {wildcards.experiment}-files"
        " --content {params.content}"
        " --output {params.folder:q}"
        " 2>&1 | tee {log:q}"


rule pack:
    output:
        manifest="results/{experiment}/environment/manifest.json",
    log:
        "results/{experiment}/pack.log",
    conda:
        "../envs/manynodes.yaml"
    params:
        pack=f"{SCRIPTS}/pack.py",
        prefix=lambda wildcards: str(EXPERIMENT.environment.staged_from),
        content=lambda wildcards: EXPERIMENT.environment.contents_sha256,
        # Of an earlier version, an archive of another form is packed again.
        form="tar.zst, noted for its user",
        folder=subpath(output.manifest, parent=True),
    shell:
        "python {params.pack:q}"
        " --prefix {params.prefix:q}"
        " --name {wildcards.experiment}-environment"
        " --output {params.folder:q}"
        " 2>&1 | tee {log:q}"
