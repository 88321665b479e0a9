"""Data sets: images and classes in memory, in a fixed order, with a checksum.

Rows keep their stored type. ``local_training.network_input`` scales batches by a public constant,
because means and deviations of the data are a release.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from privssl.core.agents import Origin
from privssl.core.rows import Shape, describe, kind_of, scaling_of
from privssl.data.csv_rows import Texts, read_table, read_texts
from privssl.data.downloads import PUBLISHED, default_root, read_published
from privssl.data.encoded import Unencoded
from privssl.data.image_folder import read_folder
from privssl.data.npz import NO_LABEL, Arrays, Scale, read_npz
from privssl.data.sent140 import read_sent140
from privssl.data.standardisation import are_standardised
from privssl.encoders import Encoder, encode, open_encoder, reads_texts
from privssl.encoders.own_encoders import refuse_state
from privssl.errors import ConfigError, DataError
from privssl.runtime import plugins
from privssl.runtime.process import logging_to
from privssl.settings.names import DATA_SETS, is_own_encoder
from privssl.settings.schema import DataSettings

log = logging.getLogger("privssl")


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test rows; a row's id is its index in the training rows.

    x (N, *shape), images as uint8 in 0..255 or float32 in [0, 1]; y (N,) int64 class numbers;
    y_train is ``npz.NO_LABEL`` if the class is unknown.
    """

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    class_names: tuple[str, ...]
    said: tuple[logging.LogRecord, ...] = ()  # log records from before the log file was opened
    #: Agent -> ids of its rows with labels, and without; None: the settings partition the rows.
    held: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] | None = None
    unencoded: Unencoded | None = None  # with an encoder; then x_train is empty
    records: tuple[str, ...] | None = None  # identifies rows to accounts; None: x_train
    scales: Mapping[str, Scale] | None = None  # of a table's columns
    label: str = ""  # the column of classes of a table in memory
    #: For a table in memory: whether bounds were declared, or measured on its training rows.
    table: Literal["", "declared", "measured"] = ""
    tests_drawn: bool = False  # whether test rows were sampled from possible training rows
    names_declared: bool = False  # whether class names are declared, not read from rows
    #: Whether all rows have three channels only because training images are in colour.
    coloured_by_train: bool = False
    standardised: bool = False  # whether vectors seem scaled by statistics of these rows
    persons: tuple[str, ...] | None = None  # of training rows: whose they are; None: not known

    @property
    def classes(self) -> int:
        """The number of classes C."""
        return len(self.class_names)

    @property
    def shape(self) -> Shape:
        """The shape of a row."""
        return tuple(self.x_train.shape[1:])

    @property
    def warnings(self) -> list[str]:
        """Warnings from reading the rows."""
        return [record.getMessage() for record in self.said if record.levelno >= logging.WARNING]

    @property
    def about_rows(self) -> dict[str, Any]:
        """Describe the form of a row and the class names in output order, for users of the
        classifier."""
        description: dict[str, Any] = {
            "kind": kind_of(self.shape).name, "shape": list(self.shape),
            "scaling": scaling_of(self.x_train), "encoder": None,
        }  # fmt: skip
        if raw := self.unencoded:
            description["encoder"] = raw.encoder.about
            if raw.shape is not None:
                description["raw_shape"] = list(raw.shape)
        if self.scales is not None:  # private runs have declared ones, which are public
            description["columns"] = {name: list(scale) for name, scale in self.scales.items()}
            description |= {"label": self.label} if self.label else {}
        return {"rows": description, "class_names": list(self.class_names)}


@contextmanager
def recorded() -> Iterator[list[logging.LogRecord]]:
    """Collect log records of privssl inside the block instead of showing them."""
    records, handler = list[logging.LogRecord](), BufferingHandler(capacity=10**6)
    with logging_to(handler):
        yield records
        records += handler.buffer  # closing empties the buffer


