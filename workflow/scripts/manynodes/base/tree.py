"""Nested dicts and lists with tensors, as bytes without executable content: a safetensors file with
JSON in its header.
"""

import json
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from manynodes.base.reading import parse_json

# In the JSON a tensor is {"tensor": number} and a dict {"items": [[key, value], …]}, because keys
# may be numbers.
Tree = dict[Any, Any] | list[Any] | Tensor | str | int | float | bool | None


def encode(tree: Tree) -> bytes:
    """Encode dicts, lists, tensors, text, finite numbers and None. A tuple becomes a list."""
    tensors: dict[str, Tensor] = {}
    memory: set[int] = set()

    def plain(node: Any) -> Any:
        if isinstance(node, Tensor):
            name = str(len(tensors))
            own = node.detach().cpu().contiguous()
            # safetensors refuses tensors that share memory.
            start = own.untyped_storage().data_ptr()
            tensors[name] = own.clone() if start in memory else own
            memory.add(start)
            return {"tensor": name}
        if isinstance(node, dict):
            return {"items": [[key, plain(value)] for key, value in node.items()]}
        return [plain(value) for value in node] if isinstance(node, list | tuple) else node

    text = json.dumps(plain(tree), allow_nan=False)
    return safetensors.torch.save(tensors, {"tree": text})


def decode(content: bytes) -> Any:
    """Decode what `encode` returned; tensors are on the CPU.

    Raises:
        ValueError: the bytes are something else.
    """
    try:
        tensors = safetensors.torch.load(content)
        header = parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
        return rebuilt(parse_json(header["__metadata__"]["tree"]), tensors)
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a tree of tensors: {error}") from None


def rebuilt(node: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(node, list):
        return [rebuilt(value, tensors) for value in node]
    if not isinstance(node, dict):
        return node
    if set(node) == {"tensor"}:
        return tensors[node["tensor"]]
    return {key: rebuilt(value, tensors) for key, value in node["items"]}
