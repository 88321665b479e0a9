"""What a site keeps on its disk: replies by the id of their visit, memories, and its ledger's end.

    FOLDER/lock                              one process at a time
    FOLDER/ledger.mark                       number and hash of the ledger's last known line
    FOLDER/runs/RUN/00000003-ID.memory       what the agent remembers after the third visit
    FOLDER/runs/RUN/00000003-ID.answer       its reply, as it was or will be sent

A memory is on disk before its answer, and an answer before it is sent. So an answer that is there
can be sent again at any time, and one that is not there was never sent. Files are whole or not
there (``storage/atomic_files.py``). Of each run the last visits are kept, and of runs the last few:
what is deleted too early is done again where nothing was charged, and lost where something was.
"""

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
from torch import Tensor

from accounting.canonical_json import decode_strictly
from accounting.errors import PlanError
from privssl.core.agents import Memory
from privssl.storage import atomic_files

KEPT_RUNS = 4
ROOM = 4  # a reply is as large as its message, and moments of Adam are twice the networks
_FILE = re.compile(r"([0-9]{8})-([0-9a-f]{64})\.(answer|memory)")


class StoreLockedError(Exception):
    """Another process works in this folder."""


class Store:
    """The folder of one site. Every method may raise OSError."""

    def __init__(self, folder: Path, keep: int) -> None:
        """``keep``: visits of a run whose answers and memories stay, >= 1."""
        self.folder = folder
        self.keep = keep
        self._known: tuple[int, str] | None = None  # the mark, as this process last wrote it

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Inside, no other process works here. Raises Busy at once where one does.

        The lock is the operating system's and goes with its process, however that ends.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreLockedError from None
            yield
        finally:
            os.close(file)

    def check_room(self, size: int) -> None:
        """Raise OSError where the disk has no room for what comes of a message of this size.

        Asked before a visit is charged: a reply that cannot be stored is lost, and its charge too.
        """
        if shutil.disk_usage(self.folder).free < ROOM * size + 2**20:
            raise OSError(errno.ENOSPC, "too little room for a reply", str(self.folder))

    # Answers --------------------------------------------------------------------------------

    def answer(self, run: str, visit: str) -> bytes | None:
        """The stored reply to a visit, or None."""
        path = self._find(run, visit, "answer")
        return None if path is None else path.read_bytes()

    def put_answer(self, run: str, visit: str, answer: bytes) -> None:
        """Store a reply, and delete those that are older than the last ``keep``."""
        folder = self._folder(run)
        atomic_files.replace(folder / f"{self._number(run, visit):08d}-{visit}.answer", answer)
        oldest = self._last(run) - self.keep
        for number, path in self._files(run):
            if number <= oldest:
                path.unlink()

    # Memories -------------------------------------------------------------------------------

    def memory(self, run: str, visit: str) -> Memory | None:
        """What the agent remembered after a visit; None: that is no longer, or never was, here."""
        path = self._find(run, visit, "memory")
        if path is None:
            return None
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        names = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["names"])
        tensors = safetensors.torch.load(data)
        return {name: tensors[str(place)] for place, name in enumerate(names)}

    def put_memory(self, run: str, visit: str, memory: Mapping[str, Tensor]) -> None:
        """Store what the agent remembers after a visit, in its order."""
        plain = [tensor.detach().cpu().contiguous().clone() for tensor in memory.values()]
        tensors = {str(place): tensor for place, tensor in enumerate(plain)}
        data = safetensors.torch.save(tensors, {"names": json.dumps(list(memory))})
        folder = self._folder(run)
        atomic_files.replace(folder / f"{self._number(run, visit):08d}-{visit}.memory", data)

    def keep_memory(self, run: str, visit: str, before: str) -> None:
        """After a visit the agent remembers what it did after the visit ``before``."""
        old, folder = self._find(run, before, "memory"), self._folder(run)
        new = folder / f"{self._number(run, visit):08d}-{visit}.memory"
        if old is not None and old != new:
            new.unlink(missing_ok=True)
            os.link(old, new)
            atomic_files.sync_folder(folder)

    # The ledger's end -----------------------------------------------------------------------

    @property
    def mark(self) -> tuple[int, str] | None:
        """Number and hash of the last line of the ledger that this site knows of.

        The later one of what is on the disk and what this process wrote: a folder that was deleted
        or put back from a backup under a site that serves takes nothing back.

        Raises:
            ValueError: the file is damaged.
        """
        path = self.folder / "ledger.mark"
        if not path.exists():
            return self._known
        try:
            found = decode_strictly(path.read_bytes())
            there = int(found["seq"]), str(found["head"])
            return max(there, self._known or there, key=lambda mark: mark[0])
        except (PlanError, LookupError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error})") from None

    @mark.setter
    def mark(self, at: tuple[int, str]) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = json.dumps({"seq": at[0], "head": at[1]})
        self._known = at
        atomic_files.replace(self.folder / "ledger.mark", text.encode())

    # Runs -----------------------------------------------------------------------------------

    def forget(self, run: str) -> None:
        """Delete all that is stored of a run."""
        shutil.rmtree(self.folder / "runs" / run, ignore_errors=True)

    def _folder(self, run: str) -> Path:
        runs = self.folder / "runs"
        if not (runs / run).is_dir():
            (runs / run).mkdir(mode=0o700, parents=True)
            atomic_files.sync_folder(runs)
            # This one stays whatever the clock says: another may have been set back since.
            others = [path for path in runs.iterdir() if path.name != run]
            others.sort(key=lambda path: path.stat().st_mtime_ns)
            for former in others[: 1 - KEPT_RUNS]:
                shutil.rmtree(former, ignore_errors=True)
        return runs / run

    def _files(self, run: str) -> list[tuple[int, Path]]:
        folder = self.folder / "runs" / run
        names = sorted(os.listdir(folder)) if folder.is_dir() else []
        found = [(match, folder / match[0]) for match in map(_FILE.fullmatch, names) if match]
        return [(int(match[1]), path) for match, path in found]

    def _find(self, run: str, visit: str, kind: str) -> Path | None:
        wanted = f"-{visit}.{kind}"
        return next((path for _, path in self._files(run) if path.name.endswith(wanted)), None)

    def _last(self, run: str) -> int:
        return max((number for number, _ in self._files(run)), default=0)

    def _number(self, run: str, visit: str) -> int:
        """Of a visit that has a file already, its number; else the next one."""
        known = (n for n, path in self._files(run) if path.name[9:73] == visit)
        return next(known, self._last(run) + 1)
