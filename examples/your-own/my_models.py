"""A network of your own: any torch module that takes (images, channels, height, width)."""

from torch import Tensor, nn


class Net(nn.Module):
    """Three convolutions and a linear layer.

    Args:
        classes, channels, _image_size: of the data; the workflow gives them, in this order.
        width: channels of the first layer; from `model_args`.
    """

    def __init__(
        self, classes: int, channels: int, _image_size: tuple[int, int], width: int = 16
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *self.block(channels, width),
            *self.block(width, 2 * width),
            *self.block(2 * width, 4 * width),
        )
        self.head = nn.Linear(4 * width, classes)

    @staticmethod
    def block(channels_in: int, channels_out: int) -> list[nn.Module]:
        return [
            nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).amax((2, 3)))
