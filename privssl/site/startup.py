"""Build a site's request handler from SITE.yaml and the experiment's config.

Noise, steps, networks and budget follow from these two files, by the code of
``experiment/prepare.py``. A site that could give no valid guarantee does not start: the published
scope, a delta that would allow publishing a row, rows used before without protection, or rows of
two accounts.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from accounting import row_registry
from accounting.account_plan import refuse_change
from accounting.budget import Budget
from accounting.errors import LedgerError
from accounting.journal import read_content, split_lines
from accounting.journal_reader import replay
from accounting.ledger import Account, read_journal, refuse_problems
from privssl.algorithms import ALGORITHMS
from privssl.algorithms.base import Algorithm
from privssl.core.agents import Agent, LabelledRows, UnlabelledRows
from privssl.core.rows import Shape, describe_task, scaling_of
from privssl.data import agent_refs, datasets, labelled_rows, split_manifest, unlabelled_rows
from privssl.data.encoded import HeldRows
from privssl.data.npz import NO_LABEL, Scale, read_rows
from privssl.data.split import RoleAssignment, holders
from privssl.data.standardisation import are_standardised
from privssl.errors import ConfigError, DataError, PrivacyError
from privssl.experiment import config as configs
from privssl.experiment.account_rows import claim_rows, limit_rows, refuse_other_unit
from privssl.experiment.config import Config
from privssl.experiment.devices import device_of
from privssl.experiment.prepare import (
    account_plan,
    check_plan_networks,
    check_private,
    make_plan,
    task_of,
)
from privssl.experiment.row_checks import (
    refuse_classes_of_labels_alone,
    refuse_order_by_labels,
    refuse_other_rows,
    refuse_standardised,
    refuse_undeclared_columns,
)
from privssl.models.network_checks import check_network
from privssl.runtime import plugins
from privssl.settings.names import is_outside
from privssl.settings.schema import BUILT_IN
from privssl.site.request_handler import SiteRequestHandler
from privssl.site.settings import SiteConfig
from privssl.site.storage import Store

log = logging.getLogger("privssl")


class _SiteRows(NamedTuple):
    """The agent's rows, with classes and shape, which both sides must agree on."""

    labelled: LabelledRows | None
    unlabelled: UnlabelledRows | None
    classes: Sequence[str]
    shape: Shape
    scaling: str  # of the network's input (``rows.scaling_of``)
    encoder: str | None  # checksum of its weights
    columns: Mapping[str, Scale] | None = None  # of a table


def open_site(site: SiteConfig) -> SiteRequestHandler:
    """Build the request handler of a checked SITE.yaml.

    Raises:
        privssl.errors.UserError: the experiment's config does not match, rows are missing or
            invalid, or no valid guarantee is possible.
        accounting.errors.AccountingError: the ledger is missing, damaged, or does not match.
    """
    allowed = (site.site.network, *site.site.plugins)
    advice = f"allow it in {site.source}: site.plugins: ['{{name}}']"
    with plugins.imports_allowed(allowed, advice):
        return _open_site(site)


def _open_site(site: SiteConfig) -> SiteRequestHandler:
    config = configs.load_config(site.path(site.site.config))
    roles = holders(config.data.labels, config.agents)
    _check_network(site, config)
    _check_role(site, config)
    _check_budget(site, config)
    rows = _read_rows(site, config)
    agent = Agent(id=site.site.agent, held_labelled=rows.labelled, held_unlabelled=rows.unlabelled)
    algorithm = _build_algorithm(config, rows, roles)
    private = site.budget is not None and algorithm.mechanism == "dp-sgd"
    device = device_of(site.site.device, private=private, key="site.device")
    if site.budget is not None:
        algorithm.try_private(device)
    store = Store(site.folder, site.site.keep_visits)
    open_account = None
    if site.budget is not None:
        open_account = _prepare_account(site, config, algorithm, agent, store)
    shared = open_account is not None and site.site.share_ledger
    return SiteRequestHandler(
        agent=agent, algorithm=algorithm, seed=config.run.seed,
        agreement=configs.compatibility_hash(
            config, rows.classes, rows.shape, rows.scaling, rows.encoder, rows.columns
        ),
        store=store, device=device, open_account=open_account,
        journal=_make_journal_reader(site, agent, store) if shared else None,
        share_notes=site.site.share_notes,
        task=describe_task(rows.classes, rows.shape, rows.scaling),
    )  # fmt: skip


