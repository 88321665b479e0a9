"""Tensors in a file: written and read one at a time, so that no more than one is held twice.

``safetensors`` itself takes all tensors of a file at once and, with its bytes, holds them twice
more. Here a file of the very same bytes is written from tensors of which each may lie elsewhere,
also in another file, and is read as a mapping that holds names and places alone: a tensor is
read anew each time it is asked for. The library still judges what is read: whether a header is
one, and fits its file, is for ``safetensors`` to say.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from privssl.errors import RunFolderError
from privssl.storage import atomic_files

# In the order of safetensors: what needs the widest alignment stands last here, first in a file.
_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32",
    torch.float64: "F64", torch.int64: "I64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_RANKS = {dtype: rank for rank, dtype in enumerate(_NAMES)}

MAX_HEADER_BYTES = 100_000_000  # what safetensors opens
_CHUNK = 2**20  # bytes that are read at once to be hashed
_LARGEST, _MOST_SIZES = 2**48, 64  # numbers and sizes of a tensor, more than there will ever be

#: Reads bytes of a file: (from where, how many) -> so many bytes. Raises OSError.
Read = Callable[[int, int], bytearray]


@dataclass(frozen=True)
class TensorSlice:
    """A tensor's type and shape, and the byte at which it begins."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int

    @property
    def size(self) -> int:
        """Bytes, >= 0."""
        return math.prod(self.shape) * self.dtype.itemsize


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, each read anew whenever it is asked for: nobody can write into them."""

    __slots__ = ("__weakref__", "_places", "_read", "_start")

    def __init__(self, read: Read, places: Mapping[str, TensorSlice], start: int = 0) -> None:
        """``start`` is added to every place, so that many mappings can share their places."""
        self._read, self._places, self._start = read, places, start

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        if not place.size:
            return torch.empty(place.shape, dtype=place.dtype)
        data = self._read(self._start + place.at, place.size)
        return torch.frombuffer(data, dtype=place.dtype).reshape(place.shape)

    def __contains__(self, name: object) -> bool:
        return name in self._places  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def lazy_tensors(self) -> dict[str, "LazyTensor"]:
        """Its tensors by name, none of them read."""
        return {name: LazyTensor(self, name) for name in self._places}

    def within(self, name: str, places: Mapping[str, TensorSlice]) -> "LazyTensors":
        """The tensors of which one of these is packed. They may share their places with others.

        Raises:
            KeyError: it is missing.
            ValueError: it is no row of as many bytes as they take.
        """
        packed = self._places[name]
        if packed.dtype != torch.uint8 or packed.size != sum(
            place.size for place in places.values()
        ):
            raise ValueError(f"{name} is not what is said to lie in it")
        return LazyTensors(self._read, places, self._start + packed.at)


class LazyTensor(NamedTuple):
    """A tensor that lies in a file."""

    where: LazyTensors
    name: str

    @property
    def dtype(self) -> torch.dtype:
        return self.where._places[self.name].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.where._places[self.name].shape

    def read(self) -> Tensor:
        """The tensor."""
        return self.where[self.name]


class PackedTensors(NamedTuple):
    """Tensors that a file lists as one row of bytes, in which they lie one behind the other.

    What single agents hold has the same names and shapes at all of them, and would fill the list
    with these, once for each agent.
    """

    tensors: Mapping[str, Tensor | LazyTensor]

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(math.prod(t.shape) * t.dtype.itemsize for t in self.tensors.values()),)

    def form(self) -> dict[str, Any]:
        """Names, types and shapes in order, as JSON."""
        check_types(self.tensors)
        return {name: [_NAMES[t.dtype], list(t.shape)] for name, t in self.tensors.items()}


def places_in(form: Mapping[str, Any]) -> dict[str, TensorSlice]:
    """Where the tensors of a ``PackedTensors.form`` lie in it.

    Raises:
        LookupError, TypeError, ValueError: it is none.
    """
    found: dict[str, TensorSlice] = {}
    at = 0
    for name, (dtype, shape) in form.items():
        if len(shape) > _MOST_SIZES or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"{name} has no shape of a tensor")
        if math.prod(max(n, 1) for n in shape) >= _LARGEST:
            raise ValueError(f"{name} is larger than any tensor")
        found[name] = place = TensorSlice(_DTYPES[dtype], tuple(shape), at)
        at += place.size
    return found


Item: TypeAlias = Tensor | LazyTensor | PackedTensors  # of a file

# Writing ------------------------------------------------------------------------------------


def save_weights(
    path: Path, weights: Mapping[str, Tensor], about: Mapping[str, Any] | None = None
) -> None:
    """Write a plain state dict, loadable by safetensors alone. Raises RunFolderError.

    Args:
        about: what a user of the weights must know; in the file's metadata, as JSON.
    """
    # One key: safetensors writes several in an order of chance, and equal runs have equal files.
    metadata = {"privssl": json.dumps(about)} if about else None
    # it refuses tensors that share memory, and a state may hold one under two names
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    with atomic_files.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.replace(path, safetensors.torch.save(own, metadata))


def bytes_of(tensor: Tensor | LazyTensor) -> memoryview:
    """The bytes of a tensor, in the order of its elements whatever its strides are."""
    read = tensor.read() if isinstance(tensor, LazyTensor) else tensor.detach().cpu()
    flat = read.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if len(flat) else memoryview(b"")


def layout_of(tensors: Mapping[str, Item], names: Iterable[str]) -> dict[str, TensorSlice]:
    """Where each tensor is to begin, when they lie one behind the other in the order of names."""
    found: dict[str, TensorSlice] = {}
    at = 0
    for name in names:
        found[name] = place = TensorSlice(tensors[name].dtype, tuple(tensors[name].shape), at)
        at += place.size
    return found


def check_types(tensors: Mapping[str, Item]) -> None:
    """Raise TypeError where a tensor is of a type that no message could carry."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name} is a tensor of {tensor.dtype}")


