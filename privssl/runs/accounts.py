"""The privacy accounts of a run: opened, checked, copied and reported."""

import csv
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from accounting import row_registry
from accounting.account_plan import AccountPlan, refuse_change
from accounting.journal import read_content
from accounting.journal_reader import Journal
from accounting.ledger import Account, read_journal, refuse_missing, refuse_problems
from privssl.algorithms import ALGORITHMS
from privssl.errors import RunFolderError
from privssl.experiment.account_rows import claim_rows, find_unprotected_rows
from privssl.experiment.config import Config
from privssl.experiment.prepare import Prepared
from privssl.privacy.former_ledgers import former_heads
from privssl.privacy.label_histogram import CENSUS
from privssl.privacy.plan import Plan
from privssl.privacy.privacy_card import Release
from privssl.runs.checkpoint import Snapshot
from privssl.storage import atomic_files

#: With the agent's id, the checkpoint keys of a ledger's length and last hash.
LEDGER_SEQ = "ledger_seq/"
LEDGER_HEAD = "ledger_head/"
#: The checkpoint key of the ledgers of replaced runs that the card will name.
FORMER = "former_ledgers"
#: The checkpoint key of the run's id in its accounts.
RUN_ID = "run_id"
#: With the agent's id, the column of metrics.csv with the epsilon of its account.
SPENT = "dp/epsilon/"
_ROUNDING = 1e-6  # relative


def check_shared_accounts(prepared: Prepared) -> None:
    """Raise before a run folder is created, if accounts that outlive runs would refuse the run.

    Raises:
        RunFolderError: the accounts would be inside a run folder, and be deleted with it.
        accounting.errors.AccountingError: an account is damaged, or does not fit the config.
    """
    if prepared.config.privacy is None or not prepared.config.privacy.ledger:
        return
    run_folder = prepared.config.folder.resolve()
    ledger = ledger_of(prepared.config, run_folder)
    for folder in (ledger.resolve(), *ledger.resolve().parents):
        if folder == run_folder or (folder / "split.json").exists():
            raise RunFolderError(
                f"privacy.ledger {ledger} is in {folder}, the folder of a run, and would go with "
                "it when it is replaced. Give a folder outside of all runs"
            )
    for name, plan in prepared.account_plans.items():
        path = ledger / f"{name}.jsonl"
        if path.exists():
            journal = read_journal(path)
            refuse_problems(path, journal)
            refuse_change(journal.plan, plan)
    _claim_rows(prepared, ledger, only_check=True)


def _claim_rows(prepared: Prepared, ledger: Path, *, only_check: bool) -> None:
    if prepared.plan is None:
        return
    # Without visits no labelled row is read, but other rows are used.
    agents = prepared.labelled_agents if prepared.plan.visits else ()
    for agent in agents:
        row_registry.refuse_partial_account(ledger, agent.id)
    claim_rows(
        ledger, agents, find_unprotected_rows(prepared.federated_data), only_check=only_check
    )


@contextmanager
def open_accounts(prepared: Prepared, folder: Path, snapshot: Snapshot | None) -> Iterator[None]:
    """Open and lock the account of every agent with labels.

    Args:
        snapshot: of the run to resume. A journal that ends earlier was truncated, and is refused.

    Raises:
        accounting.errors.LedgerError: a journal is missing, damaged, truncated or in use, or a row
            has an account under another agent, or is used without protection.
    """
    agents, privacy = {a.id: a for a in prepared.labelled_agents}, prepared.config.privacy
    ledger = ledger_of(prepared.config, folder)
    outlives = privacy is not None and bool(privacy.ledger)
    extra = {} if snapshot is None else snapshot.extra
    run_id = str(extra.get(RUN_ID, os.urandom(8).hex()))
    if outlives:
        for name in prepared.account_plans:
            if LEDGER_SEQ + name in extra:  # before a new registry is begun
                refuse_missing(ledger / f"{name}.jsonl")
        _claim_rows(prepared, ledger, only_check=False)
    with ExitStack() as stack:
        for name, plan in prepared.account_plans.items():
            assert privacy is not None  # plans exist only with a privacy section
            path, seq = ledger / f"{name}.jsonl", extra.get(LEDGER_SEQ + name)
            resume = seq is not None or ((snapshot is not None or outlives) and path.exists())
            account = Account.open(
                path, plan, resume=resume, minimum_seq=int(seq or 0),
                minimum_head=str(extra.get(LEDGER_HEAD + name, "")),
                run=run_id, run_epsilon=privacy.epsilon,
            )  # fmt: skip
            stack.callback(account.close)
            agents[name].account = account
        yield