# The experiment's config -----------------------------------------------------------------------


def _check_network(site: SiteConfig, config: Config) -> None:
    """Refuse a network that the operator has not named: the experiment must not choose code to
    import."""
    network = config.model.name
    if is_outside(network) and network not in (site.site.network, *site.site.plugins):
        raise ConfigError(
            f"{site.source}: model.name of {config.source} is {network}, whose code this site "
            f"would import. Read that code; then allow it with site.network: {network}"
        )


def _check_role(site: SiteConfig, config: Config) -> None:
    name, role = site.site.agent, site.site.role
    roles = {agent.id: agent.role for agent in agent_refs(config.data.labels, config.agents)}
    if name not in roles:
        raise ConfigError(
            f"{site.source}: site.agent is {name}, but {config.source} has {', '.join(roles)}. "
            "Give one of them"
        )
    if role != roles[name]:
        actual = "at the coordinator" if name == "server" else roles[name]
        raise ConfigError(
            f"{site.source}: site.role is {role}, but in {config.source} {name} is {actual}. "
            "Correct site.role or site.agent"
        )


def _check_budget(site: SiteConfig, config: Config) -> None:
    """Operator and experiment must agree on whether rows are protected."""
    budget, privacy = site.budget, config.privacy
    if site.site.role == "query":
        return
    if (budget is None) != (privacy is None):
        site_has, config_has = ("null", "has a") if budget is None else ("given", "has no")
        raise ConfigError(
            f"{site.source}: budget is {site_has}, but {config.source} {config_has} privacy "
            "section. Labelled rows are either under a budget on both sides or on neither"
        )
    if budget is None or privacy is None:
        return
    if budget.delta != privacy.delta:
        raise ConfigError(
            f"{site.source}: budget.delta is {budget.delta:g}, but privacy.delta of "
            f"{config.source} is {privacy.delta:g}. Make them equal"
        )
    if privacy.scope != "sound":
        raise PrivacyError(
            f"{config.source} has the published scope, which guarantees nothing for any row. "
            "Protect all networks that support agents train, or use budget: null"
        )


# Rows ---------------------------------------------------------------------------------------


def _read_rows(site: SiteConfig, config: Config) -> _SiteRows:
    kinds = {"support": (True, False), "query": (False, True), "mixed": (True, True)}
    labelled, unlabelled = kinds[site.site.role]
    refuse_undeclared_columns(config.data)
    if site.rows.arrays and config.data.name == "csv" and not config.data.text:
        raise ConfigError(
            f"{site.source}: rows.arrays has no columns, and {config.source} has a table. Give "
            "rows.root, a folder with train.csv, so that data.columns scales all sites alike"
        )
    _refuse_revealing_rows(site, config)
    if site.rows.arrays:
        return _read_arrays(site, config, labelled=labelled, unlabelled=unlabelled)
    if site.rows.root and config.data.name in BUILT_IN:
        raise ConfigError(
            f"{site.source}: rows.root has no effect: data.name of {config.source} is "
            f"{config.data.name}, which is built in. Give rows.split alone"
        )
    root = str(site.path(site.rows.root)) if site.rows.root else config.data.root
    declared = None if site.rows.classes is None else _read_class_names(site)
    dataset = datasets.load_dataset(
        dataclasses.replace(config.data, root=root), declared,
        may_be_empty=labelled and config.hides_counts,
    )  # fmt: skip
    refuse_classes_of_labels_alone(config, dataset)
    with_label = torch.nonzero(dataset.y_train != NO_LABEL)[:, 0].tolist()
    labelled_ids, unlabelled_ids = tuple(with_label), tuple(range(len(dataset.y_train)))
    if site.rows.split:
        split = split_manifest.read_manifest(site.path(site.rows.split))
        refuse_order_by_labels(config, split, site.path(site.rows.split))
        split.check(dataset, datasets.checksum(dataset))
        holding = split.agents.get(site.site.agent, split_manifest.AgentRows((), ()))
        labelled_ids, unlabelled_ids = holding.labelled, holding.unlabelled
        if config.privacy is not None and labelled:
            _refuse_shared_persons(site, dataset, split, labelled_ids)
    elif labelled and unlabelled:
        unlabelled_ids = tuple(sorted({*unlabelled_ids} - {*labelled_ids}))
    labelled_ids, unlabelled_ids = (
        labelled_ids if labelled else (),
        unlabelled_ids if unlabelled else (),
    )
    public = labelled and not config.hides_counts
    _check_rows_exist(site, public and not labelled_ids, unlabelled and not unlabelled_ids)
    if not set(labelled_ids) <= set(with_label):
        raise DataError(
            f"{site.source}: {site.path(site.rows.split)} lists rows without a label as "
            "labelled. Draw a new split"
        )
    rows = HeldRows(
        dataset.x_train, dataset.unencoded, (*labelled_ids, *unlabelled_ids), dataset.records,
        dataset.persons,
    )  # fmt: skip
    with_labels = labelled_rows(labelled_ids, rows, dataset.y_train) if labelled else None
    without_labels = unlabelled_rows(unlabelled_ids, rows) if unlabelled else None
    encoder = None if dataset.unencoded is None else dataset.unencoded.encoder.checksum
    return _SiteRows(
        with_labels, without_labels, dataset.class_names, dataset.shape,
        scaling_of(dataset.x_train), encoder, dataset.scales,
    )  # fmt: skip


