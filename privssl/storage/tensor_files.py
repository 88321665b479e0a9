"""Safetensors files that are written and read one tensor at a time.

``safetensors`` needs all tensors of a file at once and copies their bytes twice. Here the same
bytes are written from tensors that may be in RAM or in another file, and a file is read as a
mapping of names and positions: a tensor is read each time it is accessed. The library still checks
that a header is valid and fits its file.
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

#: Types of tensors in messages and checkpoints; safetensors has more, which torch cannot compute
#: with. In its order: the widest alignment is last here, first in a file.
DTYPE_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32",
    torch.float64: "F64", torch.int64: "I64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_RANKS = {dtype: rank for rank, dtype in enumerate(DTYPE_NAMES)}

MAX_HEADER_BYTES = 100_000_000  # limit of safetensors
_CHUNK = 2**20  # bytes that are hashed at once
_LARGEST, _MOST_SIZES = 2**48, 64  # elements and dimensions of a tensor, beyond any real one

#: (first byte, number of bytes) -> these bytes of a file. Raises OSError.
Read = Callable[[int, int], bytearray]


@dataclass(frozen=True)
class TensorSlice:
    """A tensor's type and shape, and the byte at which it begins."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int

    @property
    def size(self) -> int:
        """Size in bytes, >= 0."""
        return math.prod(self.shape) * self.dtype.itemsize


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, read at every access, so that they cannot be modified."""

    __slots__ = ("__weakref__", "_places", "_read", "_start")

    def __init__(self, read: Read, places: Mapping[str, TensorSlice], start: int = 0) -> None:
        """Set the positions. ``start`` is added to each, so that mappings can share ``places``."""
        self._read, self._places, self._start = read, places, start

    def __getitem__(self, name: str) -> Tensor:
        entry = self._places[name]
        if not entry.size:
            return torch.empty(entry.shape, dtype=entry.dtype)
        data = self._read(self._start + entry.at, entry.size)
        return torch.frombuffer(data, dtype=entry.dtype).reshape(entry.shape)

    def __contains__(self, name: object) -> bool:
        return name in self._places  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def lazy_tensors(self) -> dict[str, "LazyTensor"]:
        """Return its tensors by name, unread."""
        return {
            name: LazyTensor(self, name, entry.dtype, entry.shape)
            for name, entry in self._places.items()
        }

    def within(self, name: str, places: Mapping[str, TensorSlice]) -> "LazyTensors":
        """Return the tensors that are packed in one tensor. Mappings may share ``places``.

        Raises:
            KeyError: it is missing.
            ValueError: it is not a row of the right number of bytes.
        """
        packed = self._places[name]
        if packed.dtype != torch.uint8 or packed.size != sum(
            entry.size for entry in places.values()
        ):
            raise ValueError(f"{name} does not contain these tensors")
        return LazyTensors(self._read, places, self._start + packed.at)


class LazyTensor(NamedTuple):
    """A tensor in a file, of the mapping ``where``."""

    where: LazyTensors
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        return self.where[self.name]


class PackedTensors(NamedTuple):
    """Tensors that a file stores as one row of bytes.

    Otherwise the header would repeat the same names and shapes for each agent.
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
        return {name: [DTYPE_NAMES[t.dtype], list(t.shape)] for name, t in self.tensors.items()}


def places_in(form: Mapping[str, Any]) -> dict[str, TensorSlice]:
    """Invert ``PackedTensors.form``. Raises LookupError, TypeError, ValueError otherwise."""
    entries: dict[str, TensorSlice] = {}
    offset = 0
    for name, (dtype, shape) in form.items():
        if len(shape) > _MOST_SIZES or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"{name} does not have the shape of a tensor")
        if math.prod(max(n, 1) for n in shape) >= _LARGEST:
            raise ValueError(f"{name} is larger than any tensor")
        entries[name] = entry = TensorSlice(_DTYPES[dtype], tuple(shape), offset)
        offset += entry.size
    return entries


Item: TypeAlias = Tensor | LazyTensor | PackedTensors  # of a file


def save_weights(
    path: Path, weights: Mapping[str, Tensor], about: Mapping[str, Any] | None = None
) -> None:
    """Write a plain state dict, loadable by safetensors alone. Raises RunFolderError.

    ``about``: information for users of the weights, for the file's metadata.
    """
    # One key: safetensors has no fixed order of several, and equal runs must have equal files.
    metadata = {"privssl": json.dumps(about)} if about else None
    # safetensors refuses tensors that share memory; a state may have one under two names
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    atomic_files.write(path, safetensors.torch.save(copies, metadata), parents=True)


