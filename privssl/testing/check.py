"""``check_algorithm``: check the promises of ``promises.py`` for one algorithm."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from privssl.algorithms import check_own
from privssl.algorithms.base import Algorithm
from privssl.errors import ConfigError
from privssl.remote.step_lookup import check_steps
from privssl.settings.error_messages import unknown
from privssl.settings.own_config import check_own_config
from privssl.testing.promises import PLACES, PROMISES, BrokenPromise, NotChecked, Trial


def check_algorithm(
    kind: type[Algorithm[Any]],
    settings: Mapping[str, Any] | None = None,
    *,
    labels: str = "support",
    promises: Collection[str] | None = None,
    also_sent: Sequence[Sequence[int]] = (),
    private: Mapping[str, Any] | None = None,
    sequential: bool = False,
    sparse: bool = False,
) -> dict[str, str]:
    """Check an algorithm on toy rows: two support and two query agents, two rounds, seconds.

    Args:
        kind: the class.
        settings: keys of its Config under which two rounds exercise every step; and ``rows``
            (image, vector or sequence), ``norm``, ``precision`` and ``width`` of the classifier.
        labels: data.labels: support, labels-at-server or labels-at-client.
        promises: names of PROMISES; None: all.
        also_sent: shapes of sent tensors that are not weights. None of them may be rows.
        private: keys of its private run, such as ``{"privacy.steps": 2, "algorithm.rounds": 4}``.
        sparse: whether weights are sent in the form of privssl.core.sparse_tensors: one-dimensional
            tensors, whose shape cannot prove that they are not rows.
        sequential: whether its agents work in sequence, so that their order matters.

    Returns:
        The promises that were not checked, and why.

    Raises:
        BrokenPromise: with the algorithm, the promise, and the observation. privssl.UserError: it
            is not an algorithm, or a name is wrong.
    """
    for what, name, known in (
        ("place of labels", labels, [*PLACES]),
        *(("promise", name, [*PROMISES]) for name in promises or ()),
    ):
        if name not in known:
            raise ConfigError(f"check_algorithm: {name}: {unknown(what, name, known)}")
    if not isinstance(kind, type):
        raise ConfigError(f"check_algorithm: {kind!r} is no class. Import the class and give it")
    if not kind.__module__.startswith("privssl.algorithms."):
        name = f"{kind.__module__}:{kind.__qualname__}"
        check_own(name, kind)
        check_own_config(name, kind)
    check_steps(kind)
    sent = frozenset(torch.Size(shape) for shape in also_sent)
    trial = Trial(kind, settings or {}, labels, sent, private or {}, sequential, sparse)
    skipped: dict[str, str] = {}
    for name, check in PROMISES.items():
        if promises is not None and name not in promises:
            continue
        promise = " ".join((check.__doc__ or name).split())
        try:
            check(trial)
        except NotChecked as reason:
            skipped[name] = str(reason)
        except BrokenPromise as broken:
            raise BrokenPromise(f"{kind.__name__} breaks '{name}' ({promise}) {broken}") from None
        except Exception as error:
            raise BrokenPromise(
                f"{kind.__name__} breaks '{name}' ({promise}) {type(error).__name__}: {error}"
            ) from error
    return skipped
