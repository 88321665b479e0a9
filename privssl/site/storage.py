"""Storage of a site: replies by the id of their request, memories, and its ledger's end.

    FOLDER/lock                              one process at a time
    FOLDER/ledger.mark                       number and hash of the ledger's last known line
    FOLDER/runs/RUN/00000003-ID.memory       the agent's memory after the third step
    FOLDER/runs/RUN/00000003-ID.answer       its reply

A memory is written before its reply, and a reply before it is sent. So a stored reply can be sent
again, and one that is not stored was never sent. Files are written atomically. Only the last steps
of a run and the last runs are kept. A step whose reply was deleted is run again, or lost if
charged.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
from filelock import FileLock, Timeout
from torch import Tensor

from accounting.canonical_json import decode_strictly
from accounting.errors import LedgerError, PlanError
from accounting.journal import sync_directory
from privssl.core.agents import Memory
from privssl.storage import atomic_files

KEPT_RUNS = 4
SPACE_FACTOR = 4  # a reply is as large as its request, and Adam's moments are twice the networks
_FILE = re.compile(r"([0-9]{8})-([0-9a-f]{64})\.(answer|memory)")


class StoreLockedError(Exception):
    """Another process works in this folder."""


class Store:
    """The folder of one site. Every method may raise OSError."""

    def __init__(self, folder: Path, keep: int) -> None:
        """Set the folder. ``keep``: steps of a run whose replies and memories are kept, >= 1."""
        self.folder = folder
        self.keep = keep
        self._known: tuple[int, str] | None = None  # the mark that this process wrote last

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Exclude other processes. Raises StoreLockedError at once if one works here.

        The operating system releases the lock when its process ends.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            lock = FileLock(self.folder / "lock", timeout=0, mode=0o600).acquire()
        except Timeout:
            raise StoreLockedError from None
        with lock:
            yield

    def check_room(self, size: int) -> None:
        """Raise OSError if the disk has no space for the reply to a request of this size.

        Called before a step is charged: if its reply cannot be stored, the charge is lost too.
        """
        if shutil.disk_usage(self.folder).free < SPACE_FACTOR * size + 2**20:
            raise OSError(errno.ENOSPC, "too little space for a reply", str(self.folder))

    # Answers --------------------------------------------------------------------------------

    def answer(self, run: str, visit: str) -> bytes | None:
        """Return the stored reply to a request, or None."""
        path = self._find_file(run, visit, "answer")
        return None if path is None else path.read_bytes()

    def put_answer(self, run: str, visit: str, answer: bytes) -> None:
        """Store a reply, and delete all but the last ``keep``."""
        atomic_files.replace(self._choose_path(run, visit, "answer"), answer)
        oldest = self._find_last_number(run) - self.keep
        for number, path in self._list_files(run):
            if number <= oldest:
                path.unlink()

    # Memories -------------------------------------------------------------------------------

    def memory(self, run: str, visit: str) -> Memory | None:
        """Return the agent's memory after a step, or None if it is not stored."""
        path = self._find_file(run, visit, "memory")
        if path is None:
            return None
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        names = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["names"])
        tensors = safetensors.torch.load(data)
        return {name: tensors[str(index)] for index, name in enumerate(names)}

    def put_memory(self, run: str, visit: str, memory: Mapping[str, Tensor]) -> None:
        """Store the agent's memory after a step, in its order."""
        copies = [tensor.detach().cpu().contiguous().clone() for tensor in memory.values()]
        tensors = {str(index): tensor for index, tensor in enumerate(copies)}
        data = safetensors.torch.save(tensors, {"names": json.dumps(list(memory))})
        atomic_files.replace(self._choose_path(run, visit, "memory"), data)

    def keep_memory(self, run: str, visit: str, before: str) -> None:
        """Store that a step left the memory of step ``before`` unchanged."""
        old, new = self._find_file(run, before, "memory"), self._choose_path(run, visit, "memory")
        if old is not None and old != new:
            new.unlink(missing_ok=True)
            os.link(old, new)
            sync_directory(new.parent)

    # The ledger's end -----------------------------------------------------------------------

    @property
    def mark_path(self) -> Path:
        """The file that holds ``mark``."""
        return self.folder / "ledger.mark"

    @property
    def mark(self) -> tuple[int, str] | None:
        """Return number and hash of the ledger's last known line.

        This is the later one of the file's and this process's, so deleting or restoring the folder
        of a serving site has no effect.

        Raises:
            LedgerError: the file is damaged or cannot be read.
        """
        path = self.mark_path
        try:
            content = decode_strictly(path.read_bytes())
            file_mark = int(content["seq"]), str(content["head"])
            return max(file_mark, self._known or file_mark, key=lambda mark: mark[0])
        except FileNotFoundError:
            return self._known
        except OSError as error:
            raise LedgerError(
                f"{path}: cannot be read ({error.strerror}). It holds the length of the ledger: "
                "correct its rights"
            ) from None
        except (PlanError, LookupError, TypeError, ValueError) as error:
            raise LedgerError(
                f"{path}: damaged ({error}). It holds the length of the ledger: put it back"
            ) from None

    @mark.setter
    def mark(self, mark: tuple[int, str]) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = json.dumps({"seq": mark[0], "head": mark[1]})
        self._known = mark
        atomic_files.replace(self.mark_path, text.encode())

    # Runs -----------------------------------------------------------------------------------

    def forget(self, run: str) -> None:
        """Delete everything stored for a run."""
        shutil.rmtree(self.folder / "runs" / run, ignore_errors=True)

    def _make_folder(self, run: str) -> Path:
        runs = self.folder / "runs"
        if not (runs / run).is_dir():
            (runs / run).mkdir(mode=0o700, parents=True)
            sync_directory(runs)
            # Keep this run whatever the clock: it may have been set back.
            other_runs = [path for path in runs.iterdir() if path.name != run]
            other_runs.sort(key=lambda path: path.stat().st_mtime_ns)
            for old_run in other_runs[: 1 - KEPT_RUNS]:
                shutil.rmtree(old_run, ignore_errors=True)
        return runs / run

    def _list_files(self, run: str) -> list[tuple[int, Path]]:
        folder = self.folder / "runs" / run
        names = sorted(os.listdir(folder)) if folder.is_dir() else []
        matches = [(match, folder / match[0]) for match in map(_FILE.fullmatch, names) if match]
        return [(int(match[1]), path) for match, path in matches]

    def _find_file(self, run: str, visit: str, kind: str) -> Path | None:
        suffix = f"-{visit}.{kind}"
        return next((path for _, path in self._list_files(run) if path.name.endswith(suffix)), None)

    def _find_last_number(self, run: str) -> int:
        return max((number for number, _ in self._list_files(run)), default=0)

    def _choose_path(self, run: str, visit: str, kind: str) -> Path:
        """Return a step's file, with the number of its other file, else the next number."""
        folder = self._make_folder(run)
        numbers = (n for n, path in self._list_files(run) if path.name[9:73] == visit)
        return folder / f"{next(numbers, self._find_last_number(run) + 1):08d}-{visit}.{kind}"
