"""The built-in models, each declared once; free of torch, because every dry run reads it."""

import difflib
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from manynodes.base.errors import Refusal
from manynodes.base.optional import timm, torchvision
from manynodes.base.reading import read_bytes
from manynodes.base.sources import MOST_BYTES, local_sources, sources_sha256

# Their first filters bring the principal directions of patches to unit variance, and they have
# filters for Muon, see `networks.Airbench`.
AIRBENCH = ("airbench", "airbench96")
# Each is a function in networks.py, of the widths, the number of classes and of channels.
BUILT_IN_MODELS = (*AIRBENCH, "resnet9", "resnet18", "resnet18_imagenet")
# Of images, in pixels: what its poolings need; the others take any.
LEAST_EDGE = {"airbench": 9, "airbench96": 9, "resnet9": 8}
TIMM = "timm/"


@dataclass(frozen=True)
class Form:
    """What a network takes and gives: uint8 or float images (b, h, w, c), logits (b, classes)."""

    height: int
    width: int
    channels: int
    classes: int


def is_user_model(model: str) -> bool:
    """Whether a model is the user's code: `my_models.py:Net`, `package.module:build`."""
    return ":" in model


def user_file(model: str) -> Path | None:
    """The file of a user's network; None for a module of an installed package."""
    path = model.rpartition(":")[0]
    return Path(path) if path.endswith(".py") else None


def user_sources(model: str) -> dict[str, str]:
    """The texts of a user's network, see `sources.local_sources`; of an installed package, that of
    its module.

    Raises:
        Refusal: it is not there.
    """
    if file := user_file(model):
        return local_sources(file)
    module = model.rpartition(":")[0]
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise Refusal(
            f"model: {model}: there is no module {module} here; install it, or give a file, such "
            "as my_models.py:Net"
        )
    return {f"{module}.py": read_bytes(Path(spec.origin), MOST_BYTES).decode()}


@cache
def code_of(model: str) -> str:
    """SHA-256 of a user's network; empty for any other model."""
    return sources_sha256(user_sources(model)) if is_user_model(model) else ""


def with_network(code_sha256: str, model: str) -> str:
    """SHA-256 of the code of a training: a user's network is code of it too.

    Args:
        code_sha256: of train.py.
    """
    network = code_of(model)
    return sources_sha256({"train.py": code_sha256, "network": network}) if network else code_sha256


@cache
def refuse_unknown_model(name: str) -> None:
    """Refuse a model that nobody has.

    This imports torchvision or timm, which takes seconds, for names outside BUILT_IN_MODELS.

    Raises:
        Refusal: naming the model and the remedy.
    """
    if name in BUILT_IN_MODELS:
        return
    if is_user_model(name):
        if not name.rpartition(":")[2].isidentifier():
            raise Refusal(f"model: {name} is not FILE.py:NAME, such as my_models.py:Net")
        user_sources(name)
        return
    prefix = TIMM if name.startswith(TIMM) else ""
    plain = name.removeprefix(prefix)
    if prefix:
        known, problem = timm().list_models(), f"timm has no {plain}"
    else:
        try:
            models = torchvision().models
        except Refusal as refusal:
            raise Refusal(f"model: {name} is not built in, and {refusal}") from None
        known = [*BUILT_IN_MODELS, *models.list_models(module=models)]
        built_in = ", ".join(BUILT_IN_MODELS)
        problem = f"{name} is neither {built_in} nor a classifier of torchvision.models"
    if plain not in known:
        near = difflib.get_close_matches(plain, known, n=1)
        hint = f"; did you mean {prefix}{near[0]}?" if near else ""
        raise Refusal(f"model: {problem}{hint}")
