"""The ``gen/*`` metrics of one evaluation."""

from collections.abc import Callable

from torch import Tensor

from generators.base import ConditionalGenerator
from privssl.experiment.prepare import Prepared
from privssl.reporting.generator_quality import GeneratorQuality


def measure_generator(
    quality: GeneratorQuality, generator: ConditionalGenerator,
    predict: Callable[[Tensor], Tensor], prepared: Prepared, *, closely: bool, taught: bool,
) -> dict[str, float]:  # fmt: skip
    """By held-out rows; training rows are read where none is private.

    Args:
        predict: rows (N, *shape) in [-1, 1] -> classes (N,) by the released classifier.
        closely: compare with training rows too.
        taught: train a classifier on synthetic rows, which takes seconds.
    """
    values = quality.measure(generator, predict)
    if values and taught:
        values |= quality.accuracy_from_synthetic_rows(generator)
    if values and closely and prepared.plan is None:
        agents = prepared.federated_data.agents  # none, where sites have the rows
        held = [rows.x for a in agents for rows in (a.held_labelled, a.held_unlabelled) if rows]
        values |= quality.nearest_ratio(generator, held) if held else {}
    return values
