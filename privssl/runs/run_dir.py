"""The folder of a run: created once, never overwritten by accident, private to the user (0700).

One process works in it at a time. A replaced run is kept under a hidden name beside the folder
until the new one has passed all checks, and is restored if the new one does not begin. Then its
ledger is moved beside the folder, and the rest is deleted.
"""

import dataclasses
import fcntl
import itertools
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from accounting.budget import Unit
from privssl.errors import RunFolderError
from privssl.experiment import config as configs
from privssl.experiment.config import Config
from privssl.experiment.prepare import Prepared
from privssl.privacy.card_text import guarantee_sentence, headline_sentence
from privssl.privacy.former_ledgers import former_sentences
from privssl.runs.accounts import SHIPPED_CODE, check_shared_accounts
from privssl.storage import atomic_files

log = logging.getLogger("privssl")

#: The released weights of a finished run.
CLASSIFIER = "classifier.safetensors"
#: The confusion matrix on test rows, as numbers and as a picture.
CONFUSION = ("confusion.csv", "confusion.png")
#: The model card.
MODEL_CARD = "model_card.md"
#: All files of a run folder. A folder with other files is not replaced.
CONTENTS = {
    *("config.yaml", "split.json", "metrics.csv", "results.json", CLASSIFIER),
    *("privacy.json", "privacy.md", "ledger", "tensorboard", "checkpoints", "train.log"),
    *CONFUSION,
    MODEL_CARD,
}
#: Files of a run that waits for its sites: a folder with no other files may be reused.
NOT_BEGUN = {"config.yaml", "split.json", "train.log"}


@contextmanager
def create_run_dir(prepared: Prepared) -> Iterator[Path]:
    """Create and lock the folder of a new run.

    A former run is restored at the end, unless ``remove_replaced_run`` was called. Raises
    RunFolderError if the folder exists and may not be replaced, or cannot be created.
    """
    run = prepared.config.run
    folder = prepared.config.folder
    refuse_existing_run(prepared.config)
    check_shared_accounts(prepared)
    with ExitStack() as stack:
        if entries := list_entries(folder):
            stack.enter_context(lock_run_dir(folder))  # also under its other name
            with atomic_files.writing(folder):
                folder.rename(_path_of_replaced(folder))
            if entries <= NOT_BEGUN:
                remove_replaced_run(folder)
            stack.callback(_restore_replaced, folder)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
        except OSError as error:
            raise RunFolderError(
                f"{folder}: this folder cannot be made: {error.strerror}. Choose another run.output"
            ) from error
        stack.enter_context(lock_run_dir(folder))
        # In this order: split.json marks the folder as a run that may be replaced.
        prepared.federated_data.manifest.write(folder / "split.json")
        # Without overwrite, so that running this file again does not replace its own run.
        run_section = dataclasses.replace(run, overwrite=False)
        config = dataclasses.replace(prepared.config, run=run_section)
        atomic_files.write(folder / "config.yaml", configs.to_yaml(config))
        yield folder


def refuse_existing_run(config: Config) -> None:
    """``check_free``, after a former run whose replacement did not begin is restored."""
    restore_replaced_run(config.folder)
    check_free(config)


def check_free(config: Config) -> None:
    """Raise RunFolderError if the folder of a new run exists and may not be replaced."""
    entries = list_entries(config.folder)
    if entries:
        _refuse_foreign_folder(config.folder, entries)
        if not (config.run.overwrite or entries <= NOT_BEGUN):
            raise RunFolderError(_explain_existing_run(config.folder))


@contextmanager
def lock_run_dir(folder: Path, named: Path | None = None) -> Iterator[None]:
    """Lock the folder itself; in another process this raises RunFolderError, about ``named`` if
    given.

    The system releases the lock when the process ends. File systems without locks are used without
    one.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunFolderError(
                f"{named or folder}: another process is training in it. Wait, or choose another "
                "run.output"
            ) from error
        except OSError as error:
            log.warning("%s cannot be locked: %s", folder, error.strerror)
        yield
    finally:
        os.close(descriptor)


def list_entries(folder: Path) -> set[str]:
    """List a folder's entries, without leftovers of killed writes; empty if it does not exist."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise RunFolderError(
            f"{folder}: cannot be a run folder: {error.strerror}. Choose another run.output"
        ) from error
    return {name for name in names if not name.startswith(atomic_files.TEMPORARY)}


def _refuse_foreign_folder(folder: Path, entries: set[str]) -> None:
    foreign = sorted(entries - CONTENTS)
    is_link = folder.is_symlink()
    if foreign or is_link or "split.json" not in entries:
        reason = "it is a link" if is_link else "it has no split.json"
        reason = f"it holds {', '.join(foreign[:3])}" if foreign else reason
        raise RunFolderError(
            f"{folder} exists and is not a run of privssl ({reason}), so nothing in it is "
            "replaced, not even with run.overwrite=true. Choose another run.output"
        )


