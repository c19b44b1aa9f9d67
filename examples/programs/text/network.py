"""A character-level transformer, and the text that it reads."""

import torch
from torch import Tensor, nn

import launched

HELD_OUT = 10  # the last tenth of the text is for evaluation
BYTES = 256


class Network(nn.Module):
    """Logits of the next byte (b, t, 256) at every place of windows of bytes (b, t)."""

    def __init__(self, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, width)
        self.places = nn.Parameter(torch.zeros(context, width))
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, BYTES)

    def forward(self, windows: Tensor) -> Tensor:
        length = windows.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=windows.device)
        inside = self.bytes(windows) + self.places[:length]
        return self.head(self.blocks(inside, mask=mask, is_causal=True))


def made(parameters: dict) -> Network:
    return Network(*(parameters[key] for key in ("context", "width", "heads", "layers")))


def text(split: str) -> Tensor:
    """The bytes of the staged files in the order of their names: `train` or the rest, `test`."""
    paths = sorted(path for path in launched.files.rglob("*") if path.suffix in (".md", ".txt"))
    whole = torch.frombuffer(
        bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8
    )
    end = len(whole) - len(whole) // HELD_OUT
    return (whole[:end] if split == "train" else whole[end:]).long()
