"""Check that all files of a run exist and agree with each other.

Deleting the files that contradict a forged ledger leaves the rest in agreement. So config.yaml and
the way the run ended determine which files must exist. A missing file that bears on the guarantee
is a doubt, another one a note. Contradictions about other matters are doubts too. Contradictions to
the guarantee itself are found by ``audit/cross_checks.py``.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from accounting.journal_reader import Journal
from privssl.audit.run_files import Findings, RunFiles
from privssl.data import split_manifest
from privssl.data.split import holders
from privssl.errors import DataError
from privssl.experiment import config as configs
from privssl.experiment.config import Config
from privssl.privacy.card_schema import PrivacyCard
from privssl.runs.accounts import LEDGER_SEQ, SPENT, to_number
from privssl.runs.run_dir import CLASSIFIER, read_log
from privssl.storage import tensor_files

_ROUNDING = 1e-6  # relative
_ROUND = re.compile(r" INFO Round (\d{1,9}) of ")  # of train.log
_OF_PROGRESS = (  # numbers that results.json repeats from the last checkpoint
    ("rounds", "round"),
    *((f"test_accuracy.{name}", name) for name in ("final", "best", "best_round")),
    *(("bytes.up", "up"), ("bytes.down", "down"), ("seconds.total", "seconds")),
)


def check(files: RunFiles, journals: Mapping[str, Journal], findings: Findings) -> None:
    """Report missing files of a run, and contradictions between its files.

    Without a card there is no guarantee, and no file is missing. ``cross_checks.check_config``
    reports a missing config.yaml.
    """
    card, config, results = files.card, files.config, files.results
    if card is None:
        return
    findings.doubts += _find_missing_files(files, card)
    findings.notes += [
        f"{name} is absent: it was not compared"
        for name in ("privacy.md", "split.json", "train.log", "tensorboard")
        if not (files.run / name).exists()
    ]
    _check_weights(files, card, findings)
    findings.doubts += files.damaged
    if results is not None:
        findings.doubts += [
            *_find_checkpoint_differences(files, results),
            *_find_config_differences(config, results),
            *_find_metrics_differences(files, results), *_find_interruption(files, results),
            *_find_later_rounds(files, results),
        ]  # fmt: skip
    if config is None or config.privacy is None:
        return
    digest = configs.config_hash(config)
    if any(content.get("config_digest") != digest for content in files.snapshots.values()):
        findings.doubts.append(
            "config.yaml is not the one that the checkpoints were made with (or it is of another "
            f"version: the card says privssl {card['versions'].get('privssl', 'unknown')})"
        )
    if config.run.engine == "local":
        findings.doubts += _find_split_differences(files, journals)
        findings.doubts += _find_missing_records(files, config)
        findings.problems += _find_spending_differences(files, config, journals)
        findings.doubts += _find_missing_visits(files, config, card)


def _find_missing_files(files: RunFiles, card: PrivacyCard) -> Iterator[str]:
    """Yield missing files that bear on the guarantee.

    An interrupted run releases no classifier, and has no metrics before its first round.
    """
    run, released = files.run, files.ended or card["weights"] is not None
    text = "{} is absent: every run writes it, and it was not possible to compare it"
    if not (run / "results.json").exists():
        yield text.format("results.json")
    if not (run / "metrics.csv").is_file() and (files.results or {}).get("rounds") != 0:
        yield text.format("metrics.csv")
    if not any((run / "checkpoints").glob("round_*/snapshot.json")):
        yield text.format("checkpoints")
    if released and not (run / CLASSIFIER).is_file():
        yield text.format(CLASSIFIER)
    if not released and files.results is not None and (run / CLASSIFIER).exists():
        yield f"results.json says that the run was interrupted, but there is a {CLASSIFIER}"


def _find_interruption(files: RunFiles, results: Mapping[str, Any]) -> Iterator[str]:
    """Yield doubts about an interruption: rolling back all files to an older checkpoint looks like
    one."""
    if not files.ended:
        yield (
            f"the run was interrupted after round {results.get('rounds')}, and nothing here shows "
            "that no later round was charged. Resume it, or compare the last hash of each ledger "
            "with one kept elsewhere"
        )


def _check_weights(files: RunFiles, card: PrivacyCard, findings: Findings) -> None:
    """Compare the released weights with the hash on the card."""
    path, weights = files.run / CLASSIFIER, card["weights"]
    if weights is None:
        if files.ended:
            findings.doubts.append("the run has ended, but its card names no weights")
    elif weights["file"] != CLASSIFIER:
        findings.problems.append(
            f"the card names weights that no run releases: {weights['file']!r}"
        )
    elif path.is_file():
        try:
            if tensor_files.sha256_of(path) != weights["sha256"]:
                findings.problems.append(
                    f"{CLASSIFIER} does not hold the weights that the card names"
                )
        except OSError as error:
            findings.doubts.append(f"{CLASSIFIER} cannot be read: {error.strerror}")


def _find_checkpoint_differences(files: RunFiles, results: Mapping[str, Any]) -> Iterator[str]:
    """Yield differences between results.json and the last checkpoint."""
    if not files.snapshots:
        return
    last, rounds = max(files.snapshots), results.get("rounds")
    progress = files.snapshots[last]["extra"]["mapping"]
    if type(rounds) is not int or (last != rounds if files.ended else last < rounds):
        yield f"results.json is of round {rounds}, but the last checkpoint is of round {last}"
    elif last == rounds:
        for name, key in _OF_PROGRESS:
            value = _read_field(results, name)
            if not _are_equal(value, progress.get(key), within=1e-3 if key == "seconds" else 0.0):
                yield f"results.json says {name} {value}, the checkpoint {progress.get(key)}"


def _find_config_differences(config: Config | None, results: Mapping[str, Any]) -> Iterator[str]:
    if config is None:
        return
    agents = {k: v for k, v in vars(config.agents).items() if isinstance(v, int) and v}
    for name, expected in (
        ("name", config.run.name), ("algorithm", config.algorithm.name),
        ("dataset", config.data.name), ("seed", config.run.seed),
        ("agents", agents), ("labels", config.data.labelled),
    ):  # fmt: skip
        if results.get(name) != expected:
            yield f"results.json says {name} {results.get(name)}, config.yaml {expected}"


def _find_metrics_differences(files: RunFiles, results: Mapping[str, Any]) -> Iterator[str]:
    """Yield differences between metrics.csv and results.json."""
    table, rounds = files.metrics, results.get("rounds")
    if not table or not files.ended:
        return
    if [to_number(line.get("round")) for line in table] != list(range(1, len(table) + 1)) or (
        len(table) != rounds
    ):
        yield f"metrics.csv does not have rounds 1 to {rounds}, each once, as results.json says"
        return
    for name, expected in (
        ("bytes.up", sum(to_number(line.get("comm/up_bytes")) for line in table)),
        ("bytes.down", sum(to_number(line.get("comm/down_bytes")) for line in table)),
        ("test_accuracy.final", to_number(table[-1].get("test/accuracy"))),
    ):
        value = _read_field(results, name)
        if not math.isnan(expected) and not _are_equal(value, expected):
            yield f"results.json says {name} {value}, metrics.csv {expected:g}"


def _find_later_rounds(files: RunFiles, results: Mapping[str, Any]) -> Iterator[str]:
    """Yield a doubt if train.log has a later round than results.json: files were rolled back."""
    last = max(map(int, _ROUND.findall(read_log(files.run))), default=0)
    rounds = results.get("rounds")
    if isinstance(rounds, int) and last > rounds:
        yield f"train.log tells of round {last}, results.json of {rounds} rounds"


def _find_spending_differences(
    files: RunFiles, config: Config, journals: Mapping[str, Journal]
) -> Iterator[str]:
    """Yield values of epsilon in metrics.csv that the ledger never had, or another final one."""
    if not files.metrics or config.privacy is None or config.privacy.ledger:
        return
    for agent, journal in journals.items():
        if not journal.plans:
            continue
        column = [to_number(line.get(SPENT + agent)) for line in files.metrics]
        epsilons = _compute_epsilons(journal)
        unknown = [
            n for n in column if not any(math.isclose(n, e, rel_tol=_ROUNDING) for e in epsilons)
        ]
        if unknown or column != sorted(column):
            yield f"metrics.csv has other epsilons of {agent} than its ledger had after any visit"
        elif files.ended and not math.isclose(column[-1], epsilons[-1], rel_tol=_ROUNDING):
            yield (
                f"metrics.csv ends with epsilon {column[-1]:.6f} of {agent}, its ledger with "
                f"{epsilons[-1]:.6f}"
            )


def _compute_epsilons(journal: Journal) -> list[float]:
    """Return epsilon before the first visit and after each."""
    spent, epsilons = journal.plan.cost(()), [0.0]
    for event in journal.events:
        spent = spent + journal.plan.charge(event)
        epsilons.append(journal.epsilon_at(spent))
    return epsilons


def _find_split_differences(files: RunFiles, journals: Mapping[str, Journal]) -> Iterator[str]:
    """Yield damage of split.json, or numbers of rows that differ from public counts."""
    path = files.run / "split.json"
    if not path.is_file():
        return
    try:
        holdings = split_manifest.read_manifest(path).agents
    except DataError:  # without its text: labels could be tried until a hash matches
        yield "split.json cannot be used: it is damaged, or was changed after it was written"
        return
    for agent, journal in journals.items():
        if journal.plans and (rows := journal.plan.n_public) is not None:
            holding = holdings.get(agent)
            if holding is None or len(holding.labelled) != rows:
                yield f"the ledger of {agent} is of {rows} rows, and split.json gives it others"


def _find_missing_records(files: RunFiles, config: Config) -> Iterator[str]:
    """Yield checkpoints without a ledger record of an agent that has labels by config.yaml."""
    for number, content in files.snapshots.items():
        for agent in holders(config.data.labels, config.agents).labelled:
            if LEDGER_SEQ + agent not in content["extra"]["mapping"]:
                yield f"checkpoint round_{number:05d} has no record of the ledger of {agent}"


def _find_missing_visits(files: RunFiles, config: Config, card: PrivacyCard) -> Iterator[str]:
    """Yield missing planned visits in a run that does not report an exhausted budget."""
    status, planned = (files.results or {}).get("status"), card["planned_visits"]
    if config.privacy is None or config.privacy.ledger or not card["agents"]:
        return
    fewest = min(entry["visits"] for entry in card["agents"])
    if status == "finished" and planned is not None and fewest < planned:
        yield f"the run finished, but an agent had {fewest} visits of {planned}"
    if status == "budget_exhausted" and all(entry["visits_left"] for entry in card["agents"]):
        yield "results.json says that a budget was spent, but the card has visits left for all"


def _read_field(results: Mapping[str, Any], name: str) -> Any:
    """Return a field of results.json by its dotted name."""
    outer, _, inner = name.partition(".")
    value = results.get(outer)
    return value.get(inner) if inner and isinstance(value, dict) else value


def _are_equal(a: object, b: object, *, within: float = 0.0) -> bool:
    numbers = [n for n in (a, b) if isinstance(n, int | float) and not isinstance(n, bool)]
    if len(numbers) < 2:
        return a == b
    try:
        return math.isclose(*numbers, rel_tol=1e-9, abs_tol=within)
    except OverflowError:  # an integer beyond the range of floats
        return False
