"""Generation of labelled rows by the generator of a finished run, and their guarantee."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from accounting.budget import NO_GUARANTEE
from generators.base import ConditionalGenerator
from generators.sampling import draw_samples
from privssl.algorithms import ALGORITHMS
from privssl.algorithms.base import Algorithm
from privssl.core.rows import BYTES, IMAGE, kind_of
from privssl.core.task import Task
from privssl.data.column_values import read_scales, snap_to_columns
from privssl.data.npz import Scale
from privssl.errors import PrivacyError, RunFolderError, UserError
from privssl.experiment import config as configs
from privssl.privacy.card_text import guarantee_sentence
from privssl.runs import checkpoint, run_dir
from privssl.runtime import randomness
from privssl.settings.error_messages import unknown

DRAWS = 50  # attempts per row, until the classifier is confident

#: Probabilities (N, C) of rows in the format of SyntheticRows.
Classify = Callable[[NDArray[Any]], NDArray[np.float32]]

NOT_PROTECTED = (
    "Unlabelled rows are not protected: query agents trained the generator on them without noise, "
    "and these rows may show them."
)


@dataclass(frozen=True)
class SyntheticRows:
    """Synthetic rows with labels.

    ``x`` (N, channels, height, width) uint8 in 0..255, or for other rows (N, *shape) float32
    network input: of a table numbers that a line of it can have, of bytes cut to [-1, 1]; ``y``
    (N,) int64, the names of all classes in order, and a sentence on the guarantee. Of a table also
    its columns, and the name of the column of classes.
    """

    x: NDArray[Any]
    y: NDArray[np.int64]
    class_names: tuple[str, ...]
    covered_by: str
    columns: Mapping[str, Scale] | None = None
    label: str = "label"


def generate_rows(
    folder: Path,
    count: int,
    classes: Sequence[str] | None = None,
    seed: int = 0,
    *,
    acknowledge_query_rows: bool = False,
    confidence: float = 0.0,
    classify: Classify | None = None,
) -> SyntheticRows:
    """Generate rows by a run's generator at lambda 0, equally many of each class.

    Arguments as in ``api.run.Run.generate``; ``classify``: the run's released classifier, needed
    with ``confidence``.

    Raises:
        UserError: no finished run with a generator, an unknown class, ``count`` or ``seed`` not an
            integer or too small, or the classifier not confident of a row in ``DRAWS`` attempts.
        PrivacyError: the run is private, and acknowledge_query_rows is false.
    """
    for name, value, least in (("count", count, 1), ("seed", seed, 0)):
        if not isinstance(value, Integral) or value < least:
            raise UserError(f"{name} is {value!r}: give a whole number, {least} or more")
    if not 0 <= confidence < 1:
        raise UserError(f"confidence is {confidence}: give a probability, 0 or more and below 1")
    config, results, card = _read_finished_run(folder)
    names = tuple(results["class_names"])
    chosen = names if classes is None else _check_classes(classes, names)
    covered_by = coverage_sentence(card)
    if card is not None and not acknowledge_query_rows:
        raise PrivacyError(
            f"{folder} is a private run, and its claim does not cover what this would give out. "
            f"{NOT_PROTECTED} If the owners of these rows agree, give --acknowledge-query-rows "
            "(in Python acknowledge_query_rows=True)"
        )
    form = results["rows"]
    shape, columns = tuple(form["shape"]), read_scales(form)
    # Without the classifier, because a run folder must not choose code to import.
    assert config.run.precision != "auto"  # a run's config records it
    task = Task(len(names), shape, nn.Identity, config.run.precision)
    algorithm = ALGORITHMS[config.algorithm.name](config.algorithm, task)
    snapshot = checkpoint.load_snapshot(folder / "checkpoints", configs.config_hash(config))
    if snapshot.round != results["rounds"]:
        raise RunFolderError(
            f"{folder}: its last intact checkpoint is of round {snapshot.round}, not of its last, "
            f"{results['rounds']}. Restore the folder, or start a new run"
        )
    state = algorithm.StateType(**snapshot.state)  # type: ignore[arg-type]
    generator = algorithm.generator(state)
    if generator is None:
        raise UserError(
            f"{folder} trained no generator: no support agent answered its census, or no query "
            "agent was there for its last rounds"
        )
    class_ids = torch.tensor([names.index(name) for name in dict.fromkeys(chosen)])
    labels = class_ids[torch.arange(count) % len(class_ids)]
    draw = partial(
        _draw_rows, generator, classes=len(names), shape=shape, seed=seed, columns=columns,
        bounded=form.get("scaling") == BYTES,
    )  # fmt: skip
    levels = draw(labels)
    for attempt in range(1, DRAWS + 1):
        unsure = _find_unsure_rows(levels, labels, confidence, classify)
        if not len(unsure):
            label = form.get("label") or config.data.label or "label"
            return SyntheticRows(levels.numpy(), labels.numpy(), names, covered_by, columns, label)
        if attempt < DRAWS:
            levels[unsure] = draw(labels[unsure], attempt=attempt)
    raise UserError(
        f"confidence {confidence}: {len(unsure)} of {count} rows stay below it after {DRAWS} "
        f"draws, one of class {names[int(labels[unsure[0]])]}. Give less, or classes that the "
        "generator shows well"
    )


def _check_classes(classes: Iterable[str], known: Sequence[str]) -> list[str]:
    """Return the names of the requested classes. Raises UserError for none, a number, or an unknown
    name."""
    chosen = list(classes) if isinstance(classes, Iterable) else [classes]
    if not chosen:
        raise UserError("classes is empty: name a class, or leave it out for all")
    for name in chosen:
        if not isinstance(name, str):
            raise UserError(f"classes has {name!r}: give names, which are text: {str(name)!r}")
        if name not in known:
            raise UserError(f"classes {name}: {unknown('class', name, known)}")
    return chosen


def _draw_rows(
    generator: ConditionalGenerator, labels: Tensor, *, classes: int, shape: Sequence[int],
    seed: int, attempt: int = 0, columns: Mapping[str, Scale] | None, bounded: bool,
) -> Tensor:  # fmt: skip
    """Generate a row of each label, an image as uint8; another ``attempt`` gives other rows.

    ``bounded``: whether vectors without columns are in [-1, 1], as bytes are.
    """
    rng = randomness.stream(seed, attempt, "world", "generate")
    rows = draw_samples(generator, labels, classes, shape, rng).nan_to_num(0.0).float()
    if kind_of(tuple(shape)) is IMAGE:
        return ((rows + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    if columns is not None:
        return torch.from_numpy(snap_to_columns(rows.numpy(), columns))
    return rows.clamp(-1, 1) if bounded else rows


def _find_unsure_rows(
    x: Tensor, labels: Tensor, confidence: float, classify: Classify | None
) -> Tensor:
    """Return the indices of rows whose label has a probability below ``confidence``."""
    if not confidence:
        return torch.empty(0, dtype=torch.int64)
    assert classify is not None
    probabilities = torch.from_numpy(classify(x.numpy())).gather(1, labels[:, None])[:, 0]
    return (~(probabilities >= confidence)).nonzero()[:, 0]  # NaN counts as not confident


def coverage_sentence(card: Mapping[str, Any] | None) -> str:
    """Describe the guarantee of synthetic rows, from the run's privacy card; None: not private."""
    if card is None:
        return f"{NO_GUARANTEE} That includes rows made by its generator."
    claim = guarantee_sentence(card)
    if card["guarantee"] is None:  # NOMINAL, or a damaged ledger
        return f"{claim} Synthetic rows have no guarantee either. {NOT_PROTECTED}"
    # In a sound scope no network used a labelled row, or a label, without noise.
    return (
        f"Of labelled rows, these synthetic rows are post-processing of what is covered: {claim} "
        f"{NOT_PROTECTED}"
    )


