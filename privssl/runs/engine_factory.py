"""The engine of a run, and the tasks of runs over sites.

Each site has and charges its own account, and sends its journal at the end. The card is made from
these copies, kept in the run folder's ``ledger`` for the audit. A site could send a false one; the
guarantee is about sites of honest operators.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from accounting.ledger import Journal, read_journal
from privssl.core.agents import AgentLocation, Memory
from privssl.core.engine import Engine
from privssl.core.rows import describe_task, scaling_of
from privssl.engines.batched import BatchedEngine
from privssl.engines.local import LocalEngine
from privssl.engines.process_pool import WorkerEngine, resolve_worker_count
from privssl.engines.remote import SitesEngine, is_name
from privssl.errors import RunFolderError
from privssl.experiment import config as configs
from privssl.experiment.prepare import Prepared
from privssl.remote import tls
from privssl.remote.discovery import RemoteTimeouts, SiteError
from privssl.remote.flower_transport import FlowerTransport
from privssl.remote.node_keys import NodeKeys
from privssl.storage import atomic_files
from privssl.storage.spill_store import SpillStore
from privssl.training.evaluation import HiddenLabelMeter


def refuse_unreachable(prepared: Prepared) -> None:
    """For runs over sites: check keys and connection before the run, else raise UserError."""
    run = prepared.config.run
    if run.engine == "flower":
        _make_node_keys(prepared)
        certificate = str(Path(run.certificate).expanduser()) if run.certificate else ""
        if problem := tls.probe(run.superlink, certificate):
            no_server = problem.startswith(tls.NOBODY)
            advice = ". Start it (flower-superlink), or give its host and port" if no_server else ""
            raise SiteError(f"run.superlink: {problem}{advice}")


def _make_node_keys(prepared: Prepared) -> NodeKeys | None:
    sites = [agent.id for agent in prepared.roster if agent.location is not AgentLocation.SERVER]
    keys = prepared.config.run.keys
    return NodeKeys(Path(keys), sites) if keys else None


def make_engine(
    prepared: Prepared, label_meter: HiddenLabelMeter, spill_store: SpillStore | None = None
) -> Engine:
    """Create the engine of the config, before threads, because it forks workers.

    Raises privssl.errors.UserError if that is impossible, or not all sites respond.
    """
    run, agents, device = prepared.config.run, prepared.federated_data.agents, prepared.device
    options: dict[str, Any] = {
        "seed": run.seed, "device": device, "meter": label_meter, "check_wire": run.check_wire,
        "spill_store": spill_store,
    }  # fmt: skip
    if run.engine == "flower":
        return _make_sites_engine(prepared, options)
    if run.batched_agents > 1:
        options |= {"algorithm": prepared.algorithm, "at_once": run.batched_agents}
        return BatchedEngine(agents, **options)
    workers = resolve_worker_count(run.workers, agents, device)
    if workers == 1:
        return LocalEngine(agents, **options)
    return WorkerEngine(agents, algorithm=prepared.algorithm, workers=workers, **options)


def _make_sites_engine(prepared: Prepared, options: Mapping[str, Any]) -> SitesEngine:
    config, dataset, run = prepared.config, prepared.federated_data.dataset, prepared.config.run
    servers = [a for a in prepared.federated_data.agents if a.location is AgentLocation.SERVER]
    labelled_ids = [agent.id for agent in prepared.roster if agent.role in ("support", "mixed")]
    keys = _make_node_keys(prepared)
    transport = FlowerTransport(run.superlink, run.certificate, keys)
    assert run.absent != "auto"  # the config has resolved it
    timeouts = RemoteTimeouts(
        join_seconds=run.join_seconds, visit_seconds=run.visit_seconds,
        absent=run.absent, quorum=run.quorum,
    )  # fmt: skip
    try:
        return SitesEngine(
            transport, prepared.roster, algorithm=prepared.algorithm,
            agreement=configs.compatibility_hash(
                config, dataset.class_names, dataset.shape, scaling_of(dataset.x_train),
                None if dataset.unencoded is None else dataset.unencoded.encoder.checksum,
                dataset.scales,
            ),
            home=LocalEngine(servers, **options),
            ledgers=labelled_ids if prepared.plan is not None else (),
            timeouts=timeouts, key_owner=transport.key_owner if keys is not None else None,
            task=describe_task(dataset.class_names, dataset.shape, scaling_of(dataset.x_train)),
        )  # fmt: skip
    except BaseException:
        transport.close()
        raise


def check_memory_names(engine: Engine, memories: Mapping[str, Memory]) -> None:
    """Raise RunFolderError for a checkpoint with names of memories if agents are not sites."""
    if not isinstance(engine, SitesEngine) and any(map(is_name, memories.values())):
        raise RunFolderError(
            "The agents' memories are at their sites, and this checkpoint has only their names. "
            "Resume with run.engine=flower"
        )


def log_traffic(engine: Engine, absences: int) -> dict[str, float]:
    """Return the network traffic since the last call, by names of metrics."""
    if not isinstance(engine, SitesEngine):
        return {}
    traffic = engine.take_traffic()
    return {
        "comm/sent_up_bytes": traffic.up,
        "comm/sent_down_bytes": traffic.down,
        "comm/letters": traffic.frames,
        "comm/letters_again": traffic.again,
        "sites/absent": absences,
        "time/visit_s": statistics.median(traffic.seconds) if traffic.seconds else 0.0,
    }


class Spending(NamedTuple):
    """The charges of a run's accounts."""

    journals: dict[str, Journal]  # agent -> the journal of its guarantee
    this_run: dict[str, float] | None  # epsilon of this run alone, if accounts outlive runs
    problems: list[str]  # damage to ledgers; it forbids a guarantee


