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
    features = torch.empty(len(rows), *encoder.shape, dtype=torch.float16)
    if not len(rows):
        return features
    if not encoder.cached:
        _encode_into(encoder, rows, features, range(len(rows)))
        return features
    digests = [digest_of(row) for row in rows]
    safe_name = "".join(c if c.isalnum() else "_" for c in encoder.name)[-60:]
    cache = folder / CACHES / f"{safe_name}-{encoder.checksum[:16]}-{FORMAT}"
    cached = _read_cache(cache, set(digests), features.shape[1:])
    missing = list(
        {digest: index for index, digest in enumerate(digests) if digest not in cached}.values()
    )
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
                _encode_into(encoder, rows, features, block, lambda: bar.advance(task))
                _write_block(cache, [digests[index] for index in block], features[block])
        cached |= {digests[index]: features[index] for index in missing}
    for index, digest in enumerate(digests):
        features[index] = cached[digest]
    return features


def caches(folder: Path) -> tuple[Path, ...]:
    """Return folders of ``encode``'s caches: features and digests of rows, also private ones."""
    return tuple(sorted(path for path in (folder / CACHES).glob("*") if path.is_dir()))


def digest_of(row: Tensor | str) -> bytes:
    """Return 16 bytes that identify a stored row."""
    if isinstance(row, str):
        return hashlib.sha256(b"text " + row.encode()).digest()[:16]
    header = f"{row.dtype} {tuple(row.shape)} ".encode()
    return hashlib.sha256(header + row.contiguous().numpy().tobytes()).digest()[:16]


_networks: dict[str, Callable[[Rows], Tensor]] = {}  # by checksum; one process opens few


def _encode_into(
    encoder: Encoder, rows: Rows, output: Tensor, indices: Sequence[int],
    advance: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """Encode the rows at some indices into ``output``, each alone, in parallel threads.

    With a plug-in encoder the first row is encoded again at the end.
    """
    if encoder.checksum not in _networks:
        _networks[encoder.checksum] = encoder.build()
    network = _networks[encoder.checksum]

    def encode_row(index: int) -> Tensor:
        # One thread per row: torch's own threads would wait for each other.
        with torch.inference_mode():
            features = network(rows[index : index + 1])
        if tuple(features.shape) != (1, *encoder.shape):
            raise DataError(
                f"{encoder.name} gives {tuple(features.shape[1:])} for a row, not {encoder.shape}: "
                "its weights are of another network"
            )
        if not bool((features.abs() <= torch.finfo(torch.float16).max).all()):  # false for NaN
            raise DataError(
                f"{encoder.name} gives numbers that are not finite or too large for row {index}. "
                "Look at this row, and at the encoder's weights"
            )
        output[index] = features[0].half()
        return features.clone()

    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    with single_threaded(), ThreadPoolExecutor(workers) as pool:
        first = None
        for features in pool.map(encode_row, indices):
            first = features if first is None else first
            advance()
        is_own = is_own_encoder(encoder.name)
        if is_own and first is not None and not torch.equal(encode_row(indices[0]), first):
            del _networks[encoder.checksum]  # with its stored state
            raise DataError(
                f"data.encoder {encoder.name} gives a row other features once it has seen more "
                "rows, so it keeps something of them (a running mean, a cache?): one row would "
                "move the features of others. Use what depends on its weights and a row alone"
            )


def _read_cache(cache: Path, digests: set[bytes], shape: Sequence[int]) -> dict[bytes, Tensor]:
    """Return the cached features of these rows; remove damaged blocks."""
    cached: dict[bytes, Tensor] = {}
    for path in sorted(cache.glob("*.safetensors")):
        if len(cached) == len(digests):
            break
        try:
            block_digests, features = _read_block(path, shape)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            log.warning("%s is damaged (%s): its rows are encoded again.", path, error)
            path.unlink(missing_ok=True)
            continue
        cached |= {n: f for n, f in zip(block_digests, features, strict=True) if n in digests}
    return cached


def _write_block(cache: Path, digests: Sequence[bytes], features: Tensor) -> None:
    """Add a block. If the disk is full, the features are used without being cached."""
    joined = b"".join(digests)
    rows = torch.frombuffer(bytearray(joined), dtype=torch.uint8).view(-1, 16)
    tensors = {"rows": rows, "features": features.contiguous()}
    metadata = {"format": FORMAT, "sha256": _compute_checksum(tensors)}
    path = cache / f"{hashlib.sha256(joined).hexdigest()[:16]}.safetensors"
    try:
        cache.mkdir(0o700, parents=True, exist_ok=True)  # digests identify rows
        atomic_files.replace(path, save(tensors, metadata))
    except OSError as error:
        log.warning("%s: features cannot be cached (%s), so the next run encodes again.",
                    cache, error)  # fmt: skip


def _read_block(path: Path, shape: Sequence[int]) -> tuple[list[bytes], Tensor]:
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in ("rows", "features")}
    rows, features = tensors["rows"], tensors["features"]
    if metadata.get("format") != FORMAT or metadata.get("sha256") != _compute_checksum(tensors):
        raise ValueError("its checksum differs")
    if tuple(features.shape) != (len(rows), *shape) or features.dtype != torch.float16:
        raise ValueError("it has features of another form")
    joined = rows.numpy().tobytes()
    return [joined[start : start + 16] for start in range(0, len(joined), 16)], features


def _compute_checksum(tensors: dict[str, Tensor]) -> str:
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
        weights = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
    except Exception as error:  # torch raises many types on damaged files
        raise DataError(
            f"{path} cannot be read as weights ({str(error).splitlines()[0]}). Give a safetensors "
            "file, or a state dict as torch.save writes it"
        ) from None
    weights = weights.get("state_dict", weights) if isinstance(weights, dict) else weights
    if not isinstance(weights, dict) or not all(isinstance(v, Tensor) for v in weights.values()):
        raise DataError(f"{path} has no state dict of tensors. Save network.state_dict()")
    return weights