def record_former_ledgers(config: Config, folder: Path) -> dict[str, str]:
    """Return a checkpoint's record of ledgers of replaced runs.

    Also of those that accounts which outlive runs continue; the card does not name these.
    """
    return {} if config.privacy is None else {FORMER: json.dumps(former_heads(folder))}


def ledger_of(config: Config, folder: Path) -> Path:
    """Return the folder of the journals of a run's agents: its own, or one that outlives it."""
    configured = "" if config.privacy is None else config.privacy.ledger
    return Path(configured).expanduser() if configured else folder / "ledger"


def copy_ledgers(prepared: Prepared, folder: Path) -> None:
    """Copy journals that outlive the run into its folder, for the audit."""
    ledger, target = ledger_of(prepared.config, folder), folder / "ledger"
    if ledger == target:
        return
    with atomic_files.writing(target):
        target.mkdir(mode=0o700, exist_ok=True)
    for name in prepared.account_plans:
        path = target / f"{name}.jsonl"
        atomic_files.write(path, read_content(ledger / path.name))


#: Over sites: the exception to "who also controls the server", which noise cannot cover.
SHIPPED_CODE: Release = (
    "what code that Flower's server ships could read at a site",
    "not covered",
    "nothing of the site's behind its fence or as another user of the system, else all of it: the "
    "operator's choice, docs/deploy.md",
)


def releases(plan: Plan | AccountPlan, config: Config) -> list[Release]:
    """Return every release of a support agent: name, covered or not, why."""
    unprotected = [name for name in plan.update if name not in plan.protect]
    if plan.update == (CENSUS,):
        reason = "integer histogram with discrete Laplace noise on every cell"
        entries: list[Release] = [(CENSUS, "covered", reason)]
    elif not unprotected:
        reason = "trained by DP-SGD under the agent's account"
        entries = [(name, "covered", reason) for name in plan.protect]
    else:
        names = ", ".join(unprotected)
        with_noise = f"noise was added, but its gradients flow through unprotected {names}"
        without_noise = "trained on labelled rows without noise"
        entries = [
            (name, "not covered", with_noise if name in plan.protect else without_noise)
            for name in plan.update
        ]
    has_query = ALGORITHMS[config.algorithm.name].reads_unlabelled
    if has_query and config.data.labels == "labels-at-client":
        reason = "from the agent's unlabelled rows and what the server sent; reads no label"
        entries.append(("networks of its query pass", "post-processing", reason))
        if plan.update == (CENSUS,):
            entries.append(("sums and counts of its unlabelled rows", "post-processing", reason))
    if config.run.engine == "flower":
        entries.append(SHIPPED_CODE)
    return [
        *entries,
        (
            "its weight in the average",
            "post-processing",
            "the constant 1" + ("; in a query pass the number of its unlabelled rows" * has_query),
        ),
        (
            "that it declines, when its budget is spent",
            "post-processing",
            "follows from the public plan and from how often it was visited, not from rows",
        ),
        ("when it answers", "not covered", "time is a side channel"),
    ]


def read_metrics(run: Path) -> list[dict[str, str]]:
    """Read metrics.csv as a mapping for each line; empty if it is missing or unreadable."""
    try:
        with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
            return [{k: v for k, v in line.items() if k and v} for line in csv.DictReader(file)]
    except (OSError, ValueError, TypeError, csv.Error):
        return []


def to_number(text: str | None) -> float:
    """Parse the number of a cell; NaN if there is none."""
    try:
        return float(text or "nan")
    except ValueError:
        return math.nan


def check_metrics(
    metrics: Sequence[Mapping[str, str]], journals: Mapping[str, Journal]
) -> Iterator[str]:
    """Yield problems if metrics.csv shows a larger epsilon than a ledger."""
    last: dict[str, str] = {}
    for line in metrics:
        last |= line
    for agent, journal in journals.items():
        spent = to_number(last.get(SPENT + agent))
        if journal.plans and spent > journal.epsilon * (1 + _ROUNDING):
            yield (
                f"the ledger of {agent} was cut or replaced: metrics.csv records that it had "
                f"spent {spent:.6f}, and it has {journal.epsilon:.6f}"
            )
