"""Whether everything is there that a run of this config writes, and says one thing.

Who deletes what remembers more than a falsified ledger leaves the rest in agreement. So what should
be in the folder is asked of config.yaml and of how the run ended, not of the folder: an absent file
that bears on the claim is a doubt (the verdict is INCONCLUSIVE), another one is noted. Files that
contradict each other about something else than the claim are doubts as well: somebody edited one.
Reads only. The audit takes what contradicts the claim itself from ``audit/cross_checks.py``.
"""

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accounting.account_plan import AccountPlan
from accounting.journal_reader import Journal
from privssl.audit.cross_checks import has_ended, results_of
from privssl.data import split_manifest
from privssl.data.split import holders
from privssl.errors import DataError
from privssl.experiment import config as configs
from privssl.experiment.config import Config
from privssl.runs import checkpoint
from privssl.runs.accounts import LEDGER_SEQ, SPENT
from privssl.runs.run_dir import CLASSIFIER
from privssl.storage import atomic_files, tensor_files

Card = dict[str, Any]

_ROUNDING = 1e-6  # relative
_ROUND = re.compile(r" INFO Round (\d{1,9}) of ")  # of train.log
_OF_PROGRESS = (  # where results.json repeats a number of the last checkpoint
    ("rounds", "round"),
    *((f"test_accuracy.{name}", name) for name in ("final", "best", "best_round")),
    *(("bytes.up", "up"), ("bytes.down", "down"), ("seconds.total", "seconds")),
)


class Findings(NamedTuple):
    """Problems make the verdict VIOLATED, doubts INCONCLUSIVE, notes change nothing."""

    problems: list[str]
    doubts: list[str]
    notes: list[str]


def check(
    run: Path, config: Config | None, card: Card | None, journals: Mapping[str, Journal]
) -> Findings:
    """What is absent from a run's folder, and where its files contradict each other.

    Without a card nothing is claimed, and nothing is missing. That there is no config.yaml is for
    ``cross_checks.check_config`` to tell.
    """
    found = Findings([], [], [])
    if card is None:
        return found
    results, ended = results_of(run), has_ended(run)
    rounds = results.get("rounds") if results is not None else None
    found.doubts.extend(_absent(run, ended or card.get("weights") is not None, rounds))
    found.notes.extend(
        f"{name} is absent: it was not compared"
        for name in ("privacy.md", "split.json", "train.log", "tensorboard")
        if not (run / name).exists()
    )
    _check_weights(run, card, ended, found)
    whole, damaged = _snapshots(run / "checkpoints")
    found.doubts.extend(damaged)
    found.doubts.extend(_other_results(whole, results, ended, config))
    table = _table(run)
    found.doubts.extend(_other_curves(table, results, ended))
    if results is not None and not ended:
        found.doubts.extend(_interruption(rounds))
        if not (run / "train.log").exists():
            found.doubts.append("train.log is absent: whether the run went on is not known")
    found.doubts.extend(_later_rounds(run, rounds))
    if config is None or config.privacy is None:
        return found
    if any(about.get("config_digest") != configs.config_hash(config) for about in whole.values()):
        found.doubts.append(
            "config.yaml is not the one that the checkpoints were made with (or it is of another "
            f"version: the card says privssl {_version(card)})"
        )
    found.doubts.extend(_other_split(run, config, journals))
    if config.run.engine == "local":
        found.doubts.extend(_forgetful(whole, config))
        found.problems.extend(_other_spending(table, journals, config, ended))
        found.doubts.extend(_too_few(card, results, config))
    return found


def _interruption(rounds: object) -> Iterator[str]:
    yield (
        f"the run was interrupted after round {rounds}, and nothing here shows that no later round "
        "was charged. Resume it, or compare the last hash of each ledger with one kept elsewhere"
    )


# What is absent -----------------------------------------------------------------------------


def _absent(run: Path, released: bool, rounds: object) -> Iterator[str]:
    """Files that bear on the claim. An interrupted run releases no classifier, and has no curve
    before its first round."""
    text = "{} is absent: every run writes it, and it was not possible to compare it"
    if not (run / "results.json").exists():
        yield text.format("results.json")
    if not (run / "metrics.csv").is_file() and rounds != 0:
        yield text.format("metrics.csv")
    if not any((run / "checkpoints").glob("round_*/snapshot.json")):
        yield text.format("checkpoints")
    if released and not (run / CLASSIFIER).is_file():
        yield text.format(CLASSIFIER)
    if not released and results_of(run) is not None and (run / CLASSIFIER).exists():
        yield f"results.json says that the run was interrupted, but there is a {CLASSIFIER}"