def bytes_of(tensor: Tensor | LazyTensor) -> memoryview:
    """Return the bytes of a tensor, in the order of its elements."""
    loaded = tensor.read() if isinstance(tensor, LazyTensor) else tensor.detach().cpu()
    flat = loaded.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if len(flat) else memoryview(b"")


def layout_of(tensors: Mapping[str, Item], names: Iterable[str]) -> dict[str, TensorSlice]:
    """Return the positions of tensors that follow each other in the order of names."""
    layout: dict[str, TensorSlice] = {}
    offset = 0
    for name in names:
        layout[name] = entry = TensorSlice(tensors[name].dtype, tuple(tensors[name].shape), offset)
        offset += entry.size
    return layout


def check_types(tensors: Mapping[str, Item]) -> None:
    """Raise TypeError if a tensor has a type that messages do not permit."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(f"{name} is a tensor of {tensor.dtype}")


def too_many(entries: int) -> str:
    """Return the error message for more entries than a file can list."""
    return (
        f"A checkpoint cannot list {entries} entries: one for every tensor of the server, and one "
        "for every agent that remembers something. Have fewer agents, or fewer layers"
    )


def header_of(
    tensors: Mapping[str, Item], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[str]]:
    """Return the header of a safetensors file, and the order of the tensors after it.

    Raises:
        TypeError: see ``check_types``.
        RunFolderError: there are more than safetensors can read back.
    """
    check_types(tensors)
    names = sorted(tensors, key=lambda name: (-_RANKS[tensors[name].dtype], name))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    for name, entry in layout_of(tensors, names).items():
        header[name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": (entry.at, entry.at + entry.size),
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise RunFolderError(too_many(len(tensors)))
    return len(text).to_bytes(8, "little") + text, names


def pieces_of(
    tensors: Mapping[str, Item], metadata: Mapping[str, str] | None = None
) -> Iterator[memoryview]:
    """Yield the bytes of a safetensors file in pieces; contiguous tensors are not copied.

    Raises: see ``header_of``.
    """
    header, names = header_of(tensors, metadata)
    yield memoryview(header)
    for name in names:
        item = tensors[name]
        parts = item.tensors.values() if isinstance(item, PackedTensors) else (item,)
        yield from (bytes_of(tensor) for tensor in parts)


def write_new_tensors(path: Path, tensors: Mapping[str, Item]) -> tuple[int, str]:
    """Write a new safetensors file and synchronise it to disk; return its size and SHA-256.

    Raises:
        OSError: it cannot be written.
        TypeError, RunFolderError: see ``header_of``.
    """
    digest, size = hashlib.sha256(), 0

    def hash_pieces() -> Iterator[memoryview]:
        nonlocal size
        for piece in pieces_of(tensors):
            digest.update(piece)
            size += len(piece)
            yield piece

    atomic_files.write_new(path, hash_pieces())
    return size, digest.hexdigest()


def part_of(path: Path, at: int, size: int) -> bytearray:
    """Read ``size`` bytes of a file. Raises OSError, also if the file is too short."""
    data = bytearray(size)
    with path.open("rb") as file:
        file.seek(at)
        if file.readinto(data) < size:
            raise OSError(f"{path} is shorter than it was")
    return data


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex. Raises OSError."""
    digest = hashlib.sha256()
    hash_file(path, digest)
    return digest.hexdigest()


def hash_file(path: Path, digest: Any) -> None:
    """Add the bytes of a file to a digest of ``hashlib``. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_CHUNK):
            digest.update(piece)


def open_lazily(path: Path) -> LazyTensors:
    """Open the tensors of a safetensors file without reading them. The file must stay meanwhile.

    Raises:
        OSError: it cannot be read.
        SafetensorError: it is not a safetensors file, or has tensors of an unsupported type.
    """
    with safe_open(path, framework="np"):  # checks the header against the size of the file
        size = int.from_bytes(part_of(path, 0, 8), "little")
        header = json.loads(part_of(path, 8, size))
    header.pop("__metadata__", None)
    layout = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise SafetensorError(f"a tensor of type {entry['dtype']}")
        offset = 8 + size + entry["data_offsets"][0]
        layout[name] = TensorSlice(_DTYPES[entry["dtype"]], tuple(entry["shape"]), offset)
    return LazyTensors(partial(part_of, path), layout)
