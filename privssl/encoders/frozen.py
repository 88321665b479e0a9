"""Encode rows once on all cores, each row alone, and cache the features on disk.

In a batch the bits of a row depend on the other rows, by rounding and by padding of texts. Then one
private row would change the features of others, and the sensitivity bound would not hold.

The cache is ``encoders/NAME-CHECKSUM`` in the folder of data sets, where the checksum covers the
weights and everything else that determines a feature. It has blocks of rows, each a safetensors
file with a digest of every row, the features and their checksum. Rows are found by digest, so runs
with other splits share their features. A truncated or damaged block is encoded again.
"""

import hashlib
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.progress import Progress
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from privssl.errors import DataError
from privssl.runtime.console import Terminal
from privssl.runtime.process import single_threaded
from privssl.settings.names import is_own_encoder
from privssl.storage import atomic_files, tensor_files

log = logging.getLogger("privssl")

Rows = Tensor | Sequence[str]  # images (N, channels, height, width) as stored, or texts

CACHES = "encoders"  # folder of the caches, in the folder of data sets
BLOCK_BYTES = 2**25  # of the features in one file
FORMAT = "2"  # 1: rows were encoded in batches


@dataclass(frozen=True, eq=False)
class Encoder:
    """A frozen public network."""

    name: str  # as in ``data.encoder``
    shape: tuple[int, ...]  # of an encoded row
    checksum: str  # SHA-256 of the weights, and of the steps before and after them
    trained_on: str  # for the privacy card
    build: Callable[[], Callable[[Rows], Tensor]]  # loads the network: a row -> float32 (1, *shape)
    cached: bool = True  # whether features are kept on disk
    takes: Literal["images", "texts"] = "images"

    @property
    def about(self) -> dict[str, str]:
        """Describe the encoder for the results and the privacy card."""
        return {"name": self.name, "weights": self.checksum, "trained_on": self.trained_on}


