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
from accounting.ledger import Account, read_journal, refuse_problems
from privssl.algorithms import ALGORITHMS
from privssl.errors import RunFolderError
from privssl.experiment.config import Config
from privssl.experiment.prepare import Prepared, claim_rows, find_unprotected_rows
from privssl.privacy.former_ledgers import former_heads
from privssl.privacy.label_histogram import CENSUS
from privssl.privacy.plan import Plan
from privssl.privacy.privacy_card import Release
from privssl.runs.checkpoint import Snapshot
from privssl.storage import atomic_files

#: With the agent's id, the keys under which a checkpoint stores a ledger's length and last hash.
LEDGER_SEQ = "ledger_seq/"
LEDGER_HEAD = "ledger_head/"
#: The key under which a checkpoint stores the ledgers of replaced runs that the card will name.
FORMER = "former_ledgers"
#: The key under which a checkpoint stores the id of its run in the accounts.
RUN_ID = "run_id"
#: With the agent's id, the column of metrics.csv that shows what its account has spent.
SPENT = "dp/epsilon/"
_ROUNDING = 1e-6  # relative


def check_shared_accounts(prepared: Prepared) -> None:
    """Refuse, before a run folder is made, what accounts that outlive it would refuse.

    Raises:
        RunFolderError: the accounts would lie in the folder of a run, and go with it.
        accounting.errors.AccountingError: an account is damaged, or does not go with the config.
    """
    if prepared.config.privacy is None or not prepared.config.privacy.ledger:
        return
    own = prepared.config.folder.resolve()
    ledger = ledger_of(prepared.config, own)
    for outer in (ledger.resolve(), *ledger.resolve().parents):
        if outer == own or (outer / "split.json").exists():
            raise RunFolderError(
                f"privacy.ledger {ledger} is in {outer}, the folder of a run, and would go with it "
                "when it is replaced. Give a folder outside of all runs"
            )
    for name, promise in prepared.account_plans.items():
        path = ledger / f"{name}.jsonl"
        if path.exists():
            journal = read_journal(path)
            refuse_problems(path, journal)
            refuse_change(journal.plan, promise)
    _claim_rows(prepared, ledger, only_check=True)


def _claim_rows(prepared: Prepared, ledger: Path, *, only_check: bool) -> None:
    if prepared.plan is None:
        return
    # Without visits labelled rows are left alone, but the other rows are used as ever.
    holders = prepared.labelled_agents if prepared.plan.visits else ()
    for agent in holders:
        row_registry.refuse_partial_account(ledger, agent.id)
    claim_rows(
        ledger, holders, find_unprotected_rows(prepared.federated_data), only_check=only_check
    )


@contextmanager
def open_accounts(prepared: Prepared, folder: Path, snapshot: Snapshot | None) -> Iterator[None]:
    """Open and lock the account of every agent with labels.

    Args:
        snapshot: of the run to resume. A journal that ends before it was cut, and is refused.

    Raises:
        accounting.errors.LedgerError: a journal is missing, damaged, cut, or in use, or a row has
            an account under another agent's name, or is used without protection.
    """
    holders, privacy = {a.id: a for a in prepared.labelled_agents}, prepared.config.privacy
    ledger = ledger_of(prepared.config, folder)
    outlives = privacy is not None and bool(privacy.ledger)
    known = {} if snapshot is None else snapshot.extra
    run = str(known.get(RUN_ID, os.urandom(8).hex()))
    if outlives:
        _claim_rows(prepared, ledger, only_check=False)
    with ExitStack() as stack:
        for name, promise in prepared.account_plans.items():
            assert privacy is not None  # who promises has a privacy section
            path, seq = ledger / f"{name}.jsonl", known.get(LEDGER_SEQ + name)
            resume = seq is not None or ((snapshot is not None or outlives) and path.exists())
            account = Account.open(
                path, promise, resume=resume, minimum_seq=int(seq or 0),
                minimum_head=str(known.get(LEDGER_HEAD + name, "")),
                run=run, run_epsilon=privacy.epsilon,
            )  # fmt: skip
            stack.callback(account.close)
            holders[name].account = account
        yield