def spending(engine: Engine, prepared: Prepared, folder: Path, over: bool) -> Spending:
    """Return the charges of a run's accounts, here or at its sites.

    ``over``: the run is finished, so sites may delete its data. Raises SiteError if a site's
    journal is missing, damaged or another agent's.
    """
    if isinstance(engine, SitesEngine):
        journals = _fetch_journals(engine, folder, over=over)
        this_run = {name: journal.epsilon_of(engine.run) for name, journal in journals.items()}
        return Spending(journals, this_run, [])
    accounts = [a.account for a in prepared.labelled_agents if a.account is not None]
    balances = {account.agent: account.balance() for account in accounts}
    this_run = {a.agent: balances[a.agent].journal.epsilon_of(a.run) for a in accounts}
    accounts_outlive = prepared.config.privacy is not None and prepared.config.privacy.ledger
    return Spending(
        {name: balance.journal for name, balance in balances.items()},
        this_run if accounts_outlive else None,
        [f"{name}: {text}" for name, balance in balances.items() for text in balance.problems],
    )


def _fetch_journals(engine: SitesEngine, folder: Path, *, over: bool) -> dict[str, Journal]:
    """Return journals by agent, copied to ``folder/ledger``."""
    journals = {}
    for name, content in sorted(engine.end_run(over=over).items()):
        path = folder / "ledger" / f"{name}.jsonl"
        atomic_files.write(path, content, parents=True)
        journal = read_journal(path)
        problems = [str(problem) for problem in journal.problems]
        if not problems and journal.plan.agent != name:
            problems = [f"it is of {journal.plan.agent}"]
        if not problems and (missing := engine.missing_charges(name, journal.visits)):
            problems = [f"it lacks {missing} visits that were charged, as if from a backup"]
        if problems:
            raise SiteError(
                f"NO GUARANTEE: the ledger that {name} shows is not in order: {problems[0]}. Its "
                "operator must put the true one back; then end the run with --resume"
            )
        journals[name] = journal
    return journals
