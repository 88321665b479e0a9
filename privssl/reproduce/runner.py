"""Run one cell of a table with one seed, in a separate process, and store the result.

The run folder is ``runs/reproduce/TABLE/CELL/SEED``, and is removed once it is stored. Beside it
are SEED.lock, a lock against other processes; SEED.log, the output of the run; and SEED.json, the
code of its start and the costs of its sessions. Cells that are the same run also share a lock, in
``runs/reproduce/.locks``.
"""

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from privssl.errors import RunFolderError, UserError
from privssl.experiment.config import Config
from privssl.experiment.plugin_names import imports_of
from privssl.reproduce.machine import commit_of, gpu_name, is_bfloat16_emulated, processor
from privssl.reproduce.store import Entry, Measured, Store, config_hash, in_float32
from privssl.reproduce.tables import Cell
from privssl.runs import resume
from privssl.runtime.process import INTERRUPTED, defer_interrupts
from privssl.storage import atomic_files

RUNS = Path("runs") / "reproduce"
POLL = 0.1  # seconds between two polls of a process
TOLD = 6  # shown lines at the end of a failed run's log


class CellError(UserError):
    """A run ended without a result."""

    exit_status = 1


@dataclass(frozen=True)
class Ended:
    """The end of a training process."""

    status: int  # exit status; negative: the signal that killed it
    stopped: bool  # whether it was asked to stop
    wall: float  # seconds
    cpu: float  # seconds, with its children
    peak_mb: float


#: Arguments of ``privssl.train``, log file, file to keep open, time to stop.
Training = Callable[[Sequence[str], Path, int, float], Ended]


def train_in_a_process(arguments: Sequence[str], log: Path, lock: int, until: float) -> Ended:
    """Run ``python -m privssl.train``, and stop it at a checkpoint at ``until``
    (``time.monotonic``).

    Raises KeyboardInterrupt after the run has written its checkpoint and ended.
    """
    start, stopped = time.monotonic(), False
    child: subprocess.Popen[bytes] | None = None
    usage: resource.struct_rusage | None = None
    interrupt: KeyboardInterrupt | None = None
    while usage is None:
        try:
            with defer_interrupts():  # a child is started once, and its end handled once
                child = child or _start_training(arguments, log, lock)
                usage = _poll_usage(child)
            if usage is None:
                if not stopped and time.monotonic() >= until:
                    stopped = True
                    os.kill(child.pid, signal.SIGTERM)
                time.sleep(POLL)
        except KeyboardInterrupt as stop:
            if child is None:
                raise
            interrupt, stopped = stop, True
            if usage is None:
                os.kill(child.pid, signal.SIGTERM)  # a background job may ignore SIGINT
    assert child is not None
    cpu, peak = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024
    ended = Ended(child.returncode, stopped, time.monotonic() - start, cpu, peak)
    if interrupt is not None:
        raise Interrupted(ended) from interrupt
    return ended


def _start_training(arguments: Sequence[str], log: Path, lock: int) -> "subprocess.Popen[bytes]":
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "privssl.train", *arguments, "--quiet"],
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            pass_fds=[lock],  # keeps the lock if this process is killed first
        )  # fmt: skip


