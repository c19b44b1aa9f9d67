"""Packages that a small installation lacks. They are imported on use, which also saves a second
elsewhere.
"""

from functools import cache
from types import ModuleType, SimpleNamespace

from manynodes.base.errors import Refusal


def torchvision() -> ModuleType:
    """torchvision, with its data sets and models.

    Raises:
        Refusal: it is not installed, or not for this torch.
    """
    try:
        import torchvision
        import torchvision.datasets
        import torchvision.models
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise Refusal(
            f"torchvision cannot be imported ({reason}); install it, or do without: "
            "docs/environments.md"
        ) from None
    return torchvision


def timm() -> ModuleType:
    """timm, with its models.

    Raises:
        Refusal: it is not installed.
    """
    try:
        import timm
    except ImportError:
        raise Refusal("timm is not installed here; pip install timm") from None
    return timm


@cache
def tensorboard() -> SimpleNamespace:
    """What writes TensorBoard's event files: Event, EventFileWriter, Summary and hparams.

    Raises:
        Refusal: it is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise Refusal("tensorboard is not installed here; pip install tensorboard") from None
    return SimpleNamespace(
        Event=Event, EventFileWriter=EventFileWriter, Summary=Summary, hparams=hparams_pb
    )
