"""Conversion of a tree of tensors and plain values to strict JSON and separate tensors, and back.

A tensor's name is the JSON pointer (RFC 6901) of its position. Mappings of tensors that belong to
one agent are packed into one row of bytes: see ``runs/checkpoint.py``, which writes both parts.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from accounting.canonical_json import MAX_INTEGER
from privssl.storage.tensor_files import Item, LazyTensor, LazyTensors, PackedTensors, TensorSlice

Leaf: TypeAlias = Tensor | int | float | str | bool | None
StateTree: TypeAlias = Mapping[str, "StateTree"] | tuple["StateTree", ...] | Leaf


def outline(
    tree: StateTree | LazyTensor, pointer: str, tensors: dict[str, Item], forms: dict[str, int],
    left: int = -1,
) -> Any:  # fmt: skip
    """Return a tree as JSON, and move its tensors to ``tensors`` under their JSON pointers.

    Mappings of tensors at depth ``left`` are packed, and their layouts moved to ``forms``.
    """

    def outline_branch(branch: Any, name: str, left: int = -1) -> Any:
        return outline(branch, f"{pointer}/{name}", tensors, forms, left)

    if isinstance(tree, Tensor | LazyTensor):
        tensors[pointer or "/"] = tree
        return {"tensor": pointer or "/"}
    if isinstance(tree, Mapping):
        if not all(isinstance(key, str) for key in tree):
            raise TypeError(f"a key at {pointer or '/'} of a state tree is not text")
        items: Any = tree.lazy_tensors() if isinstance(tree, LazyTensors) else tree
        leaves = {k: v for k, v in items.items() if isinstance(v, Tensor | LazyTensor)}
        if left == 0 and leaves and len(leaves) == len(items):
            packed = tensors[pointer] = PackedTensors(leaves)
            form = json.dumps(packed.form())  # there are many agents, but few layouts
            return {"packed": [pointer, forms.setdefault(form, len(forms))]}
        return {
            "mapping": {k: outline_branch(v, _escape_key(k), left - 1) for k, v in items.items()}
        }
    if isinstance(tree, tuple):
        return {"tuple": [outline_branch(v, str(i)) for i, v in enumerate(tree)]}
    if isinstance(tree, float) and not math.isfinite(tree):
        return {"float": repr(tree)}  # strict JSON has no infinity
    if isinstance(tree, int) and abs(tree) > MAX_INTEGER:
        return {"int": str(tree)}  # nor integers beyond 53 bits
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise TypeError(f"{pointer or '/'} of a state tree is a {type(tree).__name__}")


def _escape_key(key: str) -> str:
    """Escape one step of a JSON pointer, so that different keys give different pointers.

    >>> _escape_key("a/b"), _escape_key("a~1b")
    ('a~1b', 'a~01b')
    """
    return key.replace("~", "~0").replace("/", "~1")


def filled(shape: Any, tensors: LazyTensors, forms: Sequence[Mapping[str, TensorSlice]]) -> Any:
    """Invert ``outline``; packed mappings stay unread."""
    if not isinstance(shape, dict):
        if isinstance(shape, list):
            raise TypeError("a bare list")
        return shape
    [(kind, value)] = shape.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "packed":
        pointer, number = value
        if type(number) is not int or number < 0:
            raise ValueError(f"form {number!r}")
        return tensors.within(pointer, forms[number])
    if kind == "mapping":
        return {key: filled(item, tensors, forms) for key, item in value.items()}
    if kind == "tuple":
        return tuple(filled(item, tensors, forms) for item in value)
    if kind == "float":
        return float(value)
    if kind == "int":
        return int(value)
    raise ValueError(f"unknown kind {kind!r}")
