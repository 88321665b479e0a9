"""Weights of an earlier run that used the private rows: a claim takes initial weights, and those
of an encoder, as public."""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from privssl.data.split_manifest import Manifest, read_manifest
from privssl.errors import PrivacyError
from privssl.experiment.config import Config

SPLIT, CARD = "split.json", "privacy.json"  # in the folder of a run
DEPTH = 3  # RUN/checkpoints/round_00001/FILE


def check_warm_start(config: Config, split: Manifest) -> Iterator[str]:
    """What a private run says of weights that lie in the folder of a run on its rows.

    A file that was moved out of its run's folder cannot be told from a public one.

    Raises:
        PrivacyError: that run used labelled rows of this one without protection; or one of both
            drew test rows, so that their row numbers are not of the same rows.
    """
    if config.privacy is None:
        return
    given = (
        ("model.weights", config.model.weights),
        ("data.encoder_weights", config.data.encoder_weights),
    )
    for key, file in given:
        if file:
            yield from _warnings_of(key, Path(file).expanduser().resolve(), split)


def _warnings_of(key: str, file: Path, split: Manifest) -> Iterator[str]:
    run = next((p for p in list(file.parents)[:DEPTH] if (p / SPLIT).is_file()), None)
    if run is None:
        return
    former = read_manifest(run / SPLIT)
    if former.checksum != split.checksum:
        yield from _of_other_files(key, run, former, split)
        return
    mine = set(chain.from_iterable(held.labelled for held in split.agents.values()))
    bare = set(former.validation).union(*(held.unlabelled for held in former.agents.values()))
    paid = set(chain.from_iterable(held.labelled for held in former.agents.values()))
    if not _has_guarantee(run):
        bare, paid = bare | paid, set()
    if both := len(mine & bare):
        raise PrivacyError(
            f"{key} is of the run {run}, which used {both} labelled rows of this run without "
            "protection, so nothing could be claimed for them. Give weights that have not seen "
            f"these rows, or leave {key} out"
        )
    if both := len(mine & paid):
        yield (
            f"{key} is of the private run {run}, which used {both} labelled rows of this run. The "
            "claim is about this run alone: for these rows the epsilons and deltas of both add up. "
            "With privacy.ledger one account counts both"
        )


def _of_other_files(key: str, run: Path, former: Manifest, split: Manifest) -> Iterator[str]:
    """Of runs whose row numbers cannot be compared; nothing where the data have another name."""
    if former.dataset != split.dataset:
        return
    advice = f"Leave {key} out, or copy the file elsewhere if it has not seen these rows"
    if any(one.settings.get("test") is not None for one in (former, split)):
        raise PrivacyError(
            f"{key} is of the run {run} on {former.dataset}, and one of both runs drew its test "
            "rows (data.test), so whether that run used labelled rows of this one without "
            f"protection is unknown. {advice}"
        )
    yield (
        f"{key} is of the run {run} on other rows of {former.dataset}. Whether labelled rows of "
        f"this run are among them was not looked at, and the claim takes them as public. {advice}"
    )


def _has_guarantee(run: Path) -> bool:
    try:
        return json.loads((run / CARD).read_bytes())["guarantee"] is not None
    except (OSError, ValueError, LookupError, TypeError):
        return False
