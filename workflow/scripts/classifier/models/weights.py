"""Weights files: safetensors with a description of their network."""

import io
import json
import pickle
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from classifier.models.classifier import Classifier, build
from classifier.models.names import BUILT_IN_MODELS, TIMM, is_user_model
from manynodes.base import atomic
from manynodes.base.errors import Refusal
from manynodes.base.optional import timm, torchvision
from manynodes.base.reading import parse_json, read_bytes
from manynodes.base.sources import MOST_BYTES, sources_sha256

# Limits for the description in a weights file.
MOST_CHANNELS = 4096
MOST_CLASSES = 1_000_000
MOST_EDGE = 100_000
T = TypeVar("T")
# Of the names in a `Classifier`.
NETWORK = "network."
# What DistributedDataParallel and torch.compile put before names.
WRAPPED = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod)\.")
# Between the ranges of images that one network takes; 0 to 1 and 0 to 255 are 255 apart.
MOST_SCALE = 10


def write(tensors: Mapping[str, Tensor], description: dict[str, Any], path: Path) -> None:
    """Write weights and description of a classifier atomically as safetensors.

    Args:
        tensors: of its `state_dict`, on the CPU.
    """
    # A copy, because safetensors refuses weights that share memory.
    own = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    # A single metadata key: safetensors writes several in varying order, and the file must be
    # reproducible.
    metadata = {"classifier": json.dumps(description)}
    atomic.write_bytes(path, safetensors.torch.save(own, metadata=metadata))


