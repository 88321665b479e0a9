"""The folder of a run and the accounts in it: made once, never overwritten by accident.

The folder is private to the user (0700) and one process works in it at a time. What earlier
runs spent is never deleted: replacing a private run moves its ledger beside the folder and says
so. Whatever is refused is refused before anything in the folder has changed.
"""

import dataclasses
import fcntl
import itertools
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from accounting import registry
from accounting.errors import LedgerError
from accounting.journal import read_content
from accounting.ledger import Account, read_journal
from accounting.plan import AccountPlan, refuse_change
from privssl import config as configs
from privssl import durable
from privssl.algorithms import ALGORITHMS
from privssl.card import Release, guarantee_sentence, headline_sentence
from privssl.census_plan import CENSUS
from privssl.checkpoint import Snapshot
from privssl.config import Config
from privssl.errors import RunFolderError
from privssl.former_ledgers import former_sentences
from privssl.prepare import Prepared, bare_rows, claim_rows
from privssl.privacy import Plan

log = logging.getLogger("privssl")

#: With the agent's id, the keys under which a checkpoint remembers a ledger's length and last hash.
LEDGER_SEQ = "ledger_seq/"
LEDGER_HEAD = "ledger_head/"
#: The key under which a checkpoint remembers the name by which accounts know its run.
RUN_ID = "run_id"

#: The file of weights that a finished run releases.
CLASSIFIER = "classifier.safetensors"
#: Everything that a run may write into its folder. What holds anything else is not replaced.
CONTENTS = frozenset(
    {
        *("config.yaml", "split.json", "metrics.csv", "results.json", CLASSIFIER),
        *("privacy.json", "privacy.md", "ledger", "tensorboard", "checkpoints", "train.log"),
    }
)


def write_text(path: Path, text: str) -> None:
    """Put a small file in place whole, or not at all. RunFolderError when it cannot be."""
    with durable.writing(path):
        durable.replace(path, text.encode())


# Beginning a run ----------------------------------------------------------------------------


@contextmanager
def create_run_dir(prepared: Prepared) -> Iterator[Path]:
    """The new folder of a run; inside, no other process may work in it.

    Raises:
        RunFolderError: it exists and may not be replaced, or cannot be made.
    """
    run = prepared.config.run
    folder = prepared.config.folder
    check_free(prepared.config)
    check_shared_accounts(prepared)
    if list_entries(folder):
        with lock_run_dir(folder):
            _remove(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
    except OSError as error:
        raise RunFolderError(
            f"{folder}: this folder cannot be made: {error.strerror}. Choose another run.output"
        ) from error
    with lock_run_dir(folder):
        # In this order: a split.json says that the folder is a run, and may be replaced.
        prepared.federated_data.manifest.write(folder / "split.json")
        # Without overwrite: to run the file again must not replace the run that it is of.
        recorded = dataclasses.replace(run, overwrite=False)
        again = dataclasses.replace(prepared.config, run=recorded)
        write_text(folder / "config.yaml", configs.to_yaml(again))
        yield folder


def check_free(config: Config) -> None:
    """Raise RunFolderError where the folder of a new run is taken, and may not be replaced."""
    entries = list_entries(config.folder)
    if entries:
        _refuse_what_is_not_ours(config.folder, entries)
        if not config.run.overwrite:
            raise RunFolderError(_in_the_way(config.folder))


@contextmanager
def lock_run_dir(folder: Path) -> Iterator[None]:
    """Inside, another process that asks for the folder gets a RunFolderError.

    The lock is the operating system's, on the folder itself: it goes with its process, however
    that ends. A file system without locks is used without one.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunFolderError(
                f"{folder}: another process is training in it. Wait for it to end, or choose "
                "another run.output"
            ) from error
        except OSError as error:
            log.warning("%s cannot be locked: %s", folder, error.strerror)
        yield
    finally:
        os.close(descriptor)


def list_entries(folder: Path) -> set[str]:
    """What lies in a folder, without leftovers of killed writes; empty when there is none."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise RunFolderError(
            f"{folder}: cannot be a run folder: {error.strerror}. Choose another run.output"
        ) from error
    return {name for name in names if not name.startswith(durable.TEMPORARY)}


def _refuse_what_is_not_ours(folder: Path, entries: set[str]) -> None:
    foreign = sorted(entries - CONTENTS)
    linked = folder.is_symlink()
    if foreign or linked or "split.json" not in entries:
        what = "it is a link" if linked else "it has no split.json"
        what = f"it holds {', '.join(foreign[:3])}" if foreign else what
        raise RunFolderError(
            f"{folder} exists and is not a run of privssl ({what}), so that nothing in it is "
            "ever replaced, not even with run.overwrite=true. Choose another run.output"
        )