def _poll_usage(child: "subprocess.Popen[bytes]") -> resource.struct_rusage | None:
    """Return the resource usage of an ended process; None while it runs."""
    pid, status, usage = os.wait4(child.pid, os.WNOHANG)
    if not pid:
        return None
    child.returncode = os.waitstatus_to_exitcode(status)
    return usage


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after the run wrote its checkpoint and ended."""

    def __init__(self, ended: Ended) -> None:
        super().__init__()
        self.ended = ended


class Runner:
    """Runs cells in a clone (``root``), by default each in a separate process.

    ``keep``: keep the folders of stored runs.
    """

    def __init__(
        self, root: Path, store: Store, *, keep: bool = False,
        train: Training | None = None,
    ) -> None:  # fmt: skip
        self._root, self._store, self._keep = root, store, keep
        self._train = train or train_in_a_process

    def run(
        self, cell: Cell, seed: int, until: float = float("inf")
    ) -> Entry | Literal["busy", "stopped"]:
        """Run and store a cell; return the entry, "busy" or "stopped".

        "busy": another process has the cell, or an equal run. "stopped": time was up.

        Raises:
            CellError: the run ended without a result.
            KeyboardInterrupt: after its checkpoint was written.
        """
        folder = self._root / RUNS / cell.table / cell.slug / str(seed)
        with atomic_files.writing(folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
        with _try_lock(folder.with_suffix(".lock")) as lock:
            if lock is None:
                return "busy"
            self._store.forget()
            if self._store.state(cell, seed) == "measured":  # meanwhile measured by another process
                entry = self._store.read(cell, seed)
                assert entry is not None
                return entry
            with _try_lock(self._make_lock_path(cell, seed)) as run_lock:
                if run_lock is None:
                    return "busy"
                if (equal := self._store.equal_entry(cell, seed)) is not None:
                    return self._store.share(cell, seed, equal)
                return self._run_cell(cell, seed, folder, lock, until)

    def _make_lock_path(self, cell: Cell, seed: int) -> Path:
        """Return the lock file shared by all cells that are the same run."""
        path = self._root / RUNS / ".locks" / f"{config_hash(self._store.config(cell, seed))}.lock"
        with atomic_files.writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _run_cell(
        self, cell: Cell, seed: int, folder: Path, lock: int, until: float
    ) -> Entry | Literal["stopped"]:
        config = self._store.config(cell, seed)
        if is_bfloat16_emulated(config):  # float32 is several times faster
            config = in_float32(config)
        sources = self._store.sources(config)
        note = _RunNote(folder.with_suffix(".json"))
        state = "stale" if note.sources != sources else _find_state(folder, config)
        if state != "finished":
            if state != "begun":
                note.begin(sources, self._root, config)
            log = folder.with_suffix(".log")
            arguments = _build_arguments(cell, config, folder.relative_to(self._root), state)
            try:
                with _change_directory(self._root):
                    ended = self._train(arguments, log, lock, until)
            except Interrupted as interrupt:
                note.add(interrupt.ended)
                if interrupt.ended.status == 0:  # the interrupt came after the end
                    self._keep_result(cell, seed, folder, note)
                raise
            note.add(ended)
            if ended.status != 0:
                if ended.stopped or ended.status == INTERRUPTED:
                    return "stopped"
                raise CellError(_describe_failure(cell, seed, ended, log))
        return self._keep_result(cell, seed, folder, note)

    def _keep_result(self, cell: Cell, seed: int, folder: Path, note: "_RunNote") -> Entry:
        with defer_interrupts():
            entry = self._store.write(cell, seed, folder, note.cost)
            if not self._keep:
                shutil.rmtree(folder, ignore_errors=True)
                for ending in (".json", ".log"):
                    folder.with_suffix(ending).unlink(missing_ok=True)
        return entry


def _build_arguments(cell: Cell, config: Config, folder: Path, state: str) -> list[str]:
    """Return the arguments of ``privssl.train``."""
    run = config.run
    settings = [
        *(text for text in cell.overrides if not text.startswith("run.precision=")),
        f"run.seed={run.seed}",
        f"run.precision={run.precision}",
        f"run.output={json.dumps(str(folder))}",
    ]
    start = ["--resume", str(folder)] if state == "begun" else ["run.overwrite=true"]
    return [str(cell.config), *settings, *start]


def _find_state(folder: Path, config: Config) -> Literal["stale", "begun", "finished"]:
    """Return the state of the run in a folder; stale also if it is missing or of another config."""
    try:
        with imports_of(config):  # the folder must not choose code
            return resume.run_state(folder, config)
    except UserError:
        return "stale"


def _describe_failure(cell: Cell, seed: int, ended: Ended, log: Path) -> str:
    reason = f"exit status {ended.status}"
    if ended.status < 0:
        reason = f"killed by signal {-ended.status}; is there enough memory?"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-TOLD:]
    output = "\n".join(f"  {line}" for line in lines)
    return f"{cell.table}, {cell.title}, seed {seed} failed ({reason}). The end of {log}:\n{output}"


@contextmanager
def _change_directory(folder: Path) -> Iterator[None]:
    """Change the working directory: paths of a table are relative to the clone."""
    previous = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(previous)


@contextmanager
def _try_lock(path: Path) -> Iterator[int | None]:
    """Open and lock a file; None if another process has the lock."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RunFolderError(f"{path} cannot be made: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield descriptor
    finally:
        os.close(descriptor)


class _RunNote:
    """The file beside a run: the code of its start, and the costs of its sessions."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.cost = Measured(0.0, 0.0, 0.0, {})
        with suppress(OSError, ValueError, TypeError):
            self.cost = Measured(**json.loads(path.read_bytes()))

    @property
    def sources(self) -> str | None:
        return self.cost.origin.get("sources")

    def begin(self, sources: str, root: Path, config: Config) -> None:
        gpu = gpu_name(config)
        origin = {
            **({"gpu": gpu} if gpu else {}),
            **commit_of(root),
            "sources": sources,
            "processor": processor(),
            "threads": int(os.environ.get("OMP_NUM_THREADS") or 1),
        }
        self._write_cost(Measured(0.0, 0.0, 0.0, origin))

    def add(self, ended: Ended) -> None:
        """Add a session."""
        total = self.cost
        largest = max(total.peak_mb, ended.peak_mb)
        self._write_cost(
            Measured(total.wall + ended.wall, total.cpu + ended.cpu, largest, total.origin)
        )

    def _write_cost(self, cost: Measured) -> None:
        self.cost = cost
        atomic_files.write(self._path, json.dumps(vars(cost), indent=1) + "\n")
