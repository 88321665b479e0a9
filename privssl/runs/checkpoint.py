"""Checkpoints: tensors as safetensors, everything else as strict JSON, never pickled objects.

    checkpoints/round_00010/state.safetensors      tensors of the server's state
    checkpoints/round_00010/memories.safetensors   tensors of agents' memories
    checkpoints/round_00010/snapshot.json          shape of both trees, numbers, checksums, its own
    checkpoints/latest, checkpoints/best           text files with the name of a folder

A snapshot is written to a temporary folder and renamed. Loading checks size and SHA-256 of each
file and falls back to an older snapshot. Checksums find damage, not editing.

Memories of agents may exceed RAM: they are written one tensor at a time, and a loaded snapshot
reads them from its file when they are needed. The tensors of one agent are
one row of bytes; snapshot.json describes them once for all agents (``forms``).
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from torch import Tensor

from accounting.canonical_json import decode_strictly, encode
from accounting.errors import PlanError
from accounting.journal import sync_directory
from privssl.errors import RunFolderError
from privssl.runs.state_tree import StateTree, filled, outline
from privssl.storage import atomic_files, tensor_files
from privssl.storage.tensor_files import Item, LazyTensors, TensorSlice

logger = logging.getLogger(__name__)

FORMAT = 3
#: Depth in each tree of a mapping of tensors that belongs to one agent.
TREES = {"state": 2, "memories": 1}
MAX_JSON_BYTES = 64 * 2**20
_NO_TENSORS = LazyTensors(lambda offset, size: bytearray(size), {})
_FOLDER = re.compile(r"round_([0-9]{5,9})")


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state to resume after ``round``, without data and privacy journals.

    ``config_digest`` is ``config.config_hash``. ``extra``: numbers of the run loop.
    """

    round: int
    state: StateTree
    memories: Mapping[str, Mapping[str, Tensor]]
    config_digest: str
    extra: Mapping[str, str | int | float] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """The progress of a run, saved with every checkpoint."""

    round: int = 0
    best: float = 0.0
    best_round: int = 0
    final: float = 0.0
    saved_best: float = -1.0  # highest accuracy of a round that has a checkpoint
    saved_best_round: int = 0
    up: int = 0
    down: int = 0
    seconds: float = 0.0
    refused: int = 0  # visits that a budget did not cover
    start: str = "{}"  # fingerprint of the networks before round 1
    trained: str = ""  # ids of agents that took a step, joined
    asked: str = ""  # roles that were called, joined
    warnings: str = "[]"  # all so far, as JSON


@dataclass(frozen=True)
class CompletedRound:
    """The result of the last finished round. Replaced as a whole, so it is always consistent."""

    state: Any
    memories: Mapping[str, Mapping[str, Tensor]]
    progress: Progress


class _DamagedSnapshot(Exception):  # noqa: N818  (another snapshot may be intact)
    """A snapshot is incomplete or damaged."""


def save_snapshot(folder: Path, snapshot: Snapshot, *, keep: int = 2) -> Path:
    """Write a snapshot, set ``latest``, and prune older ones; return its folder.

    Keeps the newest ``keep`` >= 1 and the one that ``best`` names.

    Raises:
        RunFolderError: the disk is full or not writable, or there are too many tensors or agents to
            read back. Older snapshots are unchanged.
    """
    target = folder / _name_of(snapshot.round)
    temporary = folder / f"{atomic_files.TEMPORARY}{target.name}"
    manifest, trees = _build_manifest(snapshot)
    with atomic_files.writing(target):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_leftovers(folder)
        try:
            temporary.mkdir(mode=0o700)
            for name, tensors in trees.items():
                path = temporary / f"{name}.safetensors"
                size, checksum = tensor_files.write_new_tensors(path, tensors)
                manifest[name] |= {"bytes": size, "sha256": checksum}
            content = with_checksum(manifest)
            if len(content) > MAX_JSON_BYTES:  # too large to read back
                raise RunFolderError(tensor_files.too_many(sum(map(len, trees.values()))))
            atomic_files.write_new(temporary / "snapshot.json", content)
            sync_directory(temporary)
            _put_in_place(temporary, target)
            sync_directory(folder)
        except BaseException:  # also Ctrl-C
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        update_pointer(folder, "latest", snapshot.round)
        _prune_snapshots(folder, snapshot.round, keep)
    return target


def _put_in_place(temporary: Path, target: Path) -> None:
    replaced = target.with_name(f"{atomic_files.TEMPORARY}replaced-{target.name}")
    try:
        if target.exists():  # left by a run resumed from an older snapshot
            target.rename(replaced)
        temporary.rename(target)
    except BaseException:  # also Ctrl-C: the former snapshot is still intact
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        raise


