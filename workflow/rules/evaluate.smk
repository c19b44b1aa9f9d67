"""In: a run's weights and checkpoints, and the test images. Out: evaluation.json, predictions.csv."""


rule evaluate:
    input:
        manifest=data_of,
        model="results/{experiment}/{run}/model.safetensors",
        checkpoints="results/{experiment}/{run}/checkpoints",
    output:
        evaluation="results/{experiment}/{run}/evaluation.json",
        predictions="results/{experiment}/{run}/predictions.csv",
    log:
        "results/{experiment}/{run}/evaluate.log",
    conda:
        "../envs/manynodes.yaml"
    threads: job_size.EVALUATE_CPUS
    resources:
        **sized_by(job_size.evaluation_size),
        runtime=30,
        gpus_here=gpus_to_evaluate,
    params:
        evaluate=f"{SCRIPTS}/evaluate.py",
        data=subpath(input.manifest, parent=True),
        device=lambda wildcards: run_of(wildcards).device,
        views=EXPERIMENT.config["test_views"],
        fold=fold_of,
        trust=trust_of,
        code=code_of_program("evaluate.py"),
    shell:
        "GOMP_SPINCOUNT=10000 OMP_NUM_THREADS={threads}"
        " python {params.evaluate:q}"
        " --data {params.data:q}"
        " --model {input.model:q}"
        " --checkpoints {input.checkpoints:q}"
        " --device {params.device}"
        " --views {params.views}{params.fold}{params.trust}"
        " --output {output.evaluation:q}"
        " 2>&1 | tee {log:q}"
