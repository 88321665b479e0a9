"""What the other files of a run remember of its accounts and its claim, for the audit.

A ledger that was cut, and a card written anew for what is left of it, agree with each other. But
the run wrote the same things elsewhere too: checkpoints remember number and hash of each ledger's
last line, metrics.csv what each had spent after each round, results.json and privacy.md repeat the
claim, and config.yaml says who has a ledger and what a visit costs. Whoever falsifies one place has
to find them all. Reads only; believes none of them.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from accounting.account_plan import AccountPlan
from accounting.budget import Budget
from accounting.canonical_json import decode_strictly
from accounting.errors import AccountingError
from accounting.events import ComposedEvent, Event, PoissonSampledGaussianEvent, leaf_events
from accounting.journal_reader import Journal, read_journal
from privssl.algorithms import ALGORITHMS
from privssl.data.split import holders
from privssl.errors import UserError
from privssl.experiment import config as configs
from privssl.experiment.config import Config
from privssl.privacy.plan import Plan
from privssl.privacy.privacy_card import render_markdown
from privssl.runs.accounts import LEDGER_HEAD, LEDGER_SEQ, ledger_of
from privssl.runs.checkpoint import MAX_JSON_BYTES
from privssl.storage import atomic_files

Card = dict[str, Any]


_RESUME = "; if the run was killed while it wrote them, resume it: it writes them anew"


class Memory(NamedTuple):
    """What a checkpoint remembers of one ledger: its last line then."""

    checkpoint: str
    agent: str
    seq: int  # number of that line, from 0
    head: str  # its hash


def has_ended(run: Path) -> bool:
    """Whether the run came to its end: then nothing may be charged after its card."""
    results = results_of(run)
    return results is not None and results.get("status") in ("finished", "budget_exhausted")


def config_of(run: Path) -> Config | None:
    """config.yaml; None when there is none that can be read."""
    try:
        return configs.load_config(run / "config.yaml")
    except UserError:
        return None


def config_requests_privacy(run: Path) -> bool:
    """Whether config.yaml has a privacy section."""
    config = config_of(run)
    return config is not None and config.privacy is not None


def unreadable_files(run: Path) -> list[str]:
    """Notes of files that are there and could not be held against anything."""
    path = run / "results.json"
    damaged = path.exists() and results_of(run) is None
    return [f"{path.name} cannot be read, so it was not compared"] if damaged else []


def shared_accounts(run: Path, config: Config | None) -> Path | None:
    """Where the accounts are, when they outlive the run; None when they are its own."""
    if config is None:
        return None
    named = ledger_of(config, run)
    return None if named == run / "ledger" else named


def check_memories(
    run: Path, config: Config | None, journals: Mapping[str, Journal], card: Card | None
) -> tuple[list[str], list[str]]:
    """Problems and notes: whether each ledger still has the lines that checkpoints remember.

    Args:
        journals: by agent, as they are audited. Where an account outlives the run and is here,
            it is asked instead.
    """
    problems, notes = [], []
    memories = _memories(run)
    accounts = shared_accounts(run, config)
    copied = accounts is not None and not accounts.is_dir()
    for agent in sorted({memory.agent for memory in memories}):
        asked = journals.get(agent)
        if accounts is not None and (path := accounts / f"{agent}.jsonl").exists():
            asked = read_journal(path)
        last = max((m for m in memories if m.agent == agent), key=lambda memory: memory.seq)
        if asked is None and copied and card is None:
            notes.append(f"{agent}: no copy of its ledger was made before the run was stopped")
        elif asked is None:
            problems.append(
                f"the ledger of {agent} is missing: {last.checkpoint} remembers entry {last.seq}"
            )
        else:
            lost = [m for m in memories if m.agent == agent and not _holds(asked, m)]
            older = [m for m in lost if copied and m.seq > asked.seq]  # of a later, killed session
            if len(older) < len(lost):
                worst = min(set(lost) - set(older), key=lambda memory: memory.seq)
                problems.append(
                    f"the ledger of {agent} was cut or replaced: {worst.checkpoint} remembers "
                    f"entry {worst.seq}"
                )
            elif older:
                notes.append(f"the copy of {agent}'s ledger is older than {last.checkpoint}")
    return problems, notes


def check_results_against_claim(run: Path, card: Card | None) -> Iterator[str]:
    """Where results.json or privacy.md says something else than the card."""
    results = results_of(run)
    said = None if results is None else results.get("privacy")
    if card is None:
        if isinstance(said, dict) and said.get("guarantee") is not None:
            yield "results.json claims a guarantee, but there is no privacy.json"
        return
    if results is not None:
        names = ("guarantee", "nominal_epsilon", "scope")
        if not isinstance(said, dict) or any(said.get(name) != card[name] for name in names):
            yield f"results.json claims something else than privacy.json{_RESUME}"
        if results.get("status") == "interrupted" and card.get("planned_visits") is not None:
            yield "the run was interrupted, but the card says that all planned visits took place"
    page = run / "privacy.md"
    if page.exists():
        try:
            same = page.is_file() and page.read_text(encoding="utf-8") == render_markdown(card)
        except (OSError, LookupError, TypeError, ValueError, AttributeError):
            same = False
        if not same:
            yield f"privacy.md is not what privacy.json says{_RESUME}"


def check_config(
    run: Path, config: Config | None, journals: Mapping[str, Journal], card: Card | None
) -> tuple[list[str], list[str]]:
    """Problems and doubts: whether ledgers and card are those that config.yaml asks for.

    Who has a ledger, and what a visit costs, is taken from the config alone. Sites have accounts of
    their own, which outlive runs: of them only the card is asked.
    """
    if config is None:
        return [], ["config.yaml is missing or cannot be read: that the ledgers charge for what it "
                    "asked is not known"]  # fmt: skip
    if config.privacy is None:
        return ["there are ledgers or a card, but config.yaml has no privacy section"], []
    problems: list[str] = []
    doubts: list[str] = []
    if config.run.engine == "local":
        wanted = set(holders(config.data.labels, config.agents).labelled)
        missing = [
            f"config.yaml gives labels to {agent}, which has no ledger"
            for agent in sorted(wanted - journals.keys())
        ]
        # A run that was killed as it started has not opened all of them.
        problems, doubts = (missing, []) if card else ([], missing)
        problems += [
            f"there is a ledger of {agent}, to which config.yaml gives no labels"
            for agent in sorted(journals.keys() - wanted)
        ]
    own = journals
    if config.privacy.ledger:  # the copy has this run's plan; the account perhaps that of another
        copies = (run / "ledger" / f"{agent}.jsonl" for agent in journals)
        own = {path.stem: read_journal(path) for path in copies if path.exists()}
    try:
        asked, noise = _asked_plan(config)
        if config.run.engine == "local":
            for agent, journal in own.items():
                if journal.plans:
                    problems += _other_plan(agent, journal.plan, config, asked, noise)
                    doubts += _other_rounding(agent, journal.plan, noise)
        planned = None if card is None else card.get("planned_visits")
        if planned is not None and planned != asked.visits:
            problems.append(f"config.yaml plans {asked.visits} visits, the card says {planned}")
        elif card is not None and planned is None and has_ended(run):
            problems.append(f"the run has ended, but its card does not plan {asked.visits} visits")
    except (UserError, AccountingError) as error:
        doubts.append(f"config.yaml was not held against the ledgers: {error}")
    return problems, doubts


def _asked_plan(config: Config) -> tuple[Plan, float | None]:
    """The plan that follows from the config, and its noise where that was found for the budget."""
    privacy = config.privacy
    assert privacy is not None
    labelled = len(holders(config.data.labels, config.agents).labelled)
    plan = ALGORITHMS[config.algorithm.name].make_plan(
        privacy, rounds=config.algorithm.rounds,
        rows_per_agent=config.data.labelled / labelled, agents=labelled,
    )  # fmt: skip
    return plan, None if privacy.noise_multiplier is not None else _noise_of(plan.event)


def _noise_of(event: Event) -> float | None:
    """The noise multiplier of a visit with Gaussian noise; None for a census."""
    found = [
        leaf.noise_multiplier
        for leaf in leaf_events(event)
        if isinstance(leaf, PoissonSampledGaussianEvent)
    ]
    return found[0] if found else None


def _other_plan(
    agent: str, plan: AccountPlan, config: Config, asked: Plan, noise: float | None
) -> Iterator[str]:
    """Where a ledger's plan is not the one that follows from the config."""
    privacy = config.privacy
    assert privacy is not None
    charged = plan.event
    if noise is not None and _nearly(said := _noise_of(charged), noise) and said != noise:
        charged = _with_noise(charged, noise)  # told as a doubt
    for name, true, found in (
        ("a visit", asked.event, charged),
        ("a budget", Budget(privacy.ledger_epsilon or privacy.epsilon, privacy.delta), plan.budget),
        ("the networks", asked.update, plan.update),
        ("protection", asked.protect, plan.protect),
        ("row counts", privacy.record_counts, plan.record_counts),
    ):
        if true != found:
            yield f"config.yaml asks for {name} of {true}, the ledger of {agent} has {found}"