def update_pointer(folder: Path, name: Literal["latest", "best"], round_number: int) -> None:
    """Set ``latest`` or ``best`` to the snapshot of a round, which must have been saved."""
    atomic_files.write(folder / name, f"{_name_of(round_number)}\n")


def load_snapshot(
    folder: Path,
    expected_digest: str,
    digest_with_rounds: Callable[[int], str | None] = lambda _: None,
) -> Snapshot:
    """Load the latest intact snapshot; skip damaged ones with a warning.

    Args:
        expected_digest: ``config.config_hash`` of the config to resume.
        digest_with_rounds: digest of the same config with the snapshot's number of rounds, if such
            a run can be lengthened.

    Raises:
        RunFolderError: there is none, none is intact, or it belongs to another config.
    """
    damage = []
    for name in _find_candidates(folder):
        try:
            snapshot = _read_snapshot(folder / name)
        except _DamagedSnapshot as error:
            damage.append(f"{name}: {error}")
            logger.warning("checkpoint %s is damaged (%s), trying an older one", name, error)
            continue
        if snapshot.config_digest not in (expected_digest, digest_with_rounds(snapshot.round)):
            raise RunFolderError(
                f"{folder / name} belongs to another config. Compare run.seed, run.precision and "
                "the sections data, agents, model, algorithm and privacy with config.yaml of that "
                "run, or give another run.output"
            )
        return snapshot
    if damage:
        raise RunFolderError(
            f"{folder}: no checkpoint is intact ({'; '.join(damage)}). Start the run anew with "
            "another run.output"
        )
    raise RunFolderError(f"{folder}: there is no checkpoint to resume from. Start a new run")


def with_checksum(about: Mapping[str, Any]) -> bytes:
    """Return the bytes of snapshot.json, with a checksum."""
    content = {name: value for name, value in about.items() if name != "sha256"}
    return json.dumps(
        {**content, "sha256": _compute_checksum(content)}, indent=1, allow_nan=False
    ).encode()


def _compute_checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(encode(content)).hexdigest()