def _explain_existing_run(folder: Path) -> str:
    has_checkpoint = (folder / "checkpoints" / "latest").exists()
    choices = [f"continue it (--resume {folder})"] if has_checkpoint else []
    choices += ["choose another run.output or run.seed", "replace it with run.overwrite=true"]
    return f"{folder} exists and holds a run. You can {', or '.join(choices)}"


def _path_of_replaced(folder: Path) -> Path:
    """Return the path of a replaced run until the new one begins."""
    return folder.with_name(f"{atomic_files.TEMPORARY}{folder.name}.replaced")


def restore_replaced_run(folder: Path) -> None:
    """Restore a run whose replacement was killed before it began."""
    former = _path_of_replaced(folder)
    if former.exists():
        with lock_run_dir(former, folder):
            _restore_replaced(folder)


def _restore_replaced(folder: Path) -> None:
    former = _path_of_replaced(folder)
    if former.exists():
        with atomic_files.writing(folder):
            if folder.exists():
                shutil.rmtree(folder)
            former.rename(folder)
        log.warning("%s contains the former run again, because the new one did not begin.", folder)


def remove_replaced_run(folder: Path) -> None:
    """Remove the run that a new one replaces, but keep its ledgers."""
    former = _path_of_replaced(folder)
    if not former.exists():
        return
    with atomic_files.writing(folder):
        ledger = former / "ledger"
        if ledger.exists() and any(ledger.iterdir()):
            names = (f"{folder.name}.ledger-{number:03d}" for number in itertools.count(1))
            target = next(path for path in map(folder.with_name, names) if not path.exists())
            ledger.rename(target)
            log.warning(
                "The replaced run's ledger was moved to %s; what it spent still counts for these "
                "rows, and the new card names it.", target,
            )  # fmt: skip
        leftover = former.with_name(
            f"{former.name}.gone"
        )  # a partly deleted run must not be restored
        shutil.rmtree(leftover, ignore_errors=True)
        former.rename(leftover)
        shutil.rmtree(leftover)


def read_outcome(folder: Path) -> tuple[dict[str, Any], str] | None:
    """Read results.json and the sentences on the guarantee; None before there are results.

    Raises RunFolderError for a damaged file.
    """
    results, card = _read_json(folder / "results.json"), _read_json(folder / "privacy.json")
    if results is None:
        return None
    for name, content, keys in (
        ("results.json", results, ("status", "rounds", "test_accuracy")),
        ("privacy.json", card, ("releases",)),
    ):
        if content is not None and not (isinstance(content, dict) and set(keys) <= content.keys()):
            raise RunFolderError(
                f"{folder / name} is not what a run writes. Remove it, then --resume writes it anew"
            )
    return results, claim_sentences(card)


def claim_sentences(card: Mapping[str, Any] | None) -> str:
    """Return the final sentences on the guarantee; None: a run without a card."""
    sentences = [headline] if (headline := headline_sentence(card)) else []
    if card is not None and card.get("former_ledgers"):
        unit: Unit = "person" if card.get("unit") == "person" else "record"
        sentences += former_sentences(card["former_ledgers"], unit)
    if card is not None and SHIPPED_CODE[0] in {release["name"] for release in card["releases"]}:
        sentences.append(f"Not covered over sites: {SHIPPED_CODE[0]} ({SHIPPED_CODE[2]}).")
    return "\n".join([*sentences, guarantee_sentence(card)])


def read_card(folder: Path) -> dict[str, Any] | None:
    """Read privacy.json; None if there is none. Raises RunFolderError for a damaged file."""
    return _read_json(folder / "privacy.json")


def read_log(folder: Path) -> str:
    """Read train.log; empty if it is missing or unreadable."""
    try:
        return (folder / "train.log").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"{path} cannot be read ({error}). Remove it, then --resume writes it anew"
        ) from error
    return content


def damaged(prepared: Prepared) -> bool:
    """Return whether a ledger was changed by another writer."""
    accounts = (agent.account for agent in prepared.labelled_agents)
    return any(account.balance().problems for account in accounts if account is not None)


def remove_claim(folder: Path) -> None:
    """Remove the cards of an earlier session if no new ones can be made."""
    remove(folder, "privacy.json", "privacy.md", MODEL_CARD)


def remove(folder: Path, *names: str) -> None:
    """Remove files of an earlier session, if they exist. Raises RunFolderError."""
    with atomic_files.writing(folder):
        for name in names:
            (folder / name).unlink(missing_ok=True)
