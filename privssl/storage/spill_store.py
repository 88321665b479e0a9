"""Tensors of single agents: in RAM, and beyond a limit in an unnamed file.

Agents' memories, and a server's state of each agent (FedMatch's psi), grow with the number of
agents and are needed only for those that take part in a round. The file is in the run folder; no
other process can open it, and it is deleted with its process, even after ``kill -9``.

A stored mapping never changes and keeps its slot while it is referenced. So an interrupted round
leaves the tensors of the previous round intact.
"""

import dataclasses
import errno
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TypeVar

from torch import Tensor

from privssl.errors import RunFolderError
from privssl.storage import atomic_files, tensor_files
from privssl.storage.tensor_files import LazyTensors, TensorSlice

PAGE = 4096  # slots in the file are whole pages, so that a memory can grow a little

MemoryT = TypeVar("MemoryT")


class _InRam(dict[str, Tensor]):
    """Tensors by name that count towards the limit."""

    __slots__ = ("__weakref__",)


class _OnDisk(LazyTensors):
    """Tensors by name in a slot of the file."""

    __slots__ = ()


class _Lease(weakref.ref[Mapping[str, Tensor]]):
    """A slot and its mapping.

    The callback must be a C method: Python drops a Ctrl-C that arrives in a callback written in
    Python.
    """

    __slots__ = ("at", "size")

    at: int | None  # the slot's first byte; None: in RAM
    size: int  # bytes


class SpillStore:
    """Stores mappings of tensors, and returns mappings of the same tensors."""

    def __init__(self, folder: Path | None = None, limit: float = float("inf")) -> None:
        """Set folder and limit.

        Args:
            folder: of the file, when one is needed; None: the system's choice.
            limit: bytes that may be in RAM, >= 0. Infinite: a file is never used.
        """
        self._folder, self._limit = folder, limit
        self._file: IO[bytes] | None = None
        self._end = 0  # end of the slots in the file
        self._free: dict[int, list[int]] = {}  # size of free slots -> their positions
        self._in_ram = 0
        self._leases: dict[int, _Lease] = {}  # the only references to them
        self._returned: deque[_Lease] = deque()
        self._layouts: dict[tuple[object, ...], Mapping[str, TensorSlice]] = {}

    def put(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Store tensors; return them, or a mapping of their bits in the file.

        Raises RunFolderError if the file cannot be written. Earlier stored tensors are unchanged.
        """
        if isinstance(tensors, _InRam | _OnDisk) or not tensors:
            return tensors
        self._release()
        sources = tensors.lazy_tensors() if isinstance(tensors, LazyTensors) else tensors
        layout = tensor_files.layout_of(sources, sources)
        # There are many agents and few layouts, so equal ones are shared.
        shared_layout = self._layouts.setdefault(tuple(layout.items()), layout)
        size = sum(entry.size for entry in shared_layout.values())
        if self._in_ram + size <= self._limit:
            in_ram = _InRam(tensors)
            self._in_ram += size
            self._acquire(in_ram, None, size)
            return in_ram
        size = -(-size // PAGE) * PAGE
        offset = self._reserve_slot(size)
        try:
            for name, entry in shared_layout.items():
                self._write(tensor_files.bytes_of(sources[name]), offset + entry.at)
        except OSError as error:
            raise RunFolderError(
                f"What agents remember takes more than run.memories_mb, and the rest cannot be "
                f"written to {self._name_of_folder()}: {error.strerror}. Free disk space there, or "
                "raise run.memories_mb, then continue with --resume"
            ) from error
        on_disk = _OnDisk(self._read, shared_layout, offset)
        self._acquire(on_disk, offset, size)
        return on_disk

    def put_parts(self, state: MemoryT) -> MemoryT:
        """Return a server's state with its parts of agents (agent -> name -> tensor) stored."""
        stored: dict[int, Mapping[str, Tensor]] = {}  # a mapping that agents share is stored once
        changes = {}
        for field, value in vars(state).items():
            if not isinstance(value, Mapping):
                continue
            parts = {key: part for key, part in value.items() if _is_tensor_mapping(part)}
            for part in parts.values():
                if id(part) not in stored:
                    stored[id(part)] = self.put(part)
            if parts:
                changes[field] = {**value, **{key: stored[id(part)] for key, part in parts.items()}}
        return dataclasses.replace(state, **changes) if changes else state  # type: ignore[type-var]

    def close(self) -> None:
        """Delete the file. May be called twice."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _acquire(self, tensors: Mapping[str, Tensor], offset: int | None, size: int) -> None:
        lease = _Lease(tensors, self._returned.append)
        lease.at, lease.size = offset, size
        self._leases[id(lease)] = lease

    def _release(self) -> None:
        """Free the slots of unreferenced mappings."""
        while self._returned:
            lease = self._returned.popleft()
            del self._leases[id(lease)]
            if lease.at is None:
                self._in_ram -= lease.size
            else:
                self._free.setdefault(lease.size, []).append(lease.at)

    def _reserve_slot(self, size: int) -> int:
        if self._free.get(size):
            return self._free[size].pop()
        offset, self._end = self._end, self._end + size
        return offset

    def _write(self, data: memoryview, offset: int) -> None:
        if self._file is None:
            # If the system cannot create an unnamed file, run folders expect this name.
            self._file = tempfile.TemporaryFile(  # noqa: SIM115  (open as long as the store)
                dir=self._folder, prefix=atomic_files.TEMPORARY, buffering=0
            )
        while data:
            count = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[count:], offset + count

    def _read(self, offset: int, size: int) -> bytearray:
        if self._file is None:
            raise ValueError("the store is closed")
        data = bytearray(size)
        remaining = memoryview(data)
        try:
            while remaining:
                count = os.preadv(self._file.fileno(), [remaining], offset)
                if not count:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                remaining, offset = remaining[count:], offset + count
        except OSError as error:
            raise RunFolderError(
                "What agents remember cannot be read back from a file in "
                f"{self._name_of_folder()}: {error.strerror}. Check that disk, then continue with "
                "--resume"
            ) from error
        return data

    def _name_of_folder(self) -> str:
        return str(self._folder or tempfile.gettempdir())


def _is_tensor_mapping(value: object) -> bool:
    """Return whether a value maps names to tensors, without reading them."""
    return isinstance(value, LazyTensors | _InRam) or (
        isinstance(value, Mapping) and all(isinstance(item, Tensor) for item in value.values())
    )