def _check_weights(run: Path, card: Card, ended: bool, found: Findings) -> None:
    """Hold the released weights against the hash on the card."""
    if "weights" not in card:
        found.notes.append(
            f"the card names no hash of the weights: it was written by a version (privssl "
            f"{_version(card)}) whose cards have none, or the hash was removed"
        )
        return
    said = card["weights"]
    if said is None:
        if ended:
            found.doubts.append("the run has ended, but its card names no weights")
    elif not isinstance(said, dict) or said.keys() != {"file", "sha256"}:
        found.problems.append("the card's weights are not a file and its SHA-256")
    elif said["file"] != CLASSIFIER:
        found.problems.append(f"the card names weights that no run releases: {said['file']!r:.40}")
    elif (path := run / CLASSIFIER).is_file():
        try:
            if tensor_files.sha256_of(path) != said["sha256"]:
                found.problems.append(f"{CLASSIFIER} does not hold the weights that the card names")
        except OSError as error:
            found.doubts.append(f"{CLASSIFIER} cannot be read: {error.strerror}")


# What is there ------------------------------------------------------------------------------


def _snapshots(folder: Path) -> tuple[dict[int, Card], list[str]]:
    """What whole checkpoints say of themselves, by round; what is wrong with the others."""
    whole, damaged = {}, []
    for path in sorted(folder.glob("round_*")):
        if path.name.startswith(atomic_files.TEMPORARY):
            continue
        about, why = checkpoint.examined(path)
        if about is None:
            damaged.append(f"checkpoint {path.name} cannot be read ({why})")
        else:
            whole[about["round"]] = about
    return whole, damaged


def _other_results(
    whole: Mapping[int, Card], results: Card | None, ended: bool, config: Config | None
) -> Iterator[str]:
    """Where results.json says something else than the last checkpoint or config.yaml."""
    if results is None:
        return
    if whole:
        last = max(whole)
        progress = whole[last]["extra"]["mapping"]
        rounds = results.get("rounds")
        if type(rounds) is not int or (last != rounds if ended else last < rounds):
            yield f"results.json is of round {rounds}, but the last checkpoint is of round {last}"
        elif last == rounds:
            for name, key in _OF_PROGRESS:
                value, _, inner = name.partition(".")
                said = results.get(value)
                said = said.get(inner) if inner and isinstance(said, dict) else said
                if not _same(said, progress.get(key), within=1e-3 if key == "seconds" else 0.0):
                    yield f"results.json says {name} {said}, the checkpoint {progress.get(key)}"
    if config is not None:
        agents = {k: v for k, v in vars(config.agents).items() if isinstance(v, int) and v}
        for name, true in (
            ("name", config.run.name), ("algorithm", config.algorithm.name),
            ("dataset", config.data.name), ("seed", config.run.seed),
            ("agents", agents), ("labels", config.data.labelled),
        ):  # fmt: skip
            if results.get(name) != true:
                yield f"results.json says {name} {results.get(name)}, config.yaml {true}"


def _table(run: Path) -> list[dict[str, str]]:
    """metrics.csv, a mapping a line; empty where there is none that can be read."""
    try:
        with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
            return [{k: v for k, v in line.items() if k and v} for line in csv.DictReader(file)]
    except (OSError, ValueError, TypeError, csv.Error):
        return []


def _other_curves(
    table: Sequence[Mapping[str, str]], results: Card | None, ended: bool
) -> Iterator[str]:
    """Where metrics.csv says something else than results.json."""
    if results is None or not table or not ended:
        return
    rounds, said = results.get("rounds"), [_number(line.get("round")) for line in table]
    if said != list(range(1, len(said) + 1)) or said[-1] != rounds:
        yield f"metrics.csv does not have rounds 1 to {rounds}, each once, as results.json says"
        return
    for name, key, true in (
        ("bytes.up", "up", sum(_number(line.get("comm/up_bytes")) for line in table)),
        ("bytes.down", "down", sum(_number(line.get("comm/down_bytes")) for line in table)),
        ("test_accuracy.final", "final", _number(table[-1].get("test/accuracy"))),
    ):
        value = results.get(name.partition(".")[0])
        value = value.get(key) if isinstance(value, dict) else None
        if not math.isnan(true) and not _same(value, true):
            yield f"results.json says {name} {value}, metrics.csv {true:g}"