def _other_rounding(agent: str, plan: AccountPlan, noise: float | None) -> Iterator[str]:
    """Noise was found on a grid: next to it, other libraries may have found the neighbour."""
    said = _noise_of(plan.event)
    if noise is not None and said != noise and _nearly(said, noise):
        yield f"config.yaml calibrates to noise {noise:g} here, the ledger of {agent} has {said:g}"


def _nearly(said: float | None, noise: float) -> bool:
    return said is not None and abs(said - noise) < 1.5e-4  # the grid's width is 1e-4


def _with_noise(event: Event, noise: float) -> Event:
    if isinstance(event, PoissonSampledGaussianEvent):
        return dataclasses.replace(event, noise_multiplier=noise)
    if isinstance(event, ComposedEvent):
        return ComposedEvent(tuple(_with_noise(part, noise) for part in event.events))
    return event


def _memories(run: Path) -> list[Memory]:
    """What readable checkpoints remember; of others ``audit/witnesses.py`` tells."""
    found = []
    for path in sorted((run / "checkpoints").glob("*/snapshot.json")):
        name = f"checkpoint {path.parent.name}"
        if path.parent.name.startswith(atomic_files.TEMPORARY):
            continue  # a killed write
        try:
            if not path.is_file() or path.stat().st_size > MAX_JSON_BYTES:
                raise ValueError("no file of a checkpoint")
            extra = decode_strictly(path.read_bytes())["extra"]["mapping"]
            for key, seq in extra.items():
                if key.startswith(LEDGER_SEQ):
                    agent = key.removeprefix(LEDGER_SEQ)
                    if type(seq) is not int or seq < 0:
                        raise TypeError("the number of a line")
                    found.append(Memory(name, agent, seq, str(extra[LEDGER_HEAD + agent])))
        except (OSError, AccountingError, LookupError, TypeError, ValueError, AttributeError):
            continue
    return found


def _holds(journal: Journal, memory: Memory) -> bool:
    return memory.seq <= journal.seq and journal.hashes[memory.seq] == memory.head


def results_of(run: Path) -> Card | None:
    """results.json; None when there is none that can be read."""
    try:
        found = json.loads((run / "results.json").read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