def _build_manifest(snapshot: Snapshot) -> tuple[dict[str, Any], dict[str, dict[str, Item]]]:
    """Return the content of snapshot.json without files, and the tensors of each file."""
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "round": snapshot.round,
        "config_digest": snapshot.config_digest,
        "extra": outline(dict(snapshot.extra), "", {}, {}),
    }
    forms: dict[str, int] = {}  # JSON -> number
    trees: dict[str, dict[str, Item]] = {name: {} for name in TREES}
    for name, tensors in trees.items():
        tree_outline = outline(getattr(snapshot, name), "", tensors, forms, TREES[name])
        manifest[name] = {"outline": tree_outline}
        tensor_files.check_types(tensors)
    manifest["forms"] = list(map(json.loads, forms))
    return manifest, trees


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.glob(f"{atomic_files.TEMPORARY}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def _prune_snapshots(folder: Path, current: int, keep: int) -> None:
    """Keep the newest up to ``current``, and the best. Later rounds belong to a run that was rolled
    back."""
    rounds = sorted(_find_rounds(folder))
    newest = [number for number in rounds if number <= current][-keep:]
    kept_names = {_read_pointer(folder, "best"), *map(_name_of, newest)}
    for name in map(_name_of, rounds):
        if name not in kept_names:
            shutil.rmtree(folder / name)
    _remove_leftovers(folder)


def _name_of(round_number: int) -> str:
    return f"round_{round_number:05d}"


def _find_rounds(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RunFolderError(
            f"{folder} cannot be read: {error.strerror}. Mend the permissions"
        ) from error
    return [int(match[1]) for match in map(_FOLDER.fullmatch, names) if match]


def _read_pointer(folder: Path, name: str) -> str | None:
    """Return the folder that ``latest`` or ``best`` names, if any."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = (folder / name).read_text(encoding="ascii").strip()
        return text if _FOLDER.fullmatch(text) else None
    return None


def _find_candidates(folder: Path) -> list[str]:
    """Return snapshot folders in the order to try them."""
    names = map(_name_of, sorted(_find_rounds(folder), reverse=True))
    latest = _read_pointer(folder, "latest")
    return sorted(names, key=lambda name: name != latest)  # stable: the others stay newest first


def inspect_snapshot(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """Check a checkpoint without restoring it.

    Returns snapshot.json (None if it is not a checkpoint), and the fault of it or its files ("" if
    none).
    """
    content = None
    try:
        decoded = decode_strictly(_read_bytes(folder / "snapshot.json", MAX_JSON_BYTES))
        if not isinstance(decoded["extra"]["mapping"], dict):
            raise TypeError("extra")
        content = decoded
        _check_manifest(content, folder.name)
        for name in TREES:
            _check_file(folder / f"{name}.safetensors", content[name])
    except (_DamagedSnapshot, PlanError) as error:
        return content, str(error)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return content, "snapshot.json is not as written"
    return content, ""


def memories_of(folder: Path, content: Mapping[str, Any]) -> Mapping[str, Mapping[str, Tensor]]:
    """Return the agents' memories of a checkpoint that :func:`inspect_snapshot` found intact."""
    forms = list(map(tensor_files.places_in, content["forms"]))
    memories: Mapping[str, Mapping[str, Tensor]] = _read_tree(
        folder / "memories.safetensors", content["memories"], forms
    )
    return memories


def _check_manifest(manifest: dict[str, Any], name: str) -> None:
    """Raise _DamagedSnapshot unless snapshot.json has a known format, its own checksum and the
    round of its folder. Removes the checksum."""
    if manifest["format"] != FORMAT:
        raise _DamagedSnapshot(
            f"format {manifest['format']!r}, this version of privssl reads {FORMAT}"
        )
    if manifest.pop("sha256", None) != _compute_checksum(manifest):
        raise _DamagedSnapshot("snapshot.json does not match its checksum")
    if type(manifest["round"]) is not int or _name_of(manifest["round"]) != name:
        raise _DamagedSnapshot(f"snapshot.json is of round {manifest['round']}")


def _read_snapshot(folder: Path) -> Snapshot:
    try:
        manifest = decode_strictly(_read_bytes(folder / "snapshot.json", MAX_JSON_BYTES))
        _check_manifest(manifest, folder.name)
        forms = list(map(tensor_files.places_in, manifest["forms"]))
        trees = {
            name: _read_tree(folder / f"{name}.safetensors", manifest[name], forms)
            for name in TREES
        }
        extra = filled(manifest["extra"], _NO_TENSORS, [])
        _check_types(trees["memories"], manifest["config_digest"], extra)
        return Snapshot(
            manifest["round"], config_digest=manifest["config_digest"], extra=extra, **trees
        )
    except PlanError as error:
        raise _DamagedSnapshot(f"snapshot.json cannot be read ({error})") from error
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _DamagedSnapshot(f"snapshot.json is not as written ({error!r})") from error


def _check_types(memories: Any, digest: Any, extra: Any) -> None:
    """Raise TypeError unless the parts have the types of :class:`Snapshot`."""
    if type(memories) is not dict or not all(
        isinstance(memory, LazyTensors) or memory == {} for memory in memories.values()
    ):
        raise TypeError("a memory of an agent holds something else than tensors")
    if not isinstance(digest, str):
        raise TypeError("config_digest is no text")
    if not all(isinstance(value, str | int | float) for value in extra.values()):
        raise TypeError("extra holds something else than texts and numbers")


def _read_tree(
    path: Path, entry: Mapping[str, Any], forms: Sequence[Mapping[str, TensorSlice]]
) -> Any:
    """Return a tree; packed mappings are left in the file."""
    _check_file(path, entry)
    try:
        return filled(entry["outline"], tensor_files.open_lazily(path), forms)
    except SafetensorError as error:
        raise _DamagedSnapshot(f"{path.name} is not safetensors ({error})") from error
    except OSError as error:
        raise _DamagedSnapshot(f"{path.name}: {error.strerror}") from error


def _check_file(path: Path, entry: Mapping[str, Any]) -> None:
    """Raise _DamagedSnapshot unless a file of tensors has the stated size and checksum."""
    size = entry["bytes"]
    try:
        if _check_size(path, size) != size or tensor_files.sha256_of(path) != entry["sha256"]:
            raise _DamagedSnapshot(f"{path.name} does not match its checksum")
    except OSError as error:
        raise _DamagedSnapshot(f"{path.name}: {error.strerror}") from error


def _check_size(path: Path, limit: int) -> int:
    """Return the bytes of a file, before reading: stated sizes may be false, and a pipe would
    block.

    May raise OSError.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise _DamagedSnapshot(f"{path.name} is not a regular file")
    if status.st_size > limit:
        raise _DamagedSnapshot(f"{path.name} is longer than it was")
    return status.st_size


def _read_bytes(path: Path, limit: int) -> bytes:
    try:
        size = _check_size(path, limit)
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        raise _DamagedSnapshot(f"{path.name}: {error.strerror}") from error