def _later_rounds(run: Path, rounds: object) -> Iterator[str]:
    """Whether train.log knows of a later round than results.json: somebody went back."""
    try:
        log = (run / "train.log").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    told = max((int(number) for number in _ROUND.findall(log)), default=0)
    if isinstance(rounds, int) and told > rounds:
        yield f"train.log tells of round {told}, results.json of {rounds} rounds"


def _other_spending(
    table: Sequence[Mapping[str, str]], journals: Mapping[str, Journal], config: Config, ended: bool
) -> Iterator[str]:
    """Where metrics.csv has an epsilon that the ledger never had, or ends with another one."""
    if not table or config.privacy is None or config.privacy.ledger:
        return
    for agent, journal in journals.items():
        if not journal.plans:
            continue
        column = [_number(line.get(SPENT + agent)) for line in table]
        had = _course(journal)
        strange = [n for n in column if not any(math.isclose(n, e, rel_tol=_ROUNDING) for e in had)]
        if strange or column != sorted(column):
            yield (f"metrics.csv has other epsilons of {agent} than its ledger had after any visit")
        elif ended and not math.isclose(column[-1], had[-1], rel_tol=_ROUNDING):
            yield (
                f"metrics.csv ends with epsilon {column[-1]:.6f} of {agent}, its ledger with "
                f"{had[-1]:.6f}"
            )


def _course(journal: Journal) -> list[float]:
    """Epsilon before the first visit and after each."""
    plan: AccountPlan = journal.plan
    spent, course = plan.cost(()), [0.0]
    for event in journal.events:
        spent = spent + plan.charge(event)
        course.append(plan.epsilon(spent))
    return course


def _other_split(run: Path, config: Config, journals: Mapping[str, Journal]) -> Iterator[str]:
    """Where split.json is damaged, or gives other numbers of rows than public counts say."""
    path = run / "split.json"
    if not path.is_file() or config.run.engine != "local":
        return
    try:
        held = split_manifest.read_manifest(path).agents
    except DataError as error:
        yield f"split.json cannot be used: {str(error).replace(str(path), 'it')}"
        return
    for agent, journal in journals.items():
        if journal.plans and (rows := journal.plan.n_public) is not None:
            holding = held.get(agent)
            if holding is None or len(holding.labelled) != rows:
                yield f"the ledger of {agent} is of {rows} rows, and split.json gives it others"


def _forgetful(whole: Mapping[int, Card], config: Config) -> Iterator[str]:
    """Checkpoints that remember no ledger of an agent which has labels by config.yaml."""
    for number, about in whole.items():
        remembered = about["extra"]["mapping"]
        for agent in holders(config.data.labels, config.agents).labelled:
            if LEDGER_SEQ + agent not in remembered:
                yield f"checkpoint round_{number:05d} remembers no ledger of {agent}"


def _too_few(card: Card, results: Card | None, config: Config) -> Iterator[str]:
    """Fewer visits than were planned, in a run that says it did not run out of budget."""
    status = None if results is None else results.get("status")
    planned = card.get("planned_visits")
    if config.privacy is None or config.privacy.ledger:
        return
    visits = [entry.get("visits") for entry in card["agents"]]
    if not all(type(number) is int for number in visits):
        return  # told by ``audit/card_recomputation.py``
    if status == "finished" and planned is not None and any(n < planned for n in visits):
        yield f"the run finished, but an agent had {min(visits)} visits of {planned}"
    if status == "budget_exhausted" and all(entry.get("visits_left") for entry in card["agents"]):
        yield "results.json says that a budget was spent, but the card has visits left for all"


def _same(said: object, true: object, *, within: float = 0.0) -> bool:
    numbers = [n for n in (said, true) if isinstance(n, int | float) and not isinstance(n, bool)]
    if len(numbers) < 2:
        return said == true
    try:
        return math.isclose(*numbers, rel_tol=1e-9, abs_tol=within)
    except OverflowError:  # a whole number that no float holds
        return False


def _number(text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return math.nan


def _version(card: Card) -> str:
    versions = card.get("versions")
    return str(versions.get("privssl")) if isinstance(versions, dict) else "unknown"
