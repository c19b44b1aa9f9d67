"""The built-in models, each declared once; free of torch, because every dry run reads it."""

import difflib
import warnings
from dataclasses import dataclass
from functools import cache

from ddp.base.errors import Refusal
from ddp.base.optional import torchvision


@dataclass(frozen=True)
class Model:
    """A built-in model.

    Attributes:
        builder: function in networks.py that makes it from the widths and the number of classes.
        description: in a few words, for the documentation.
        widths: it uses the key `widths`.
        muon: its network has filters for Muon, see `Airbench.parameter_groups`.
    """

    builder: str
    description: str
    widths: bool = False
    muon: bool = False


OWN_MODELS = {
    "airbench": Model("airbench", "three blocks, see `widths`", widths=True, muon=True),
    "airbench96": Model("airbench96", "a residual layer more in each", widths=True, muon=True),
    "resnet9": Model("resnet9", "D. Page's"),
    "resnet18": Model("resnet18", "CIFAR stem"),
    "resnet18_imagenet": Model("resnet18_imagenet", "torchvision's as it is"),
}


def with_widths() -> list[str]:
    return [name for name, model in OWN_MODELS.items() if model.widths]


def with_muon() -> list[str]:
    return [name for name, model in OWN_MODELS.items() if model.muon]


@cache
def refuse_unfit_model(name: str) -> None:
    """Refuse a model that torchvision does not have, or that cannot take 32x32 images.

    This imports torchvision, which takes seconds; call it only for names outside OWN_MODELS.

    Raises:
        Refusal: naming the model and the remedy.
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
        raise Refusal(
            f"config: model: {name} is neither {', '.join(OWN_MODELS)} nor a classifier of "
            f"torchvision.models{hint}"
        )
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            network = models.get_model(name, weights=None, num_classes=10)
            output = network.train()(torch.empty(4, 3, 32, 32))
    except Exception as error:
        # The layers raise anything from AssertionError to RuntimeError; all of it means the same
        # here.
        raise Refusal(
            f"config: model: {name} does not take 32x32 images: {str(error).splitlines()[0]}"
        ) from None
    if not isinstance(output, torch.Tensor):
        raise Refusal(
            f"config: model: {name} returns auxiliary outputs as well, which this trainer does not "
            "use; choose another"
        )