def encode(encoder: Encoder, rows: Rows, folder: Path) -> Tensor:
    """Encode rows as float16 (N, *shape). ``folder``: of data sets, with the cache.

    Raises DataError if a feature is not finite, or exceeds float16.
    """
    found = torch.empty(len(rows), *encoder.shape, dtype=torch.float16)
    if not len(rows):
        return found
    if not encoder.cached:
        _fill(encoder, rows, found, range(len(rows)))
        return found
    names = [digest_of(row) for row in rows]
    plain = "".join(c if c.isalnum() else "_" for c in encoder.name)[-60:]
    cache = folder / CACHES / f"{plain}-{encoder.checksum[:16]}-{FORMAT}"
    known = _read(cache, set(names), found.shape[1:])
    missing = list({name: place for place, name in enumerate(names) if name not in known}.values())
    if missing:
        log.info("%s encodes %d of %d rows, once", encoder.name, len(missing), len(rows))
        per_block = max(1, BLOCK_BYTES // (2 * math.prod(encoder.shape)))
        on_terminal = sys.stderr.isatty()
        with Progress(
            console=Terminal(stderr=True), transient=True, disable=not on_terminal
        ) as bar:
            task = bar.add_task(f"{encoder.name}: rows encoded", total=len(missing))
            for start in range(0, len(missing), per_block):
                block = missing[start : start + per_block]
                _fill(encoder, rows, found, block, lambda: bar.advance(task))
                _keep(cache, [names[place] for place in block], found[block])
        known |= {names[place]: found[place] for place in missing}
    for place, name in enumerate(names):
        found[place] = known[name]
    return found


def caches(folder: Path) -> tuple[Path, ...]:
    """Return folders of ``encode``'s caches: features and digests of rows, also private ones."""
    return tuple(sorted(path for path in (folder / CACHES).glob("*") if path.is_dir()))


def digest_of(row: Tensor | str) -> bytes:
    """Return 16 bytes that identify a stored row."""
    if isinstance(row, str):
        return hashlib.sha256(b"text " + row.encode()).digest()[:16]
    head = f"{row.dtype} {tuple(row.shape)} ".encode()
    return hashlib.sha256(head + row.contiguous().numpy().tobytes()).digest()[:16]


_networks: dict[str, Callable[[Rows], Tensor]] = {}  # by checksum; one process opens few


def _fill(
    encoder: Encoder, rows: Rows, found: Tensor, places: Sequence[int],
    done: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """Encode the rows at some indices into ``found``, each alone, in parallel threads.

    With a plug-in encoder the first row is encoded again at the end.
    """
    if encoder.checksum not in _networks:
        _networks[encoder.checksum] = encoder.build()
    network = _networks[encoder.checksum]

    def one(place: int) -> Tensor:
        # One thread per row: torch's own threads would wait for each other.
        with torch.inference_mode():
            features = network(rows[place : place + 1])
        if tuple(features.shape) != (1, *encoder.shape):
            raise DataError(
                f"{encoder.name} gives {tuple(features.shape[1:])} for a row, not {encoder.shape}: "
                "its weights are of another network"
            )
        if not bool((features.abs() <= torch.finfo(torch.float16).max).all()):  # false for NaN
            raise DataError(
                f"{encoder.name} gives numbers that are not finite or too large for row {place}. "
                "Look at this row, and at the encoder's weights"
            )
        found[place] = features[0].half()
        return features.clone()

    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    with single_threaded(), ThreadPoolExecutor(workers) as pool:
        first = None
        for features in pool.map(one, places):
            first = features if first is None else first
            done()
        own = is_own_encoder(encoder.name)
        if own and first is not None and not torch.equal(one(places[0]), first):
            del _networks[encoder.checksum]  # with its stored state
            raise DataError(
                f"data.encoder {encoder.name} gives a row other features once it has seen more "
                "rows, so it keeps something of them (a running mean, a cache?): one row would "
                "move the features of others. Use what depends on its weights and a row alone"
            )


def _read(cache: Path, wanted: set[bytes], shape: Sequence[int]) -> dict[bytes, Tensor]:
    """Return the cached features of these rows; remove damaged blocks."""
    known: dict[bytes, Tensor] = {}
    for path in sorted(cache.glob("*.safetensors")):
        if len(known) == len(wanted):
            break
        try:
            names, features = _read_block(path, shape)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            log.warning("%s is damaged (%s): its rows are encoded again.", path, error)
            path.unlink(missing_ok=True)
            continue
        known |= {n: f for n, f in zip(names, features, strict=True) if n in wanted}
    return known


def _keep(cache: Path, names: Sequence[bytes], features: Tensor) -> None:
    """Add a block. If the disk is full, the features are used without being cached."""
    whole = b"".join(names)
    rows = torch.frombuffer(bytearray(whole), dtype=torch.uint8).view(-1, 16)
    tensors = {"rows": rows, "features": features.contiguous()}
    about = {"format": FORMAT, "sha256": _checksum(tensors)}
    path = cache / f"{hashlib.sha256(whole).hexdigest()[:16]}.safetensors"
    try:
        cache.mkdir(0o700, parents=True, exist_ok=True)  # digests identify rows
        atomic_files.replace(path, save(tensors, about))
    except OSError as error:
        log.warning("%s: features cannot be cached (%s), so the next run encodes again.",
                    cache, error)  # fmt: skip


def _read_block(path: Path, shape: Sequence[int]) -> tuple[list[bytes], Tensor]:
    with safe_open(path, "pt") as file:
        about = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in ("rows", "features")}
    rows, features = tensors["rows"], tensors["features"]
    if about.get("format") != FORMAT or about.get("sha256") != _checksum(tensors):
        raise ValueError("its checksum differs")
    if tuple(features.shape) != (len(rows), *shape) or features.dtype != torch.float16:
        raise ValueError("it has features of another form")
    whole = rows.numpy().tobytes()
    return [whole[at : at + 16] for at in range(0, len(whole), 16)], features


def _checksum(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.numpy().data)
    return digest.hexdigest()


def checksum_of(files: Sequence[Path], settings: object) -> str:
    """Return the SHA-256 of files and settings. Raises DataError if a file cannot be read."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for path in files:
        try:
            tensor_files.hash_file(path, digest)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}. It is needed by data.encoder") from None
    return digest.hexdigest()


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Load weights from a safetensors file, or from a torch file with tensors alone.

    Raises DataError if it is missing, damaged, or contains anything else.
    """
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        found = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
    except Exception as error:  # torch raises many types on damaged files
        raise DataError(
            f"{path} cannot be read as weights ({str(error).splitlines()[0]}). Give a safetensors "
            "file, or a state dict as torch.save writes it"
        ) from None
    found = found.get("state_dict", found) if isinstance(found, dict) else found
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise DataError(f"{path} has no state dict of tensors. Save network.state_dict()")
    return found
