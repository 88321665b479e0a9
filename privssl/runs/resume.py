"""Check that a run may be resumed in its folder: same config, same rows at the same agents.

A guarantee counts the releases about the rows of each account. With other rows after an
interruption, one row's releases would be spread over accounts.
"""

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from accounting.errors import LedgerError
from accounting.ledger import read_journal
from privssl.algorithms import WITH_UNREAD
from privssl.data import split_manifest
from privssl.errors import DataError, RunFolderError
from privssl.experiment import config as configs
from privssl.experiment.config import Config
from privssl.experiment.prepare import Prepared
from privssl.privacy.former_ledgers import former_heads, recorded_heads
from privssl.runs import run_dir
from privssl.runs.accounts import FORMER, check_metrics, ledger_of, read_metrics
from privssl.runs.checkpoint import Snapshot
from privssl.runtime.code_version import fingerprint

log = logging.getLogger("privssl")

#: The checkpoint key of the split's hash, for runs without privacy.
SPLIT = "split"
#: The checkpoint key of the code that wrote it.
SOURCES = "sources"
#: The checkpoint key of the plug-ins, as JSON.
PLUGINS = "plugins"
#: The checkpoint key of class names and of a table's columns, as JSON.
NAMES = "names"
#: The checkpoint key of files that the guarantee takes as public: their checksums as JSON.
PUBLIC = "public"
#: The line of train.log with the device of a session, if not the CPU.
_OTHER_DEVICE = re.compile(r"^[\d-]+ [\d:,]+ INFO Device (?!cpu\b)(\S+), torch ", re.MULTILINE)


def config_of(folder: Path) -> Path:
    """Return the config file of a run folder. Raises RunFolderError if it is not a run."""
    path = folder / "config.yaml"
    if path.is_file():
        return path
    if (folder.parent / "config.yaml").is_file() and folder.is_file():
        reason, advice = "a file of one", f"--resume {folder.parent}"
    else:
        reason = "it has no config.yaml" if folder.is_dir() else "there is no such folder"
        advice = "--resume the folder that a run named at its end"
    raise RunFolderError(f"{folder} is not the folder of a run: {reason}. Give {advice}")


def check_resumable(folder: Path, config: Config, *, longer: bool = False) -> None:
    """Check that this is the folder of a run of this config.

    Args:
        longer: whether it may have fewer rounds.

    Raises:
        RunFolderError: it is not a run, or a setting that affects results differs.
        ConfigError: its config.yaml is damaged.
    """
    former = configs.load_config(config_of(folder), algorithms=WITH_UNREAD)
    settings, former_settings = _collect_result_settings(config), _collect_result_settings(former)
    differences = [
        f"{key} is {_format_setting(settings, key)} here, but "
        f"{_format_setting(former_settings, key)} there"
        for key in sorted(settings.keys() | former_settings.keys())
        if settings.get(key, "absent") != former_settings.get(key, "absent")
        and not (longer and key == "algorithm.rounds")
    ]
    if differences:
        data_moved = any(text.startswith(("data.root", "data.split")) for text in differences)
        advice = " Data that was moved must be put back, or linked to." if data_moved else ""
        raise RunFolderError(
            f"{folder} belongs to another config: {'; '.join(differences)}. Resume it as it is "
            f"(--resume {folder} alone), or start a new run with another run.output.{advice}"
        )
    if config.run.engine != former.run.engine:  # another engine would begin new accounts
        raise RunFolderError(
            f"{folder} was begun with run.engine={former.run.engine}, where its accounts and "
            f"memories are. Continue with run.engine={former.run.engine}"
        )


def run_state(folder: Path, config: Config) -> Literal["stale", "begun", "finished"]:
    """Return the state of a config's run in a folder. Stale: it ended before its first checkpoint.

    Raises as ``check_resumable``.
    """
    check_resumable(folder, config)
    outcome = run_dir.read_outcome(folder)
    if outcome is not None and outcome[0]["status"] != "interrupted":
        return "finished"
    return "begun" if (folder / "checkpoints" / "latest").exists() else "stale"


def _format_setting(settings: dict[str, Any], key: str) -> str:
    return str(settings.get(key, "absent")) or "empty"


