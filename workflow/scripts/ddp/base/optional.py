"""Packages that a small installation lacks. They are imported on use, which also saves a second
elsewhere.
"""

from types import ModuleType

from ddp.base.errors import Refusal


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
