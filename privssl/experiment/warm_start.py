"""Check initial weights from earlier runs on the private rows.

Guarantees treat initial weights, and those of an encoder, as public.
"""

import json
import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from torch import nn

from accounting.budget import Unit
from privssl.data.split_manifest import Manifest, read_manifest
from privssl.errors import PrivacyError
from privssl.experiment.config import Config
from privssl.experiment.row_checks import PUBLISHED
from privssl.models.own_networks import runs_behind
from privssl.settings.names import is_outside
from privssl.settings.schema import PrivacySettings

SPLIT, CARD = "split.json", "privacy.json"  # in the folder of a run
DEPTH = 3  # RUN/checkpoints/round_00001/FILE
_OF_A_RUN = ("config.yaml", "metrics.csv", "model_card.md", "checkpoints/latest")
_OVER_SITES = re.compile("^  engine: flower$", re.MULTILINE)  # in config.yaml


def check_warm_start(
    config: Config, split: Manifest, new_classifier: Callable[[], nn.Module]
) -> Iterator[str]:
    """Yield warnings of a private run about weights in the folder of a run on its rows.

    A file that was moved out of its run's folder looks like a public one. An own network may
    contain one of ``run.classifier()``.

    Raises:
        PrivacyError: that run used labelled rows of this one without protection, or its folder is
            missing; or one of both sampled test rows, so that their row numbers differ; or its
            agents were sites, whose rows are unknown.
    """
    if config.privacy is None:
        return
    privacy = config.privacy
    weight_files = (
        ("model.weights", config.model.weights),
        ("data.encoder_weights", config.data.encoder_weights),
    )
    for key, file in weight_files:
        if file:
            yield from _find_file_warnings(key, Path(file).expanduser().resolve(), split, privacy)
    if is_outside(config.model.name):
        for run in runs_behind(new_classifier()):
            if not (run / SPLIT).is_file():
                raise PrivacyError(
                    f"model is of the run {run}, whose split.json is not there, so whether that "
                    "run used labelled rows of this one without protection is unknown. Put the "
                    "folder back, or give a network that has not seen these rows"
                )
            yield from _find_file_warnings("model", run / SPLIT, split, privacy)


def _find_file_warnings(
    key: str, file: Path, split: Manifest, privacy: PrivacySettings
) -> Iterator[str]:
    """Yield warnings about one file; ``privacy``: of this run."""
    counts_public = privacy.record_counts == "public"
    above = list(file.parents)[:DEPTH]
    run = next((p for p in above if (p / SPLIT).is_file()), None)
    if run is None:
        if damaged := next(filter(_is_run_without_split, above), None):
            raise PrivacyError(
                f"{key} is in {damaged}, the folder of a run without its split.json, so whether "
                "that run used labelled rows of this one without protection is unknown. "
                f"{_advice_for(key)}"
            )
        return
    former = read_manifest(run / SPLIT)
    if not split.agents:  # the agents are sites
        yield (
            f"{key} is of the run {run} on {former.dataset}. Whether rows of the sites are among "
            "them was not looked at, and the claim takes them as public. If that run used labelled "
            "rows of a site, nothing is guaranteed for these, or its epsilon adds up"
        )
        return
    if former.checksum != split.checksum:
        yield from _find_other_data_warnings(key, run, former, split)
        return
    if _is_run_over_sites(run, former):
        raise PrivacyError(
            f"{key} is of the run {run} over sites on {former.dataset}, so whether that run used "
            f"labelled rows of this one without protection is unknown. {_advice_for(key)}"
        )
    own_rows = set(chain.from_iterable(holding.labelled for holding in split.agents.values()))
    if privacy.unit == "person":  # and other rows of the same persons, which this run does not use
        others = chain.from_iterable(holding.unlabelled for holding in split.agents.values())
        own_rows |= set(range(split.rows)) - {*others, *split.validation}
    unprotected = set(former.validation).union(
        *(holding.unlabelled for holding in former.agents.values())
    )
    charged = set(chain.from_iterable(holding.labelled for holding in former.agents.values()))
    if not _has_guarantee(run, privacy.unit):  # one of another unit bounds nothing for this one
        unprotected, charged = unprotected | charged, set()
    if shared := len(own_rows & unprotected):
        raise PrivacyError(
            f"{key} is of the run {run}, which used {shared} labelled rows of this run without "
            "protection, so nothing could be claimed for them. Give weights that have not seen "
            f"these rows, or leave {key} out"
        )
    shared = len(own_rows & charged)
    if shared or (charged and not counts_public):
        used = f"{shared} labelled rows" if counts_public else "labelled rows, perhaps"
        yield (
            f"{key} is of the private run {run}, which used {used} of this run. The claim "
            "is about this run alone: for these rows the epsilons and deltas of both add up. With "
            "privacy.ledger one account counts both"
        )


def _find_other_data_warnings(
    key: str, run: Path, former: Manifest, split: Manifest
) -> Iterator[str]:
    """Yield warnings about runs whose row numbers cannot be compared.

    None if both data sets are published, under different names.
    """
    same = former.dataset == split.dataset
    if not same and {former.dataset, split.dataset} <= {*PUBLISHED, "sent140"}:
        return
    if same and any(manifest.settings.get("test") is not None for manifest in (former, split)):
        raise PrivacyError(
            f"{key} is of the run {run} on {former.dataset}, and one of both runs drew its test "
            "rows (data.test), so whether that run used labelled rows of this one without "
            f"protection is unknown. {_advice_for(key)}"
        )
    yield (
        f"{key} is of the run {run} on {'other rows of ' * same}{former.dataset}. Whether labelled "
        "rows of this run are among them was not looked at, and the claim takes them as public. "
        f"{_advice_for(key)}"
    )


def _is_run_without_split(folder: Path) -> bool:
    """Return whether a folder has other files of a run."""
    config, *others = (folder / name for name in _OF_A_RUN)
    return config.is_file() and any(path.is_file() for path in others)


def _advice_for(key: str) -> str:
    return f"Leave {key} out, or copy the file elsewhere if it has not seen these rows"


def _is_run_over_sites(run: Path, former: Manifest) -> bool:
    """Return whether agents of a run were sites: its split.json does not have their rows."""
    config = run / "config.yaml"
    text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
    return not former.agents or bool(_OVER_SITES.search(text))


def _has_guarantee(run: Path, unit: Unit) -> bool:
    try:
        guarantee = json.loads((run / CARD).read_bytes())["guarantee"]
        return guarantee is not None and guarantee.get("unit", "record") == unit
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False