def too_many(entries: int) -> str:
    """The message where a file could not list so many."""
    return (
        f"A checkpoint cannot list {entries} entries: one for every tensor of the server, and one "
        "for every agent that remembers something. Have fewer agents, or fewer layers"
    )


def header_of(
    tensors: Mapping[str, Item], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[str]]:
    """The first bytes of a safetensors file, and the order in which the tensors follow them.

    Args:
        told: texts by name, the file's metadata.

    Raises:
        TypeError: see ``check_types``.
        RunFolderError: there are more of them than safetensors would read again.
    """
    check_types(tensors)
    order = sorted(tensors, key=lambda name: (-_RANKS[tensors[name].dtype], name))
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    for name, place in layout_of(tensors, order).items():
        entries[name] = {
            "dtype": _NAMES[place.dtype],
            "shape": place.shape,
            "data_offsets": (place.at, place.at + place.size),
        }
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise RunFolderError(too_many(len(tensors)))
    return len(text).to_bytes(8, "little") + text, order


def pieces_of(
    tensors: Mapping[str, Item], metadata: Mapping[str, str] | None = None
) -> Iterator[memoryview]:
    """The bytes of a safetensors file, piece by piece: tensors that lie in order are not copied.

    Args and errors: see ``header_of``.
    """
    header, order = header_of(tensors, metadata)
    yield memoryview(header)
    for name in order:
        item = tensors[name]
        each = item.tensors.values() if isinstance(item, PackedTensors) else (item,)
        yield from (bytes_of(tensor) for tensor in each)


def write_new_tensors(path: Path, tensors: Mapping[str, Item]) -> tuple[int, str]:
    """Write a safetensors file that does not exist yet, down to the disk; its size and SHA-256.

    Raises:
        OSError: it cannot be written.
        TypeError, RunFolderError: see ``header_of``.
    """
    digest, size = hashlib.sha256(), 0

    def seen() -> Iterator[memoryview]:
        nonlocal size
        for piece in pieces_of(tensors):
            digest.update(piece)
            size += len(piece)
            yield piece

    atomic_files.write_new(path, seen())
    return size, digest.hexdigest()


# Reading ------------------------------------------------------------------------------------


def part_of(path: Path, at: int, size: int) -> bytearray:
    """``size`` bytes of a file. Raises OSError, also when it has no so many."""
    data = bytearray(size)
    with path.open("rb") as file:
        file.seek(at)
        if file.readinto(data) < size:
            raise OSError(f"{path} is shorter than it was")
    return data


def sha256_of(path: Path) -> str:
    """Of a whole file, as hex digits. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def open_lazily(path: Path) -> LazyTensors:
    """The tensors of a safetensors file, unread. It must stay in place while they are asked for.

    Raises:
        OSError: it cannot be read.
        SafetensorError: it is no safetensors file, or has tensors of an unusual type.
    """
    with safe_open(path, framework="np"):  # judges the header against the size of the file
        size = int.from_bytes(part_of(path, 0, 8), "little")
        header = json.loads(part_of(path, 8, size))
    header.pop("__metadata__", None)
    places = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise SafetensorError(f"a tensor of type {entry['dtype']}")
        begins = 8 + size + entry["data_offsets"][0]
        places[name] = TensorSlice(_DTYPES[entry["dtype"]], tuple(entry["shape"]), begins)
    return LazyTensors(partial(part_of, path), places)
