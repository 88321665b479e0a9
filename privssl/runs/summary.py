"""Results of a finished run: results.json, model card, confusion matrix."""

import json
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privssl import __version__
from privssl.experiment.prepare import Prepared
from privssl.ops import dispatch
from privssl.reporting import figures
from privssl.reporting.trackers import csv_text
from privssl.runs.checkpoint import Progress
from privssl.runs.model_card import model_card
from privssl.runs.run_dir import CONFUSION, MODEL_CARD, claim_sentences, remove
from privssl.runtime.code_version import fingerprint
from privssl.storage import atomic_files
from privssl.training.evaluation import Scores


def summarise(
    prepared: Prepared,
    progress: Progress,
    *,
    status: str,
    durations: Sequence[float],
    card: Mapping[str, Any] | None,
    problems: Sequence[str],
    metrics: Mapping[str, Any],
    warnings: Sequence[str],
) -> dict[str, Any]:
    """Return the content of results.json.

    ``durations``: seconds of each round of this session; ``problems``: damage to ledgers;
    ``metrics``: of the last evaluation, empty if this session had none.
    """
    config, p = prepared.config, progress
    # A session without rounds uses the mean of earlier ones.
    durations = durations or [p.seconds / max(p.round, 1)]
    persons = prepared.federated_data.dataset.persons is not None
    persons |= config.privacy is not None and config.privacy.unit == "person"  # of sites
    return {
        "name": config.run.name,
        "algorithm": config.algorithm.name,
        "dataset": config.data.name,
        "seed": config.run.seed,
        "status": status,
        "rounds": p.round,
        "agents": {k: v for k, v in vars(config.agents).items() if isinstance(v, int) and v},
        "labels": config.data.labelled,
        **({"labels_of": "persons"} if persons else {}),
        "test_accuracy": {"final": p.final, "best": p.best, "best_round": p.best_round},
        "metrics": dict(metrics),
        "seconds": {
            "total": round(p.seconds, 3),
            "round_median": round(statistics.median(durations), 4),
        },
        "bytes": {"up": p.up, "down": p.down},
        "privacy": {
            "guarantee": None if card is None else card["guarantee"],
            "nominal_epsilon": None if card is None else card["nominal_epsilon"],
            "scope": "none" if prepared.plan is None else prepared.plan.scope,
            **({"problems": list(problems)} if problems else {}),
        },
        **prepared.about_rows,
        "warnings": list(dict.fromkeys(warnings)),
        **({"plugins": prepared.plugins} if prepared.plugins else {}),
        "split_hash": prepared.published_split_hash,
        "versions": {
            "privssl": __version__,
            "sources": fingerprint(),
            "torch": version("torch"),
            "opacus": version("opacus"),
            "kernels": dispatch.instruction_set() or "torch",
        },
    }


def write_summary(folder: Path, results: Mapping[str, Any], card: Mapping[str, Any] | None) -> None:
    """Write the model card of a finished run, and results.json; ``card``: the privacy card."""
    if results["status"] == "interrupted":
        remove(folder, MODEL_CARD)
    else:
        atomic_files.write(folder / MODEL_CARD, model_card(results, claim_sentences(card)))
    atomic_files.write(folder / "results.json", json.dumps(results, indent=2) + "\n")


def write_confusion(folder: Path, scores: Scores, names: Sequence[str]) -> figures.Picture:
    """Write confusion.csv and confusion.png; return the picture."""
    csv_path, png_path = (folder / name for name in CONFUSION)
    picture = figures.confusion_plot(scores.confusion, names)
    atomic_files.write(csv_path, confusion_csv(scores.confusion, names))
    atomic_files.write(png_path, figures.as_png(picture))
    return picture


def confusion_csv(counts: NDArray[np.int64], names: Sequence[str]) -> str:
    """Format a confusion matrix: a line per true class, a column per predicted class.

    ``counts``: (C, C + 1); the last column, of outputs that are not finite, is written if it has
    any.
    """
    width = len(names) + bool(counts[:, -1].any())
    header = ["true class", *names, "not finite"][: width + 1]
    lines = [[name, *row[:width]] for name, row in zip(names, counts.tolist(), strict=True)]
    return csv_text([header, *lines])