def _collect_result_settings(config: Config) -> dict[str, Any]:
    """Return the settings that affect results, by dotted key: the input of ``config_hash``."""
    return {
        f"{name}.{key}": value
        for name, section in configs.result_relevant(config).items()
        for key, value in (section or {}).items()
    }


def check_same_split(folder: Path, prepared: Prepared, snapshot: Snapshot) -> None:
    """Check that every agent has the same rows as before.

    Without privacy the checkpoint records the split, and a damaged split.json is rewritten. With
    privacy only split.json may describe the rows (``Prepared.published_split_hash``), and is
    required.

    Raises:
        RunFolderError: the data has changed, or that cannot be checked.
    """
    manifest, path = prepared.federated_data.manifest, folder / "split.json"
    checkpoint_hash = snapshot.extra.get(SPLIT)
    try:
        file_hash = split_manifest.read_manifest(path).hash
    except DataError as error:
        if prepared.plan is not None:  # without the error's text, which may have hashes
            raise RunFolderError(
                f"{path} is missing, damaged or was changed, so the rows under the accounts may be "
                "others. Put it back, or start a new run with another run.output"
            ) from None
        file_hash = None
        log.warning("%s. It is rewritten", error)
    for former_hash in (checkpoint_hash, file_hash):
        if former_hash not in (None, manifest.hash):
            # Without the hash of the split: a private run's log must not have it.
            raise RunFolderError(
                f"{folder} began with other data: its rows, or who has which, are not what they "
                "are now. Put the former data back, or start a new run with another run.output"
            )
    if file_hash is None:
        manifest.write(path)


def check_device(folder: Path) -> None:
    """Check that the private steps so far ran on the CPU.

    Raises:
        RunFolderError: an earlier version used another device.
    """
    former = configs.load_config(folder / "config.yaml", algorithms=WITH_UNREAD)
    if problem := other_device(folder, former):
        raise RunFolderError(f"{folder}: {problem}. Start a new run with another run.output")


def other_device(folder: Path, config: Config) -> str:
    """Return a problem if private steps ran on another device than the CPU; else an empty string.

    An earlier version permitted it. Rounding there may depend on other rows, so clipping bounds
    nothing. ``config``: of the folder's config.yaml.
    """
    is_census = getattr(WITH_UNREAD[config.algorithm.name], "mechanism", "dp-sgd") == "census"
    privacy = config.privacy
    if privacy is None or privacy.scope != "sound" or is_census or config.run.engine != "local":
        return ""
    source, device = "config.yaml", config.run.device
    if device in ("auto", "cpu"):
        source, match = "train.log", _OTHER_DEVICE.search(run_dir.read_log(folder))
        device = "" if match is None else match[1]
    if not device:
        return ""
    return (
        f"{source} says that private steps took {device}, where rounding may let a row change the "
        "gradients of others, so no guarantee holds (docs/performance.md, A GPU)"
    )


def check_spending_shown(folder: Path, prepared: Prepared) -> None:
    """Check that each ledger has spent at least the epsilon in the run's metrics.csv.

    Checkpoints may be older than the last rounds, and so may a restored ledger.

    Raises:
        LedgerError: one has spent less. Other faults are found when ledgers are opened.
    """
    ledger = ledger_of(prepared.config, folder)
    paths = {name: ledger / f"{name}.jsonl" for name in prepared.account_plans}
    journals = {name: read_journal(path) for name, path in paths.items() if path.exists()}
    intact = {name: journal for name, journal in journals.items() if not journal.problems}
    for problem in check_metrics(read_metrics(folder), intact):
        raise LedgerError(f"{problem}. Put the true ledger back")


def names_of_rows(prepared: Prepared) -> dict[str, str]:
    """Return a checkpoint's record of class names and of a table's columns, in their order."""
    description = prepared.about_rows
    names = {
        "classes": description["class_names"],
        "columns": [*description["rows"].get("columns", ())],
    }
    return {NAMES: json.dumps(names)}


def check_same_names(folder: Path, prepared: Prepared, snapshot: Snapshot) -> None:
    """Raise RunFolderError if classes or columns have other names than at the run's start.

    The split has their numbers alone, and results would give outputs the wrong names.
    """
    recorded = json.loads(str(snapshot.extra.get(NAMES, "{}")))  # former versions have no record
    for kind, current in json.loads(names_of_rows(prepared)[NAMES]).items():
        if recorded.get(kind, current) != current:
            raise RunFolderError(
                f"{folder} began with the {kind} {', '.join(recorded[kind][:20])}, which are now "
                f"{', '.join(current[:20])}. Give them the former names and order, or start a new "
                "run with another run.output"
            )