def record_former_ledgers(config: Config, folder: Path) -> dict[str, str]:
    """What a checkpoint records of ledgers of replaced runs: also of those that accounts which
    outlive runs go on with, which the card does not name."""
    return {} if config.privacy is None else {FORMER: json.dumps(former_heads(folder))}


def ledger_of(config: Config, folder: Path) -> Path:
    """Where the journals of a run's agents are: its own, or those that outlive it."""
    named = "" if config.privacy is None else config.privacy.ledger
    return Path(named).expanduser() if named else folder / "ledger"


def copy_ledgers(prepared: Prepared, folder: Path) -> None:
    """Copy journals that outlive the run into its folder, for the audit."""
    ledger, own = ledger_of(prepared.config, folder), folder / "ledger"
    if ledger == own:
        return
    with atomic_files.writing(own):
        own.mkdir(mode=0o700, exist_ok=True)
    for name in prepared.account_plans:
        path = own / f"{name}.jsonl"
        atomic_files.write(path, read_content(ledger / path.name))


#: Over sites: the part of "who also controls the server" that the noise cannot answer for.
SHIPPED_CODE: Release = (
    "what code that Flower's server ships could read at a site",
    "not covered",
    "nothing of the site's behind its fence or as another user of the system, else all of it: the "
    "operator's choice, docs/deploy.md",
)


def releases(plan: Plan | AccountPlan, config: Config) -> list[Release]:
    """Everything that leaves a support agent: name, covered or not, why."""
    plainly = [name for name in plan.update if name not in plan.protect]
    if plan.update == (CENSUS,):
        why = "integer histogram with discrete Laplace noise on every cell"
        sent: list[Release] = [(CENSUS, "covered", why)]
    elif not plainly:
        why = "trained by DP-SGD under the agent's account"
        sent = [(name, "covered", why) for name in plan.protect]
    else:
        others = ", ".join(plainly)
        through = f"noise was added, but its gradients flow through unprotected {others}"
        without = "trained on labelled rows without noise"
        sent = [
            (name, "not covered", through if name in plan.protect else without)
            for name in plan.update
        ]
    queries = ALGORITHMS[config.algorithm.name].reads_unlabelled
    if queries and config.data.labels == "labels-at-client":
        why = "from the agent's unlabelled rows and what the server sent; reads no label"
        sent.append(("networks of its query pass", "post-processing", why))
        if plan.update == (CENSUS,):
            sent.append(("sums and counts of its unlabelled rows", "post-processing", why))
    if config.run.engine == "flower":
        sent.append(SHIPPED_CODE)
    return [
        *sent,
        (
            "its weight in the average",
            "post-processing",
            "the constant 1" + ("; in a query pass the number of its unlabelled rows" * queries),
        ),
        (
            "that it declines, when its budget is spent",
            "post-processing",
            "follows from the public plan and from how often it was visited, not from rows",
        ),
        ("when it answers", "not covered", "time is a side channel"),
    ]


def read_metrics(run: Path) -> list[dict[str, str]]:
    """metrics.csv, a mapping for each line; empty where there is none that can be read."""
    try:
        with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
            return [{k: v for k, v in line.items() if k and v} for line in csv.DictReader(file)]
    except (OSError, ValueError, TypeError, csv.Error):
        return []


def to_number(text: str | None) -> float:
    """The number of a cell; NaN where there is none."""
    try:
        return float(text or "nan")
    except ValueError:
        return math.nan


def check_metrics(
    metrics: Sequence[Mapping[str, str]], journals: Mapping[str, Journal]
) -> Iterator[str]:
    """Where metrics.csv shows that more was spent than a ledger has."""
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
