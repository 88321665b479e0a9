"""Where tensors that belong to single agents lie: in RAM, and beyond a limit in a file.

What agents remember, and what a server holds of each of them (FedMatch's psi), grows with the
number of agents and is needed only at the few that take part in a round. What the limit leaves
no room for lies in a file without a name in the run folder. Nobody else can open it, and it goes
with its process, however that ends: also by ``kill -9``. Its bits are those that were put there.

A mapping that lies on the shelf never changes and keeps its room as long as anybody refers to
it. So a round that is interrupted leaves what the round before had remembered, though agents may
have put something new in its place already.
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

PAGE = 4096  # rooms in the file are whole pages: a memory that has grown a little fits in again

MemoryT = TypeVar("MemoryT")


class _InRam(dict[str, Tensor]):
    """Tensors by name that count towards the limit."""

    __slots__ = ("__weakref__",)


class _OnDisk(LazyTensors):
    """Tensors by name in a room of the shelf's file."""

    __slots__ = ()


class _Lease(weakref.ref[Mapping[str, Tensor]]):
    """A room and who lives in it. Its callback is a method of C: one of Python could swallow a
    Ctrl-C that arrives in it."""

    __slots__ = ("at", "size")

    at: int | None  # the room's first byte; None: it is in RAM
    size: int  # bytes


class SpillStore:
    """Puts mappings of tensors away, and gives back mappings of the same tensors."""

    def __init__(self, folder: Path | None = None, limit: float = float("inf")) -> None:
        """Nothing is on the shelf yet.

        Args:
            folder: where the file is made, when one is needed; None: where the system has such.
            limit: bytes that may lie in RAM, >= 0. Endless: there is never a file.
        """
        self._folder, self._limit = folder, limit
        self._file: IO[bytes] | None = None
        self._end = 0  # of the rooms in the file
        self._free: dict[int, list[int]] = {}  # size of a room -> where there are such
        self._in_ram = 0
        self._lent: dict[int, _Lease] = {}  # they are nowhere else
        self._returned: deque[_Lease] = deque()
        self._forms: dict[tuple[object, ...], Mapping[str, TensorSlice]] = {}

    @property
    def in_ram(self) -> int:
        """Bytes of tensors on the shelf that are in RAM."""
        self._release()
        return self._in_ram

    @property
    def on_disk(self) -> int:
        """Bytes of the file, rooms that are free included."""
        return self._end

    def put(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The same tensors, on the shelf: those that were given, or their bits in the file.

        Raises:
            RunFolderError: the disk is full or not writable. All that was put there before is as
                it was.
        """
        if isinstance(tensors, _InRam | _OnDisk) or not tensors:
            return tensors
        self._release()
        given = tensors.lazy_tensors() if isinstance(tensors, LazyTensors) else tensors
        places = self._share_storage(tensor_files.layout_of(given, given))
        size = sum(place.size for place in places.values())
        if self._in_ram + size <= self._limit:
            kept = _InRam(tensors)
            self._in_ram += size
            self._acquire(kept, None, size)
            return kept
        size = -(-size // PAGE) * PAGE
        at = self._room(size)
        try:
            for name, place in places.items():
                self._write(tensor_files.bytes_of(given[name]), at + place.at)
        except OSError as error:
            raise RunFolderError(
                f"What agents remember takes more than run.memories_mb, and the rest cannot be "
                f"written to {self._where()}: {error.strerror}. Make room there, or raise "
                "run.memories_mb, then go on with --resume"
            ) from error
        there = _OnDisk(self._read, places, at)
        self._acquire(there, at, size)
        return there

    def put_parts(self, state: MemoryT) -> MemoryT:
        """A server's state, with what it holds of single agents on the shelf.

        That is every mapping of tensors in a mapping in one of its fields: agent -> name ->
        tensor.
        """
        known: dict[int, Mapping[str, Tensor]] = {}  # one that agents share is put there once
        moved = {}
        for field, held in vars(state).items():
            if not isinstance(held, Mapping):
                continue
            parts = {key: part for key, part in held.items() if _of_tensors(part)}
            for part in parts.values():
                if id(part) not in known:
                    known[id(part)] = self.put(part)
            if parts:
                moved[field] = {**held, **{key: known[id(part)] for key, part in parts.items()}}
        return dataclasses.replace(state, **moved) if moved else state  # type: ignore[type-var]

    def close(self) -> None:
        """Give the file back; what lies in it is gone. May be called twice."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    # Rooms ----------------------------------------------------------------------------------

    def _acquire(self, tenant: Mapping[str, Tensor], at: int | None, size: int) -> None:
        lent = _Lease(tenant, self._returned.append)
        lent.at, lent.size = at, size
        self._lent[id(lent)] = lent

    def _release(self) -> None:
        """Free the rooms of mappings to which nobody refers any more."""
        while self._returned:
            lent = self._returned.popleft()
            del self._lent[id(lent)]
            if lent.at is None:
                self._in_ram -= lent.size
            else:
                self._free.setdefault(lent.size, []).append(lent.at)

    def _room(self, size: int) -> int:
        if self._free.get(size):
            return self._free[size].pop()
        at, self._end = self._end, self._end + size
        return at

    def _share_storage(self, places: dict[str, TensorSlice]) -> Mapping[str, TensorSlice]:
        """One copy of like places: agents are many, the forms of what they remember few."""
        return self._forms.setdefault(tuple(places.items()), places)

    # The file -------------------------------------------------------------------------------

    def _write(self, data: memoryview, at: int) -> None:
        if self._file is None:
            # Its name, where the system makes no file without, is one that run folders know.
            self._file = tempfile.TemporaryFile(  # noqa: SIM115  (open as long as the shelf is)
                dir=self._folder, prefix=atomic_files.TEMPORARY, buffering=0
            )
        while data:
            done = os.pwrite(self._file.fileno(), data, at)
            data, at = data[done:], at + done

    def _read(self, at: int, size: int) -> bytearray:
        if self._file is None:
            raise ValueError("the shelf is closed")
        data = bytearray(size)
        rest = memoryview(data)
        try:
            while rest:
                done = os.preadv(self._file.fileno(), [rest], at)
                if not done:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                rest, at = rest[done:], at + done
        except OSError as error:
            raise RunFolderError(
                f"What agents remember cannot be read back from a file in {self._where()}: "
                f"{error.strerror}. Look after that disk, then go on with --resume"
            ) from error
        return data

    def _where(self) -> str:
        return str(self._folder or tempfile.gettempdir())


def _of_tensors(value: object) -> bool:
    """Whether a value maps names to tensors, which none is read for."""
    return isinstance(value, LazyTensors | _InRam) or (
        isinstance(value, Mapping) and all(isinstance(item, Tensor) for item in value.values())
    )
