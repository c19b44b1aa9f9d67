"""What contradicts in the parameters; Snakemake asks before any job."""


def check(parameters, geometry, _dataset):
    if parameters["width"] % parameters["heads"]:
        raise ValueError(
            f"heads: {parameters['heads']} do not share a width of {parameters['width']}; use a "
            "divisor of it"
        )
    if parameters["batch_size"] % geometry["world_size"]:
        raise ValueError(
            f"batch_size: {parameters['batch_size']} does not divide among "
            f"{geometry['world_size']} processes; use a multiple"
        )
