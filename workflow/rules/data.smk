"""In: the configuration. Out: results/data/<dataset>/, the arrays and their manifest."""


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
        "../envs/ddp.yaml"
    resources:
        origin=ORIGIN,
    params:
        fetch=f"{SCRIPTS}/fetch.py",
        folder=subpath(output.manifest, parent=True),
    shell:
        "python {params.fetch:q} --dataset {wildcards.dataset} {resources.origin}"
        " --output {params.folder:q} 2>&1 | tee {log:q}"