def _in_the_way(folder: Path) -> str:
    begun = (folder / "checkpoints" / "latest").exists()
    choices = [f"go on with it (--resume {folder})"] if begun else []
    choices += ["choose another run.output or run.seed", "replace it with run.overwrite=true"]
    return f"{folder} exists and holds a run. You can {', or '.join(choices)}"


def _remove(folder: Path) -> None:
    """Remove a former run, but never the record of what it spent."""
    with durable.writing(folder):
        ledger = folder / "ledger"
        if ledger.exists() and any(ledger.iterdir()):
            names = (f"{folder.name}.ledger-{number:03d}" for number in itertools.count(1))
            former = next(path for path in map(folder.with_name, names) if not path.exists())
            ledger.rename(former)
            log.warning(
                "The replaced run's ledger was moved to %s; what it spent still counts for these "
                "rows, and the new card names it.", former,
            )  # fmt: skip
        shutil.rmtree(folder)


# Going on with a run ------------------------------------------------------------------------


def read_outcome(folder: Path) -> tuple[dict[str, Any], str] | None:
    """What a run in this folder came to: results.json, and the sentences on its guarantee.

    None when there are no results yet.

    Raises:
        RunFolderError: a file is damaged.
    """
    results, card = _read_json(folder / "results.json"), _read_json(folder / "privacy.json")
    if results is None:
        return None
    for name, found, keys in (
        ("results.json", results, ("status", "rounds", "test_accuracy")),
        ("privacy.json", card, ("releases",)),
    ):
        if found is not None and not (isinstance(found, dict) and set(keys) <= found.keys()):
            raise RunFolderError(
                f"{folder / name} is not what a run writes. Remove it, then --resume writes it anew"
            )
    told = [tighter] if (tighter := headline_sentence(card)) else []
    told += former_sentences(card)
    if card is not None and SHIPPED_CODE[0] in {release["name"] for release in card["releases"]}:
        told.append(f"Not covered over sites: {SHIPPED_CODE[0]} ({SHIPPED_CODE[2]}).")
    return results, "\n".join([*told, guarantee_sentence(card)])


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"{path} cannot be read ({error}). Remove it, then --resume writes it anew"
        ) from error
    return found


# Accounts -----------------------------------------------------------------------------------


def check_shared_accounts(prepared: Prepared) -> None:
    """Refuse, before a run folder is made or replaced, what accounts that outlive it would refuse.

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
            if journal.problems:
                raise LedgerError(f"{path}: {journal.problems[0]}. Put the true journal back.")
            refuse_change(journal.plan, promise)
    _claim_rows(prepared, ledger, only_check=True)


def _claim_rows(prepared: Prepared, ledger: Path, *, only_check: bool) -> None:
    if prepared.plan is None:
        return
    # Without visits labelled rows are left alone, but the other rows are used as ever.
    holders = prepared.labelled_agents if prepared.plan.visits else ()
    for agent in holders:
        registry.refuse_lost_journal(ledger, agent.id)
    claim_rows(ledger, holders, bare_rows(prepared.federated_data), only_check=only_check)


@contextmanager
def open_accounts(prepared: Prepared, folder: Path, snapshot: Snapshot | None) -> Iterator[None]:
    """Give every agent with labels its account; inside, no other process has them.

    Args:
        snapshot: of the run that goes on. A journal that ends before it was cut, and is refused.

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


def damaged(prepared: Prepared) -> bool:
    """Whether a ledger is not the one that its account wrote."""
    accounts = (agent.account for agent in prepared.labelled_agents)
    return any(account.balance().problems for account in accounts if account is not None)


def ledger_of(config: Config, folder: Path) -> Path:
    """Where the journals of a run's agents are: its own, or those that outlive it."""
    named = "" if config.privacy is None else config.privacy.ledger
    return Path(named).expanduser() if named else folder / "ledger"


def remove_claim(folder: Path) -> None:
    """Remove the card of an earlier session, where no new one can be made."""
    with durable.writing(folder):
        for name in ("privacy.json", "privacy.md"):
            (folder / name).unlink(missing_ok=True)


def copy_ledgers(prepared: Prepared, folder: Path) -> None:
    """Put a copy of journals that outlive the run into its folder, for whoever audits the run."""
    ledger, own = ledger_of(prepared.config, folder), folder / "ledger"
    if ledger == own:
        return
    with durable.writing(own):
        own.mkdir(mode=0o700, exist_ok=True)
    for name in prepared.account_plans:
        path = own / f"{name}.jsonl"
        with durable.writing(path):
            durable.replace(path, read_content(ledger / path.name))


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
        sent = [
            (name, "covered", "trained by DP-SGD under the agent's account")
            for name in plan.protect
        ]
    else:
        through = (
            f"noise was added, but its gradients flow through unprotected {', '.join(plainly)}"
        )
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
