"""The folder of a run and the accounts in it: made once, never overwritten by accident.

The folder is private to the user (0700). What earlier runs spent is never deleted: replacing a
private run moves its ledger beside the folder and says so.
"""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accounting.budget import Budget
from accounting.ledger import Account
from accounting.plan import AccountPlan
from privssl import config as configs
from privssl import durable
from privssl.algorithms.base import Algorithm
from privssl.card import Release
from privssl.errors import RunFolderError
from privssl.privacy import PrivatePlan, parameter_names

if TYPE_CHECKING:
    from privssl.run import Prepared

log = logging.getLogger("privssl")


def write_text(path: Path, text: str) -> None:
    """Put a small file in place whole, or not at all. RunFolderError when it cannot be."""
    durable.replace(path, text.encode())


def open_folder(prepared: "Prepared", resume: Path | None) -> Path:
    """Make the run folder, or check the one to resume. Private to the user (0700).

    Raises:
        RunFolderError: it exists and may not be replaced, or is no run of this config.
    """
    folder, run = resume or prepared.config.folder, prepared.config.run
    if resume is None:
        if folder.exists() and any(folder.iterdir()):
            if not run.overwrite:
                raise RunFolderError(
                    f"{folder} exists and holds a run. Go on with it (--resume {folder}), choose "
                    "another run.output or run.seed, or replace it with run.overwrite=true"
                )
            _replace(folder)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_text(folder / "config.yaml", configs.to_yaml(prepared.config))
        prepared.federation.manifest.write(folder / "split.json")
    return folder


def _replace(folder: Path) -> None:
    """Remove a former run, but never the record of what it spent."""
    if not (folder / "config.yaml").exists():
        raise RunFolderError(
            f"{folder} is not a run of privssl (it has no config.yaml), so run.overwrite=true "
            "does not touch it. Choose another run.output"
        )
    kept = sorted(folder.parent.glob(f"{folder.name}.ledger-*"))
    ledger = folder / "ledger"
    if ledger.exists() and any(ledger.iterdir()):
        former = folder.parent / f"{folder.name}.ledger-{len(kept) + 1:03d}"
        ledger.rename(former)
        log.warning("The ledger of the replaced run is kept in %s: its rows remember.", former)
    shutil.rmtree(folder)


def open_accounts(
    prepared: "Prepared", folder: Path, minimum_seq: Mapping[str, int] | None
) -> None:
    """Give every agent with labels its account. ``minimum_seq`` is given when resuming."""
    plan, privacy = prepared.plan, prepared.config.privacy
    if plan is None or privacy is None:
        return
    public = privacy.record_counts == "public"
    for agent in prepared.labelled_agents:
        promise = AccountPlan(
            agent=agent.id,
            budget=Budget(privacy.epsilon, privacy.delta),
            scope=plan.scope,
            update=plan.update,
            protect=plan.protect,
            event=plan.event,
            record_counts=privacy.record_counts,
            n_public=len(agent.labelled) if public else None,
            adjacency="zero_out" if public else "add_remove",
        )
        path = folder / "ledger" / f"{agent.id}.jsonl"
        seq = None if minimum_seq is None else minimum_seq.get(agent.id)
        resume = seq is not None or (minimum_seq is not None and path.exists())
        agent.account = Account.open(path, promise, resume=resume, minimum_seq=seq or 0)


def releases(plan: PrivatePlan, algorithm: Algorithm[Any]) -> list[Release]:
    """Every tensor that leaves a support agent: name, covered or not, why."""
    nets = algorithm.networks()
    covered: list[Release] = [
        (name, "covered", "trained by DP-SGD under the agent's account")
        for name in parameter_names(nets, plan.protect)
    ]
    plainly = [name for name in plan.update if name not in plan.protect]
    uncovered: list[Release] = [
        (name, "not covered", "trained on labelled rows without noise")
        for name in parameter_names(nets, plainly)
    ]
    if uncovered:  # G's own gradients flow through F and D, so its number is nominal as well
        covered = [
            (
                name,
                "not covered",
                "noise was added, but its gradients flow through unprotected F, D",
            )
            for name, _, _ in covered
        ]
    return covered + uncovered
