"""Which model names there are; free of torch until a name of torchvision's is met."""

import difflib
import warnings
from functools import cache

from ddp.errors import Refusal
from ddp.optional import torchvision

AIRBENCH = ("airbench", "airbench96")
OWN_MODELS = (*AIRBENCH, "resnet9", "resnet18", "resnet18_imagenet")


@cache
def refuse_unfit_model(name: str) -> None:
    """Refuse a model that torchvision does not have, or that does not take 32x32 images.

    Imports torchvision, which takes seconds, so ask only for names outside OWN_MODELS.

    Raises:
        Refusal: naming the model and what would be right.
    """
    import torch

    try:
        models = torchvision().models
    except Refusal as refusal:
        raise Refusal(f"config: model: {name} is not built in, and {refusal}") from None
    known = [*OWN_MODELS, *models.list_models(module=models)]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise Refusal(f"config: model: {name} is neither {', '.join(OWN_MODELS)} nor a classifier of torchvision.models{hint}")
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            network = models.get_model(name, weights=None, num_classes=10)
            output = network.train()(torch.empty(4, 3, 32, 32))
    except Exception as error:
        # The networks raise what their layers raise, from AssertionError to RuntimeError: all mean the same here.
        raise Refusal(f"config: model: {name} does not take 32x32 images: {str(error).splitlines()[0]}") from None
    if not isinstance(output, torch.Tensor):
        raise Refusal(f"config: model: {name} returns auxiliary outputs as well, which this trainer does not use; choose another")