def check_former_ledgers(folder: Path, prepared: Prepared, snapshot: Snapshot) -> None:
    """Check that ledgers of replaced runs, which the card will name, are still beside the folder.

    Ledgers that the run's own accounts continue are exempt, as in audits.

    Raises:
        RunFolderError: one is missing or was changed, or the folder was moved or renamed.
        LedgerError: a journal cannot be read.
    """
    heads = former_heads(folder)
    for ledger, agent, head in recorded_heads(snapshot.extra.get(FORMER, "{}")):
        of_ledger = heads.get(ledger, {})
        journal = ledger_of(prepared.config, folder) / f"{agent}.jsonl"
        if (of_ledger.get(agent) == head if agent else of_ledger) or (
            head and journal.exists() and head in read_journal(journal).hashes
        ):
            continue
        raise RunFolderError(
            f"{folder.resolve().with_name(ledger)}: the ledger of a replaced run was moved or "
            "changed, or the run's folder was moved, and the card must say what that run spent. "
            "Put it back"
        )


def public_parts(prepared: Prepared) -> dict[str, str]:
    """Return a checkpoint's records of names, and of initial weights and an encoder, if any."""
    parts = {"model": prepared.network, "encoder": prepared.about_rows["rows"]["encoder"]}
    record = {PUBLIC: json.dumps(parts, sort_keys=True)} if any(parts.values()) else {}
    return names_of_rows(prepared) | record


def check_same_public_parts(folder: Path, prepared: Prepared, snapshot: Snapshot) -> None:
    """Raise RunFolderError if initial weights or encoder differ from those at the run's start.

    The card would name the wrong files.
    """
    former, current = snapshot.extra.get(PUBLIC), public_parts(prepared).get(PUBLIC)
    if former not in (None, current):  # former versions have no record
        raise RunFolderError(
            f"{folder} began with other files of weights (model.weights, data.encoder_weights) or "
            "another encoder. Put them back, or start a new run with another run.output"
        )


def check_same_plugins(folder: Path, prepared: Prepared, snapshot: Snapshot) -> list[str]:
    """Check that plug-ins have the versions of the checkpoint. Returns a warning for each changed
    file. Raises RunFolderError if a package has another version, or is another one."""
    warnings = []
    recorded = json.loads(str(snapshot.extra.get(PLUGINS, "{}")))
    for key, plugin in prepared.plugins.items():
        former = recorded.get(key, plugin)
        for field in ("distribution", "version"):
            if former[field] != plugin[field]:
                raise RunFolderError(
                    f"{folder}: {key} {plugin['name']} was of {_format_package(former)}, and is of "
                    f"{_format_package(plugin)}. Install what the run began with, or start a new "
                    "run"
                )
        if part := other_file(former, plugin):
            warnings.append(
                f"{part} of {key} {plugin['name']} was changed since the checkpoint of round "
                f"{snapshot.round}. The rounds from here on are made by this one."
            )
    return warnings


def other_file(before: Mapping[str, str | None], now: Mapping[str, str | None]) -> str:
    """Return the part of a plug-in's code that differs between two records; empty if none."""
    if before["sha256"] != now["sha256"]:
        return "The file"
    former = before.get("package_sha256", now["package_sha256"])  # older runs have no such record
    return "The package" if former != now["package_sha256"] else ""


def _format_package(record: Mapping[str, str | None]) -> str:
    """Format a distribution and its version."""
    if record["distribution"] is None:
        return "no installed package"
    return f"{record['distribution']} {record['version']}"


def other_code_warnings(snapshot: Snapshot) -> list[str]:
    """Return a warning if the checkpoint was made by other code."""
    recorded, current = snapshot.extra.get(SOURCES), fingerprint()
    if recorded in (None, current):
        return []
    return [
        f"The checkpoint of round {snapshot.round} was made by other code of privssl (sources "
        f"{recorded}, here {current}). The rounds from here on are made by this one."
    ]