def _refuse_shared_persons(
    site: SiteConfig, dataset: datasets.Dataset, split: split_manifest.Manifest, own: Sequence[int]
) -> None:
    """Refuse a split that gives other rows of this site's labelled persons to others."""
    others = [*split.validation]
    for holding in split.agents.values():
        others += [*holding.labelled, *holding.unlabelled]
    persons = dataset.persons or ()
    if persons and {persons[i] for i in own} & {persons[i] for i in {*others} - {*own}}:
        raise PrivacyError(
            f"{site.source}: {site.path(site.rows.split)} gives rows of a labelled person of "
            f"{site.site.agent} to others, too, who would have two budgets or none. Draw a new "
            "split"
        )


def _refuse_revealing_rows(site: SiteConfig, config: Config) -> None:
    """Refuse own rows that determine the form of all rows, if their number is private.

    A site with one row would start, and one without rows would not, which reveals the number.
    """
    own_folder = site.site.role != "query" and site.rows.root and not site.rows.split
    if not (own_folder and config.hides_counts):
        return
    if config.data.name != "csv":
        raise ConfigError(
            f"{site.source}: privacy.record_counts of {config.source} is private, and whether rows "
            f"of {config.data.name} can be read tells whether there are any. Give rows.arrays"
        )
    if site.rows.classes is None:
        raise ConfigError(
            f"{site.source}: privacy.record_counts of {config.source} is private, and class names "
            "would follow from labelled rows. Give them all in rows.classes"
        )


def _check_rows_exist(site: SiteConfig, *missing: bool) -> None:
    for kind, is_missing in zip(("labelled", "unlabelled"), missing, strict=True):
        if is_missing:
            raise DataError(
                f"{site.source}: {site.path(site.rows.split or site.rows.root)} has no {kind} rows "
                f"of {site.site.agent}, which is a {site.site.role} agent. Correct rows, or "
                "site.role and site.agent"
            )


def _read_class_names(site: SiteConfig) -> tuple[str, ...]:
    """Return ``rows.classes``, a number as the names "0", "1", ..."""
    classes = site.rows.classes
    return tuple(map(str, range(classes))) if isinstance(classes, int) else classes or ()


def _read_arrays(
    site: SiteConfig, config: Config, *, labelled: bool, unlabelled: bool
) -> _SiteRows:
    path, classes = site.path(site.rows.arrays), _read_class_names(site)
    arrays = read_rows(
        path, labelled=labelled, unlabelled=unlabelled, may_be_empty=config.hides_counts
    )
    if arrays.y is not None and arrays.y.size and int(arrays.y.max()) >= len(classes):
        raise DataError(
            f"{path}: y_labelled has class {int(arrays.y.max())}, but rows.classes gives "
            f"{len(classes)} classes, from 0"
        )
    public = config.privacy is not None and not config.hides_counts  # few rows are not refused
    parts = [part for part in (arrays.x, arrays.unlabelled) if part is not None]
    if public and arrays.x is not None and (are_standardised(arrays.x) or are_standardised(*parts)):
        refuse_standardised(path)
    with_labels = without_labels = None
    if arrays.x is not None and arrays.y is not None:
        x, origin, encoder = datasets.encode_rows(config.data, torch.from_numpy(arrays.x))
        with_labels = LabelledRows(
            x, torch.from_numpy(arrays.y), torch.arange(len(x)), origin, arrays.persons
        )
    if arrays.unlabelled is not None:
        x, origin, encoder = datasets.encode_rows(config.data, torch.from_numpy(arrays.unlabelled))
        without_labels = UnlabelledRows(x, torch.arange(len(x)), origin, arrays.unlabelled_persons)
    rows = without_labels if with_labels is None else with_labels  # which may have no row
    assert rows is not None  # every role has rows
    shape, scaling = tuple(rows.x.shape[1:]), scaling_of(rows.x)
    return _SiteRows(with_labels, without_labels, classes, shape, scaling, encoder)


