"""One interface for all networks: images in, logits out."""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from classifier.models import networks
from classifier.models.names import BUILT_IN_MODELS, TIMM, is_user_model, user_file, user_sources
from manynodes.base.errors import Refusal, one_line
from manynodes.base.optional import timm, torchvision
from manynodes.base.sources import member, run_sources, user_error

# Minimum ratio of a training's steps to the steps that BatchNorm's running statistics average over.
BATCHNORM_WINDOWS = 20


class Classifier(nn.Module):
    """A network with the normalisation of its training images, complete in one weights file.

    Args:
        network: from normalised images, float (b, c, h, w) in channels_last order, to logits
            (b, classes).
        description: arguments with which `build` makes the same network again.
        channels: c.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, description: dict[str, Any], channels: int) -> None:
        super().__init__()
        self.network = network
        self.description = description
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("std", torch.ones(channels))

    def forward(self, images: Tensor) -> Tensor:
        """Logits, float32 (b, classes), of uint8 or float images (b, h, w, c)."""
        # A permuted NHWC tensor is already an NCHW tensor in channels_last order: nothing is
        # copied.
        normalised = (images.to(torch.float32) - self.mean) / self.std
        return self.network(normalised.permute(0, 3, 1, 2))

    def move_to(self, device: torch.device) -> Self:
        """Move it to a device, with its filters in the best memory format there."""
        # A GPU would convert the filters to the format of the images in every step. A CPU converts
        # them to a format of its own anyway, and there torch's fused optimizers copy filters that
        # are not contiguous: 9 % of a ResNet-18's step (measured).
        return self.to(device).to(
            memory_format=torch.channels_last if device.type == "cuda" else torch.preserve_format
        )

    @torch.no_grad()
    def fit(self, mean: Tensor, std: Tensor, first: Tensor) -> None:
        """Set what is computed from the training images, and not learned.

        Args:
            mean, std: of each channel, float64 (c,), see `moments`.
            first: the first images, (n, h, w, c), as many as `some` says.
        """
        self.mean.copy_(mean)
        self.std.copy_(std)
        if fit := getattr(self.network, "fit_to", None):
            with refusing_user_errors(self.description["model"]):
                fit(((first.to(torch.float32) - self.mean) / self.std).permute(0, 3, 1, 2))

    def average_recent_steps(self, steps: int) -> None:
        """Let every BatchNorm average over at most the last 20th of the training.

        The networks of torchvision average over 10 to 100 steps (momentum 0.1 to 0.01). In a
        training of some hundred steps, these statistics lag so far behind the weights that
        validation is at chance level (measured: mobilenet_v3_small, 63 % training, 9.7 %
        validation).
        """
        for module in self.modules():
            if isinstance(module, _BatchNorm) and module.momentum is not None:
                module.momentum = max(module.momentum, min(1.0, BATCHNORM_WINDOWS / steps))

    def parameter_groups(self, weight_decay: float, muon: bool = False) -> list[dict[str, Any]]:
        """Optimizer groups with a `rate`, the factor on the learning rate; the decay per step
        is equal.

        Args:
            muon: put the filters into their own group, marked `filters`, see `optimizers.Muon`.

        Raises:
            Refusal: the groups that the user's network gives cannot be used.
        """
        own = getattr(self.network, "parameter_groups", None)
        with refusing_user_errors(self.description["model"]):
            special = self.trained_groups(own(weight_decay, muon) if own else [])
        apart = {id(parameter) for group in special for parameter in group["params"]}
        rest = [p for p in self.parameters() if p.requires_grad and id(p) not in apart]
        groups = [{"params": rest, "rate": 1.0, "weight_decay": weight_decay}, *special]
        usual = {"filters": False, "rate": 1.0, "weight_decay": weight_decay}
        return [usual | group for group in groups if group["params"]]

    def trained_groups(self, groups: Iterable[Any]) -> list[dict[str, Any]]:
        """The optimizer groups that the network gives, with the parameters that are trained.

        Raises:
            Refusal: they are no groups of its parameters, or one of these is there twice.
        """
        names = {id(parameter): name for name, parameter in self.network.named_parameters()}
        found, known = [], set()
        for group in groups:
            if not isinstance(group, dict) or "params" not in group:
                raise Refusal(
                    f"parameter_groups gives a {type(group).__name__}; give groups such as "
                    '{"params": self.head.parameters(), "rate": 2.0}'
                )
            if "lr" in group:
                raise Refusal(
                    "parameter_groups gives lr, which learning_rate and schedule set in each step; "
                    "give rate, a factor of it"
                )
            # A single one, or an iterator, which can be read once.
            params = group["params"]
            given = [params] if isinstance(params, Tensor) else list(params)
            # A tied one is there twice.
            given = list({id(each): each for each in given}.values())
            for parameter in given:
                if (name := names.get(id(parameter))) is None:
                    raise Refusal(
                        f"parameter_groups gives a {type(parameter).__name__} that is no parameter "
                        "of the network; give those of its layers, such as self.head.parameters()"
                    )
                if name in known:
                    raise Refusal(f"parameter_groups gives {name} twice; give it once")
                known.add(name)
            found.append(group | {"params": [p for p in given if p.requires_grad]})
        return found


# Arguments of timm's and torchvision's with which they read other files, some of them with pickle.
FOREIGN = {
    *("weights", "weights_backbone", "pretrained_backbone"),
    *("checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay"),
    *("cache_dir", "scriptable", "exportable", "no_jit"),
}
# The images that networks without a size in their description are for.
USUAL = (32, 32, 3)
# Bytes of the first training images from which a network may set its own filters.
FIRST = 2000 * 32 * 32 * 3


def some(images: Tensor) -> int:
    """How many of the first training images a network sees before it is trained."""
    return max(16, FIRST // int(images[0].numel()))


def build(
    model: str,
    widths: Sequence[int],
    classes: int,
    image_shape: Sequence[int] = USUAL,
    model_args: Mapping[str, Any] | None = None,
    sources: Mapping[str, str] | None = None,
    stored_size: Sequence[int] | None = None,
    test_size: Sequence[int] | None = None,
    class_names: Sequence[str] | None = None,
    dtype: str = "uint8",
    jpeg_scaling: bool = False,
) -> Classifier:
    """A model by its name in the configuration, initialised from torch's global generator.

    A name that is not in BUILT_IN_MODELS is the user's, timm's or torchvision's.

    Args:
        image_shape: (h, w, c) of the images that it is trained on.
        model_args: for the user's model, timm's or torchvision's.
        sources: the texts of the user's files; those on the disk unless given.
        stored_size: height and width of the images of the data set, if they are not those of
            image_shape.
        test_size: height and width of the middle of an image that evaluation sees.
        dtype: of the images of the data set.
        jpeg_scaling: of `pictures.decoded` for them.

    Raises:
        Refusal: the user's code fails, or the arguments are not the model's.
    """
    description: dict[str, Any] = {"model": model, "widths": list(widths), "classes": classes}
    given = {
        "image_shape": () if tuple(image_shape) == USUAL else image_shape,
        "model_args": model_args,
        "stored_size": stored_size,
        "test_size": test_size,
        "class_names": class_names,
        "dtype": "" if dtype == "uint8" else dtype,
        "jpeg_scaling": jpeg_scaling,
    }
    # Without what is as usual: the bytes of such a weights file are the same in all versions.
    description |= {name: value for name, value in given.items() if value}
    height, width, channels = image_shape
    arguments = dict(model_args or {})
    if is_user_model(model):
        description["sources"] = dict(sources or user_sources(model))
        network = user_network(
            model, description["sources"], classes, channels, (height, width), arguments
        )
    elif foreign := set(arguments) & FOREIGN:
        raise Refusal(f"model_args: {sorted(foreign)[0]} reads other files; leave it out")
    elif model in BUILT_IN_MODELS:
        if arguments:
            raise Refusal(f"model_args: {model} takes none; leave it out")
        network = getattr(networks, model)(widths, classes, channels)
    else:
        network = library_network(model, classes, channels, arguments)
    return Classifier(network, description, channels)


def library_network(
    model: str, classes: int, channels: int, arguments: dict[str, Any]
) -> nn.Module:
    """A network of timm's or torchvision's, untrained.

    Raises:
        Refusal: it is not for such images, or the arguments are not its own.
    """
    if model.startswith(TIMM):
        return timm().create_model(
            model.removeprefix(TIMM),
            pretrained=False,
            num_classes=classes,
            in_chans=channels,
            **arguments,
        )
    try:
        network: nn.Module = torchvision().models.get_model(
            model, weights=None, num_classes=classes, **arguments
        )
    except (TypeError, ValueError) as error:
        if not arguments:
            raise
        raise Refusal(f"model_args: {one_line(str(error), 150)}") from None
    if channels == 1:
        # They take RGB only. A hook, so that the weights keep their names.
        network.register_forward_pre_hook(lambda _, given: (given[0].expand(-1, 3, -1, -1),))
    elif channels != 3:
        raise Refusal(
            f"model: {model} takes grey or RGB images, these have {channels} channels; give "
            f"timm/{model} or a network of your own"
        )
    return network


def user_network(
    model: str,
    sources: Mapping[str, str],
    classes: int,
    channels: int,
    size: tuple[int, int],
    arguments: dict[str, Any],
) -> nn.Module:
    """A network from the user's code.

    Raises:
        Refusal: the code fails, or returns something else.
    """
    make, name, file = user_maker(model, sources)
    try:
        network = make(classes, channels, size, **arguments)
    except Exception as error:
        raise Refusal(user_error(error, file)) from None
    if not isinstance(network, nn.Module):
        raise Refusal(f"{name} of {file.name} returns {type(network).__name__}, not a torch module")
    tensors = (*network.parameters(), *network.buffers())
    if any(isinstance(each, UninitializedParameter | UninitializedBuffer) for each in tensors):
        raise Refusal(f"{name} of {file.name} has lazy layers; give them their sizes")
    return network


@contextmanager
def refusing_user_errors(model: str) -> Iterator[None]:
    """Refuse with its line what a method of a user's network raises; an error of another network
    is one of this software.

    Raises:
        Refusal: the user's code fails.
    """
    try:
        yield
    except (Refusal, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if not is_user_model(model):
            raise
        path = model.rpartition(":")[0]
        raise Refusal(user_error(error, Path(path))) from None


def user_maker(model: str, sources: Mapping[str, str]) -> tuple[Callable[..., Any], str, Path]:
    """The class or function that makes the user's network, its name, and its file.

    Raises:
        Refusal: the code fails, or has no such name.
    """
    path, _, name = model.rpartition(":")
    file = user_file(model) or Path(f"{path}.py")
    if user_file(model):
        module = run_sources(sources)
    elif user_sources(model) == dict(sources):
        module = importlib.import_module(path)
    else:
        raise Refusal(
            f"{path} here is not the one that this network was trained with; install that version"
        )
    return member(module, name, file), name, file


def images_sums(images: Tensor) -> Tensor:
    """What `moments` needs, added up over parts of the training images.

    Of uint8 images the number of pixels by channel and level, int64 (c, 256): sums of integers are
    exact in any order, and need no float copy of all pixels. Of float images (n, h, w, c) each
    image's sums of pixels and of squares, float64 (n, c, 2).
    """
    if images.dtype == torch.uint8:
        return torch.stack(
            [
                torch.bincount(images[..., channel].flatten(), minlength=256)
                for channel in range(images.shape[3])
            ]
        )
    pixels = images.double()
    return torch.stack((pixels.sum(dim=(1, 2)), (pixels**2).sum(dim=(1, 2))), dim=2)


def moments(sums: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, float64 (c,).

    Args:
        sums: from `images_sums`, of all training images.
        images: any of them.

    Raises:
        Refusal: a channel is the same everywhere.
    """
    if images.dtype == torch.uint8:
        levels = torch.arange(256, dtype=torch.float64, device=sums.device)
        found = []
        for share in sums.to(torch.float64) / sums[0].sum():
            mean = (share * levels).sum()
            # From the mean in single precision, as it is used.
            found.append((mean, (share * (levels - mean.float()) ** 2).sum().sqrt()))
        mean, std = (torch.stack(column) for column in zip(*found, strict=True))
    else:
        mean, squares = (sums.sum(dim=0) / (len(sums) * images[0, ..., 0].numel())).unbind(1)
        std = (squares - mean**2).clamp(min=0).sqrt()
    if not (std > 0).any():
        raise Refusal("all training images are the same; there is nothing to learn from them")
    # A channel without variance stays as it is.
    return mean, torch.where(std > 0, std, torch.ones_like(std))