def load_dataset(
    settings: DataSettings, classes: tuple[str, ...] | None = None, *, may_be_empty: bool = False
) -> Dataset:
    """Read the data set of a config. Raises DataError if it is missing, damaged, or not in its
    format.

    Args:
        classes: all classes, for a site with training rows alone.
        may_be_empty: whether such a site's table may have no row: an error would reveal a private
            number of rows.
    """
    if classes is not None and settings.name not in ("csv", "image_folder"):
        raise DataError(
            f"classes are declared, and rows of {settings.name} have their own. Leave them out, or "
            "give rows.arrays"
        )
    if settings.name not in DATA_SETS:
        dataset = _load_plugin(settings)
        return _prepare_encoding(settings, dataset) if settings.encoder else dataset
    recorder = BufferingHandler(capacity=10**6)
    log.addHandler(recorder)  # beside the process's handlers, which show records
    try:
        arrays = _read_arrays(settings, classes, may_be_empty=may_be_empty)
    finally:
        log.removeHandler(recorder)
    if settings.encoder:
        dataset = _prepare_encoding(settings, arrays)
    else:
        assert isinstance(arrays, Arrays)  # the config requires an encoder for texts
        dataset = from_arrays(settings.name, arrays)
    return replace(dataset, said=tuple(recorder.buffer), names_declared=classes is not None)


def _load_plugin(settings: DataSettings) -> Dataset:
    """Load the data set of a plug-in: a function of (root) that returns a ``privssl.Dataset``."""
    prefix = f"data.name {settings.name}"
    advice = "Name a function of (root) that returns a privssl.Dataset"
    function = plugins.load_function("datasets", "data.name", settings.name, advice)
    root = expand_path("root", settings.root) if settings.root else default_root()
    result = plugins.call(f"{prefix} cannot be read:", function, root)
    dataset = getattr(result, "rows", None)  # the class imports this module
    if not isinstance(dataset, Dataset):
        raise ConfigError(f"{prefix} returns a {type(result).__name__}. Return a privssl.Dataset")
    if dataset.held is not None:
        raise ConfigError(
            f"{prefix} says which agent has which rows. Return Dataset.from_arrays and give "
            "data.partition, or give Dataset.federated from Python (data=...)"
        )
    return replace(dataset, name=settings.name)


def _prepare_encoding(settings: DataSettings, source: Arrays | Texts | Dataset) -> Dataset:
    """Return the data set before its encoder, which is applied to the rows that agents hold."""
    train: Origin = source.x_train if isinstance(source, Texts) else torch.as_tensor(source.x_train)
    test: Origin = source.x_test if isinstance(source, Texts) else torch.as_tensor(source.x_test)
    encoder = _open_matching_encoder(settings, train)
    shape = tuple(test.shape[1:]) if isinstance(test, Tensor) else None
    raw = Unencoded(encoder, train, test, default_root(), shape)
    empty = torch.empty(0, *encoder.shape, dtype=torch.float16)
    y_train, y_test = torch.as_tensor(source.y_train), torch.as_tensor(source.y_test)
    return Dataset(
        settings.name, empty, y_train, empty, y_test, source.class_names, unencoded=raw,
        coloured_by_train=getattr(source, "coloured_by_train", False), persons=source.persons,
    )  # fmt: skip


def encode_rows(settings: DataSettings, x: Tensor) -> tuple[Tensor, Tensor | None, str | None]:
    """Encode the rows of a site; return features, rows before the encoder, and the encoder's
    checksum."""
    if not settings.encoder:
        return x, None, None
    encoder = _open_matching_encoder(settings, x)
    return encode(encoder, x, default_root()), x, encoder.checksum


def encode_new(settings: DataSettings, x: Origin, checksum: str) -> Tensor:
    """Encode new rows for a finished run as float16, by an encoder with the run's ``checksum``.

    Raises DataError if it is missing, has other weights, or does not accept such rows.
    """
    encoder = _open_matching_encoder(settings, x)
    if encoder.checksum != checksum:
        raise DataError(
            f"data.encoder {settings.encoder}: its weights here have the checksum "
            f"{encoder.checksum[:12]}, and those of the run {checksum[:12]}. Install the weights "
            "that the run was trained with, or train again"
        )
    return encode(encoder, x, default_root())