def load(path: Path | str, trusted: str | None = None) -> Classifier:
    """The classifier in a weights file. It is built only if the file holds exactly its tensors.

    The file of a user's own network holds its Python code, which runs when it is built.

    Args:
        trusted: SHA-256 of the code that may run, see `sources.sources_sha256`; `any` for all.

    Raises:
        Refusal: the file is missing, damaged, not written by `write`, or brings other code.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise FileNotFoundError if not path.exists() else ValueError("it is not a regular file")
        with safetensors.safe_open(path, framework="pt") as file:
            description = described((file.metadata() or {})["classifier"])
            refuse_foreign_code(path, description, trusted)
            shapes = shapes_of(file)
            # A user's network may compute with its weights when it is built; on `meta` there are
            # none.
            with torch.device("cpu" if "sources" in description else "meta"):
                wanted = {
                    name: tuple(tensor.shape)
                    for name, tensor in build(**description).state_dict().items()
                }
            if shapes != wanted:
                raise ValueError("its tensors are not those of the network that it describes")
            tensors = {name: file.get_tensor(name) for name in shapes}
        classifier = build(**description)
        if any(
            tensor.dtype != tensors[name].dtype for name, tensor in classifier.state_dict().items()
        ):
            raise ValueError("its tensors are of another type")
        # A user's network may have buffers such as masks with infinities.
        learned = {name for name, _ in classifier.named_parameters()} | {"mean", "std"}
        if not all(tensors[name].isfinite().all() for name in learned & set(tensors)):
            raise ValueError("a weight is not finite")
        classifier.load_state_dict(tensors)
    except FileNotFoundError:
        raise Refusal(f"{path} is not there; train the run first") from None
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise Refusal(
            f"{path} is damaged or was not written by this workflow: {str(error).splitlines()[0]}"
        ) from None
    return classifier


def warm_start(classifier: Classifier, path: Path, tell: Callable[[str], None]) -> None:
    """Start from the tensors of a weights file that fit, by name and shape.

    Args:
        path: of a finished run, or a state dict of the network (`.safetensors`, or `.pt`, from
            which only tensors are read).
        tell: gets a line that names the tensors that do not fit.

    Raises:
        Refusal: the file cannot be read, or no tensor of it fits.
    """
    read = read_tensors(path)
    own = classifier.state_dict()
    refuse_unfit_weights({name: tensor.shape for name, tensor in read.items()}, path, classifier)
    given = in_classifier(read, own.keys())
    good = {
        name: tensor
        for name, tensor in given.items()
        if name in own and own[name].shape == tensor.shape
    }
    if not all(tensor.isfinite().all() for tensor in good.values() if tensor.is_floating_point()):
        raise Refusal(f"initial_weights: {path} has weights that are not finite")
    if "std" in good:
        scale = float(good["std"].double().mean() / own["std"].double().mean())
        if not 1 / MOST_SCALE <= scale <= MOST_SCALE:
            raise Refusal(
                f"initial_weights: the images of {path} vary {scale:.3g} times as much as these; "
                "bring both to one range, such as 0 to 255"
            )
    classifier.load_state_dict(good, strict=False)
    # Another program's file has no normalisation of the images, and nothing of it is missing there.
    wanted = {name: tensor for name, tensor in own.items()
              if name.startswith(NETWORK) or name in given}  # fmt: skip
    anew = [
        f"{name} {tuple(tensor.shape)}"
        + (f", there {tuple(given[name].shape)}" if name in given else "")
        for name, tensor in wanted.items()
        if name not in good
    ]
    unused = sorted(set(given) - set(own))
    words = f"initial_weights: {len(good)} of {len(wanted)} tensors from {path}"
    if anew:
        words += f"; these do not fit and start anew: {'; '.join(anew)}"
    if len(wanted) < len(own):
        words += "; images are normalised by the mean and std of these training images"
    if unused:
        words += f"; these are not used: {', '.join(unused)}"
    tell(words)


def refuse_unfit_weights(
    shapes: Mapping[str, tuple[int, ...]], path: Path, classifier: Classifier
) -> None:
    """Refuse weights of which no tensor fits the network, by name and shape.

    Args:
        shapes: of the tensors in the file at `path`, see `read_tensors`.

    Raises:
        Refusal: no tensor fits. Those of the normalisation around the network fit any.
    """
    own = {name: tensor.shape for name, tensor in classifier.state_dict().items()}
    given = in_classifier(shapes, own.keys())
    fits = (name for name, shape in given.items() if own.get(name) == shape)
    if not any(name.startswith(NETWORK) for name in fits):
        remedy = "use the same model, widths and model_args"
        # What another program has around the same network.
        plain = {
            WRAPPED.sub("", name).removeprefix(NETWORK): shape for name, shape in shapes.items()
        }
        prefixes = {name.partition(".")[0] for name in plain}
        if len(prefixes) == 1 and any(
            own.get(NETWORK + name.partition(".")[2]) == shape for name, shape in plain.items()
        ):
            remedy = f"all names begin with {prefixes.pop()}. there; save it without that"
        raise Refusal(
            f"initial_weights: no tensor of {path} fits this network, by name and shape; {remedy}"
        )


@cache
def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a file, by name; read once, since many runs may start from it.

    Raises:
        Refusal: as `read_tensors`.
    """
    with suppress(SafetensorError, OSError):
        # Without the tensors, which may have gigabytes.
        if path.suffix == ".safetensors":
            with safetensors.safe_open(path, framework="pt") as file:
                if shapes := shapes_of(file):
                    return shapes
    return {name: tuple(tensor.shape) for name, tensor in read_tensors(path).items()}


def shapes_of(file: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in an open safetensors file, by name."""
    names = file.keys()  # it is no mapping
    return {name: tuple(file.get_slice(name).get_shape()) for name in names}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors in a file, by their names there.

    Raises:
        Refusal: it is not there, or holds something else.
    """
    try:
        found: Any
        if path.suffix == ".safetensors":
            found = safetensors.torch.load(read_bytes(path))
        else:
            found = torch.load(io.BytesIO(read_bytes(path)), "cpu", weights_only=True)
        for key in ("state_dict", "model_state_dict", "model"):
            if isinstance(found, dict) and isinstance(found.get(key), dict):
                found = found[key]
        if not isinstance(found, dict) or not found:
            raise ValueError("it is not a state dict")
        if not all(
            isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in found.items()
        ):
            raise ValueError("it holds other things than tensors")
    except OSError as error:
        raise Refusal(f"initial_weights: {path}: {error.strerror}") from None
    except Exception as error:
        # torch.load raises anything from EOFError to UnpicklingError, which tells how to run code.
        text = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, pickle.UnpicklingError):
            text = "it is no state dict of tensors; save the network's state_dict()"
        raise Refusal(f"initial_weights: {path} is not a weights file: {text}") from None
    return found


