"""The files of a run for the audit: each is read once and untrusted."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from accounting.errors import AccountingError
from accounting.journal_reader import Journal, read_journal
from privssl.algorithms import WITH_UNREAD
from privssl.engines.remote import read_charges
from privssl.errors import RunFolderError, UserError
from privssl.experiment import config as configs
from privssl.experiment.config import Config
from privssl.privacy.card_schema import PrivacyCard, parse_card
from privssl.runs import checkpoint
from privssl.runs.accounts import LEDGER_HEAD, LEDGER_SEQ, ledger_of, read_metrics
from privssl.storage import atomic_files

_MAX_CARD_BYTES = 1 << 24


@dataclass
class Findings:
    """Problems make the verdict VIOLATED, doubts INCONCLUSIVE, notes change nothing."""

    problems: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class LedgerRecord(NamedTuple):
    """A ledger's last line as recorded by a checkpoint."""

    checkpoint: str
    agent: str
    seq: int  # number of that line, from 0
    head: str  # its hash


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run folder; None or empty where a file is absent or cannot be read.

    Args:
        unknown_keys: places of unknown keys in the card.
        metrics: a mapping for each line of metrics.csv.
        snapshots: snapshot.json of intact checkpoints, by round. damaged: problems of the others.
            records: ledger lines that any of them recorded.
        charged: by site, its name for the run and the ids of charges that any of them recorded.
        accounts: folder of accounts that outlive the run; None if the run has its own accounts.
        own: journals in the run folder. shared: those in ``accounts``, None without that folder.
    """

    run: Path
    config: Config | None
    card: PrivacyCard | None
    unknown_keys: list[str]
    results: dict[str, Any] | None
    metrics: list[dict[str, str]]
    snapshots: dict[int, dict[str, Any]]
    damaged: list[str]
    records: list[LedgerRecord]
    charged: dict[str, tuple[str, set[str]]]
    accounts: Path | None
    own: dict[str, Journal]
    shared: dict[str, Journal] | None

    @property
    def ended(self) -> bool:
        """Whether the run reached its end: then no charge may follow its card."""
        return (self.results or {}).get("status") in ("finished", "budget_exhausted")


def read_run(run: Path) -> RunFiles:
    """Read the folder of a run.

    Raises:
        RunFolderError: its privacy card, or a folder, cannot be read.
        LedgerError: a ledger file cannot be read.
    """
    card, unknown_keys = _read_card(run / "privacy.json")
    try:
        config = configs.load_config(run / "config.yaml", algorithms=WITH_UNREAD)
    except UserError:
        config = None
    copies = {path.stem: read_journal(path) for path in _list_journals(run / "ledger")}
    snapshots, damaged, records = _read_checkpoints(run / "checkpoints")
    accounts = None if config is None else ledger_of(config, run)
    accounts = None if accounts == run / "ledger" else accounts
    shared = None
    if accounts is not None and accounts.is_dir():
        agents = {record.agent for record in records} | copies.keys()
        paths = sorted(accounts.glob("*.jsonl"))
        shared = {p.stem: read_journal(p) for p in paths if not copies or p.stem in agents}
    return RunFiles(
        run, config, card, unknown_keys, _read_results(run / "results.json"), read_metrics(run),
        snapshots, damaged, records, _collect_site_charges(run, config, snapshots),
        accounts, copies, shared,
    )  # fmt: skip


def _read_card(path: Path) -> tuple[PrivacyCard | None, list[str]]:
    try:
        if not path.exists():
            return None, []
        if path.stat().st_size > _MAX_CARD_BYTES:
            raise RunFolderError(f"{path}: too large to be a privacy card")
        return parse_card(path.read_bytes())
    except (OSError, AccountingError) as error:
        raise RunFolderError(f"{path}: cannot be read as a privacy card ({error})") from error
    except ValueError as error:
        raise RunFolderError(f"{path}: {error}") from error


def _read_results(path: Path) -> dict[str, Any] | None:
    try:
        results = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return results if isinstance(results, dict) else None


def _list_journals(folder: Path) -> list[Path]:
    """List the journals of a folder; a glob would take an unreadable folder for an empty one."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".jsonl")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RunFolderError(
            f"{folder}: cannot be read: {error.strerror}. Only its owner may read it"
        ) from error


def _read_checkpoints(
    folder: Path,
) -> tuple[dict[int, dict[str, Any]], list[str], list[LedgerRecord]]:
    snapshots: dict[int, dict[str, Any]] = {}
    damaged: list[str] = []
    records: list[LedgerRecord] = []
    for path in sorted(path for path in folder.glob("*") if path.is_dir()):
        if path.name.startswith(atomic_files.TEMPORARY):
            continue  # left by a killed write
        content, damage = checkpoint.inspect_snapshot(path)
        if damage:
            damaged.append(f"checkpoint {path.name} cannot be read ({damage})")
        elif content is not None:
            snapshots[content["round"]] = content
        if content is not None:
            records += _read_ledger_records(f"checkpoint {path.name}", content["extra"]["mapping"])
    return snapshots, damaged, records


def _collect_site_charges(
    run: Path, config: Config | None, snapshots: Mapping[int, dict[str, Any]]
) -> dict[str, tuple[str, set[str]]]:
    charges: dict[str, tuple[str, set[str]]] = {}
    if config is None or config.run.engine == "local":
        return charges
    for number, content in snapshots.items():
        folder = run / "checkpoints" / f"round_{number:05d}"
        for agent, memory in checkpoint.memories_of(folder, content).items():
            name, ids = read_charges(memory)
            charges[agent] = name, ids | charges.get(agent, ("", set()))[1]
    return charges


def _read_ledger_records(name: str, extra: Mapping[str, Any]) -> Iterable[LedgerRecord]:
    for key, seq in extra.items():
        if key.startswith(LEDGER_SEQ) and type(seq) is int and seq >= 0:
            agent = key.removeprefix(LEDGER_SEQ)
            yield LedgerRecord(name, agent, seq, str(extra.get(LEDGER_HEAD + agent)))