def _open_matching_encoder(settings: DataSettings, x: Origin) -> Encoder:
    """Return the encoder of these rows. Raises DataError if it does not accept their kind."""
    is_own = is_own_encoder(settings.encoder)
    encoder = open_encoder(settings.encoder, settings.encoder_weights) if is_own else None
    accepted = encoder.takes if encoder else "texts" if reads_texts(settings.encoder) else "images"
    if accepted != (f"{kind_of(tuple(x.shape[1:])).name}s" if isinstance(x, Tensor) else "texts"):
        description = describe(tuple(x.shape[1:])) if isinstance(x, Tensor) else "texts"
        raise DataError(
            f"data.encoder {settings.encoder} takes {accepted}, and rows of {settings.name} are "
            f"{description}. Leave it out, or give another"
        )
    if encoder is None:  # after the check: its package may be missing
        return open_encoder(settings.encoder, settings.encoder_weights)
    refuse_state(encoder, tuple(x.shape[1:]) if isinstance(x, Tensor) else None)
    return encoder


def expand_path(key: str, text: str) -> Path:
    """Return the path of ``data.KEY`` with ~ expanded. Raises DataError."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise DataError(f"data.{key} is {text!r}: {error}. Write the path out") from None


def from_arrays(name: str, arrays: Arrays) -> Dataset:
    """Create a data set from arrays that a reader has checked."""
    x_train, y_train, x_test, y_test = (
        torch.from_numpy(np.ascontiguousarray(array)) for array in arrays[:4]
    )
    return Dataset(
        name, x_train, y_train, x_test, y_test, arrays.class_names,
        records=arrays.records, scales=arrays.scales, coloured_by_train=arrays.coloured_by_train,
        standardised=arrays.scales is None and _has_standardised_rows(arrays),
        persons=arrays.persons,
    )  # fmt: skip


def _has_standardised_rows(arrays: Arrays) -> bool:
    """Return whether vectors or sequences have mean 0 and deviation 1.

    Tested for all rows, for training rows, and for labelled rows.
    """
    x, labelled = arrays.x_train, arrays.y_train != NO_LABEL
    parts = ((x,), (x, arrays.x_test), *(() if labelled.all() else ((x[labelled],),)))
    return x.ndim < 4 and any(are_standardised(*part) for part in parts)


def redraw_test_rows(dataset: Dataset, count: int, rng: torch.Generator) -> Dataset:
    """Sample ``count`` test rows from training and test rows together. All others become training
    rows, the former training rows first. Raises DataError if too few rows have a label, or rows
    belong to each other."""
    if any(v is not None for v in (dataset.records, dataset.held, dataset.unencoded,
                                   dataset.persons)):  # fmt: skip
        raise DataError(
            f"data.test is {count}, but {dataset.name} brings its own test rows. Leave it out"
        )
    x = torch.cat([dataset.x_train, dataset.x_test])
    y = torch.cat([dataset.y_train, dataset.y_test])
    labelled = (y != NO_LABEL).nonzero()[:, 0]
    if count >= len(labelled):
        raise DataError(
            f"data.test is {count}, but {dataset.name} has {len(labelled)} rows with a label. Ask "
            "for fewer"
        )
    test_ids = labelled[torch.randperm(len(labelled), generator=rng)[:count]].sort().values
    is_train = torch.ones(len(y), dtype=torch.bool).index_fill(0, test_ids, False)
    return replace(
        dataset, x_train=x[is_train], y_train=y[is_train], x_test=x[test_ids], y_test=y[test_ids],
        tests_drawn=True,
    )  # fmt: skip


def checksum(dataset: Dataset) -> str:
    """Return the SHA-256, in hex, of all rows before an encoder and labels, with their shapes."""
    digest = hashlib.sha256()
    x_train, x_test, raw = dataset.x_train, dataset.x_test, dataset.unencoded
    for rows in (
        x_train if raw is None else raw.train, dataset.y_train,
        x_test if raw is None else raw.test, dataset.y_test,
    ):  # fmt: skip
        if not isinstance(rows, torch.Tensor):
            digest.update(json.dumps(rows).encode())
            continue
        array = np.ascontiguousarray(rows.numpy())
        digest.update(f"{array.shape}{array.dtype.str}".encode())
        digest.update(array.data)
    return digest.hexdigest()


def persons_checksum(dataset: Dataset) -> str | None:
    """Return the SHA-256, in hex, of the persons of training rows; None if not known."""
    if dataset.persons is None:
        return None
    return hashlib.sha256(json.dumps(dataset.persons).encode()).hexdigest()


def _read_arrays(
    settings: DataSettings, classes: tuple[str, ...] | None, *, may_be_empty: bool
) -> Arrays | Texts:
    built_in: dict[str, Callable[[], Arrays]] = {"digits": _load_digits, "toy": _make_toy_rows}
    if settings.name in built_in:
        return built_in[settings.name]()
    if settings.name == "arrays":
        raise DataError(
            "data.name is arrays: rows in memory, which no file holds. Give them from Python: "
            "privssl.train(CONFIG, data=privssl.Dataset.from_arrays(...)), or a run folder in "
            "place of CONFIG to continue its run"
        )
    root = expand_path("root", settings.root) if settings.root else default_root()
    if settings.name in PUBLISHED:
        return read_published(settings.name, root)
    if settings.name == "sent140":
        return read_sent140(root)
    if settings.text:
        return read_texts(
            root, text=settings.text, label=settings.label, classes=classes,
            may_be_empty=may_be_empty, person=settings.person,
        )  # fmt: skip
    if settings.name == "csv":
        columns = expand_path("columns", settings.columns) if settings.columns else None
        arrays = read_table(
            root, label=settings.label, columns=columns, classes=classes,
            may_be_empty=may_be_empty, person=settings.person,
        )  # fmt: skip
    else:
        is_npz = settings.name == "npz"
        arrays = read_npz(root) if is_npz else read_folder(root, settings.image_size, classes)
    warn_of_equal_rows(root, arrays)
    return arrays


def _load_digits() -> Arrays:
    """Load 1,797 handwritten digits of 8x8 pixels with 17 shades, the same as scikit-learn's.

    Read from a bundled file, because importing scikit-learn is slow. A fifth of each class are test
    rows, the same for every run.seed; tests/data/test_datasets.py makes the file.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine
    Learning Repository, 1998 (doi 10.24432/C50P49, CC BY 4.0).
    """
    return read_npz(Path(__file__).with_name("digits.npz"))


def _make_toy_rows() -> Arrays:
    """Generate 1,000 training and 200 test rows of 1x8x8 in ten well separated classes.

    A class is a random pattern of dark and light; a row is its class's pattern with Gaussian
    noise, from a fixed seed.
    """
    # NumPy guarantees RandomState's numbers; those of default_rng may change.
    rng = np.random.RandomState(0)
    patterns = rng.uniform(40, 215, (10, 1, 8, 8))
    y = np.arange(1200) % 10
    x = np.clip(patterns[y] + rng.normal(0, 25, (1200, 1, 8, 8)), 0, 255).astype(np.uint8)
    return Arrays(x[:1000], y[:1000], x[1000:], y[1000:], tuple(map(str, range(10))))


def warn_of_equal_rows(where: object, arrays: Arrays) -> None:
    """Warn of equal training rows: all equal, with different labels, or equal to test rows."""
    train, test = _hash_rows(arrays.x_train), _hash_rows(arrays.x_test)
    distinct = set(train)
    if shared := sum(row in distinct for row in test):
        log.warning(
            "%s: %d of %d test rows are also training rows, so test accuracy is too high. "
            "Remove them from one of the two.",
            where, shared, len(test),
        )  # fmt: skip
    if len(train) > 1 and len(set(train)) == 1:
        log.warning(
            "%s: all %d training rows are equal, so nothing can be learned. Look at what was read.",
            where, len(train),
        )  # fmt: skip
        return
    labels: dict[int, set[int]] = {}
    for row, label in zip(train, arrays.y_train.tolist(), strict=True):
        labels.setdefault(row, set()).update({label} - {NO_LABEL})
    if conflicting := sum(len(labels[row]) > 1 for row in train):
        log.warning(
            "%s: %d of %d training rows are equal to rows of another class. Remove duplicates, or "
            "correct their labels.",
            where, conflicting, len(train),
        )  # fmt: skip


def _hash_rows(x: NDArray[Any]) -> list[int]:
    """Return 64-bit hashes of the rows."""
    return [hash(row.tobytes()) for row in x]