# Algorithm and account ------------------------------------------------------------------------


def _build_algorithm(config: Config, rows: _SiteRows, roles: RoleAssignment) -> Algorithm[Any]:
    """Build the algorithm as ``prepare.prepare`` does."""
    kind = ALGORITHMS[config.algorithm.name]
    refuse_other_rows(config, rows.shape)
    plan = None if config.privacy is None else make_plan(config, len(roles.labelled))
    # The coordinator sends initial weights.
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, weights=""))
    task = task_of(config, len(rows.classes), rows.shape)
    if is_outside(config.model.name):
        check_network(config.model.name, task.new_classifier, task.shape, task.classes)
    algorithm = kind(config.algorithm, task, plan)
    if plan is not None:
        check_private(algorithm, config)
        check_plan_networks(plan, algorithm)
    return algorithm


def _prepare_account(
    site: SiteConfig, config: Config, algorithm: Algorithm[Any], agent: Agent, store: Store
) -> Callable[[str], Account]:
    """Register the rows with the account; return a function that opens it for a step."""
    assert site.budget is not None and config.privacy is not None
    privacy, ledger = config.privacy, site.ledger
    budget = Budget(site.budget.epsilon, site.budget.delta)
    public = not config.hides_counts  # if private, a refusal would reveal it
    if public and budget.delta * len(agent.labelled) >= 1:
        raise PrivacyError(
            f"{site.source}: budget.delta is {budget.delta:g}, and {agent.id} holds "
            f"{len(agent.labelled)} labelled rows: that would allow publishing a whole row. "
            f"Give less than 1 / {len(agent.labelled)}"
        )
    named = agent.labelled.persons is not None
    refuse_other_unit(privacy.unit, [agent], None, named=named)
    plan = account_plan(algorithm.plan, privacy, agent, budget)
    limit_rows(algorithm.plan, [agent])
    path = ledger / f"{agent.id}.jsonl"
    _refuse_other_ledger(path, store)
    row_registry.refuse_partial_account(ledger, agent.id)
    unprotected = () if agent.held_unlabelled is None else (agent.held_unlabelled,)
    claim_rows(ledger, [agent], unprotected)
    if path.exists():
        refuse_change(read_journal(path).plan, plan)
    else:
        Account.open(path, plan, resume=False).close()
    epsilon_left = budget.epsilon - read_journal(path).epsilon
    if privacy.epsilon > epsilon_left:
        log.warning(
            "A new run of %s may spend epsilon %g of each labelled %s, and of this site's "
            "budget.epsilon %g at most %.4f is left. The site refuses steps that cost more",
            config.source, privacy.epsilon, {"record": "row", "person": "person"}[privacy.unit],
            budget.epsilon, max(0.0, epsilon_left),
        )  # fmt: skip

    def open_account(run: str) -> Account:
        seq, head = store.mark or (0, "")
        return Account.open(
            path, plan, resume=True, minimum_seq=seq, minimum_head=head, run=run,
            run_epsilon=privacy.epsilon,
        )  # fmt: skip

    return open_account


def _refuse_other_ledger(path: Path, store: Store) -> None:
    """Raise at start-up if the ledger is missing, damaged, or does not fit ``ledger.mark``.

    Otherwise every step would be refused.
    """
    mark = store.mark
    if path.exists():
        refuse_problems(path, read_journal(path), *(mark or (0, "")))
    elif mark is not None:
        raise LedgerError(
            f"{path}: missing, though {store.mark_path} says that steps were charged to it. "
            "Correct site.folder or budget.ledger, or put the ledger back"
        )


def _make_journal_reader(site: SiteConfig, agent: Agent, store: Store) -> Callable[[], bytes]:
    path = site.ledger / f"{agent.id}.jsonl"

    def read() -> bytes:
        seq, head = store.mark or (0, "")
        content = read_content(path)
        refuse_problems(path, replay(split_lines(content)[0]), seq, head)
        return content

    return read