def in_classifier(found: Mapping[str, T], own: Collection[str]) -> dict[str, T]:
    """The same by the names that a `Classifier` has: those in the file as they are, or without what
    is wrapped around all of it; the first way by which most fit.

    Args:
        own: its names. A layer of it may be called like a wrapper.
    """
    ways = [list(found)]
    while all(map(WRAPPED.match, ways[-1])):
        ways.append([WRAPPED.sub("", name, 1) for name in ways[-1]])
    # A bare state dict knows nothing of our normalisation around its network.
    named = [
        unwrapped([prefix + name for name in way], own) for way in ways for prefix in ("", NETWORK)
    ]
    best = max(named, key=lambda names: len({*names}.intersection(own)))
    return dict(zip(best, found.values(), strict=True))


def unwrapped(names: Sequence[str], own: Collection[str]) -> list[str]:
    """Of the names those as they are that the classifier has; for others the one that it has which
    differs in wrappers only, if there is just one and the file does not have it.
    """
    plain, given = {name: WRAPPED.sub("", name) for name in (*own, *names)}, {*names}
    times = Counter(plain[name] for name in own)
    known = {plain[name]: name for name in own if times[plain[name]] == 1 and name not in given}
    return [name if name in own else known.get(plain[name], name) for name in names]


def refuse_foreign_code(path: Path, description: dict[str, Any], trusted: str | None) -> None:
    """Refuse to run code that nobody has trusted.

    Raises:
        Refusal: naming the code, and how to trust it.
    """
    if "sources" not in description or trusted == "any":
        return
    found = sources_sha256(description["sources"])
    if trusted != found:
        first = next(iter(description["sources"]))
        raise Refusal(
            f"{path} brings Python code ({first}) that would run here; "
            'if you trust it, add --trust-code; in Python, trusted="any"'
        )


def described(text: str) -> dict[str, Any]:
    """The description in a weights file: arguments of `build`.

    Raises:
        ValueError: there is no valid one.
    """
    found = parse_json(text)
    usual = {"model", "widths", "classes"}
    if not isinstance(found, dict) or not usual <= set(found) <= {*CHECKS, "sources"}:
        raise ValueError("it has no description of a network")
    model = found["model"]
    good = (
        all(check(found[key]) for key, check in CHECKS.items() if key in found)
        and len(found.get("class_names", [])) in (0, found["classes"])
        and is_user_model(model) == ("sources" in found)
    )
    if not good or not (is_user_model(model) or known(model)):
        raise ValueError("its description is of no network")
    sources = found.get("sources", {"x.py": ""})
    if not isinstance(sources, dict) or not sources or not all(map(good_source, sources.items())):
        raise ValueError("its code is not that of a network")
    return found


def whole_numbers(value: Any, count: int, most: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == count
        and all(type(number) is int and 1 <= number <= most for number in value)
    )


# What a description may say besides the code of a user's network.
CHECKS: dict[str, Callable[[Any], bool]] = {
    "model": lambda value: isinstance(value, str),
    "widths": lambda value: whole_numbers(value, 3, MOST_CHANNELS),
    "classes": lambda value: whole_numbers([value], 1, MOST_CLASSES),
    "image_shape": lambda value: whole_numbers(value, 3, MOST_EDGE),
    "stored_size": lambda value: whole_numbers(value, 2, MOST_EDGE),
    "test_size": lambda value: whole_numbers(value, 2, MOST_EDGE),
    "model_args": lambda value: isinstance(value, dict),
    "class_names": lambda value: (
        isinstance(value, list) and all(isinstance(name, str) for name in value)
    ),
    "dtype": lambda value: value in ("uint8", "float32"),
    "jpeg_scaling": lambda value: value is True,
}


def good_source(entry: tuple[str, Any]) -> bool:
    """Whether a name and a text can be written to a folder, and nowhere else."""
    name, text = entry
    path = PurePosixPath(name)
    inside = not path.is_absolute() and ".." not in path.parts and "\0" not in name
    return inside and path.suffix == ".py" and isinstance(text, str) and len(text) <= MOST_BYTES


def known(model: str) -> bool:
    # Other builders of torchvision, for detection for instance, download weights.
    if model in BUILT_IN_MODELS:
        return True
    if model.startswith(TIMM):
        return model.removeprefix(TIMM) in timm().list_models()
    return model in torchvision().models.list_models(module=torchvision().models)