def _read_finished_run(
    folder: Path,
) -> tuple[configs.Config, dict[str, Any], dict[str, Any] | None]:
    """Return config, results and privacy card of a finished run that has a generator."""
    if not (folder / "config.yaml").is_file() or not (folder / "split.json").is_file():
        raise RunFolderError(f"{folder} is not the folder of a run. Give one that train wrote")
    config = configs.load_config(folder / "config.yaml")
    if ALGORITHMS[config.algorithm.name].generator is Algorithm.generator:
        makers = [n for n, kind in ALGORITHMS.items() if kind.generator is not Algorithm.generator]
        raise UserError(
            f"{folder} is a run of {config.algorithm.name}, which has no generator. Give a run of "
            f"{' or '.join(makers)}"
        )
    if getattr(config.algorithm, "generator_rounds", None) == 0:
        raise UserError(
            f"{folder} trained no generator. Train with algorithm.generator_rounds=100, or another "
            "number above 0"
        )
    outcome = run_dir.read_outcome(folder)
    if outcome is None or outcome[0]["status"] == "interrupted":
        raise RunFolderError(
            f"{folder} is not finished. End it with python -m privssl.train --resume {folder}"
        )
    results = outcome[0]
    if not {"rows", "class_names"} <= results.keys():
        raise RunFolderError(f"{folder}: results.json is of an older version. Start a new run")
    card = run_dir.read_card(folder)
    if config.privacy is not None and card is None:
        raise RunFolderError(f"{folder}: privacy.json is missing. Restore it, or start a new run")
    return config, results, card
