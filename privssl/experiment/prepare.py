"""Prepare a run from a config: check everything, write nothing.

User errors are reported here, before a run folder is created or changed: data that is missing or
cannot be split, an absent device, a privacy plan that cannot be met, a delta that is too large.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accounting.account_plan import AccountPlan
from accounting.accountants import epsilon
from accounting.budget import Budget, Nominal, round_up
from accounting.events import is_protected
from privssl import data, models
from privssl.algorithms import ALGORITHMS
from privssl.algorithms.base import Algorithm
from privssl.core.agents import Agent, AgentRef
from privssl.core.plugin_errors import plugin_errors
from privssl.core.rows import Shape
from privssl.core.task import Task
from privssl.data.datasets import Dataset
from privssl.errors import ConfigError, PrivacyError, first_few, first_line
from privssl.experiment import own_method_checks
from privssl.experiment.account_rows import limit_rows, refuse_other_unit, refuse_shared_rows
from privssl.experiment.config import Config
from privssl.experiment.devices import check_side_by_side, device_of_run
from privssl.experiment.plugin_names import describe_plugins, plugins_of, refuse_taken_names
from privssl.experiment.row_checks import (
    refuse_classes_of_labels_alone,
    refuse_order_by_labels,
    refuse_other_rows,
    refuse_undeclared_columns,
)
from privssl.experiment.warm_start import check_warm_start
from privssl.models.network_checks import check_network, refuse_frozen
from privssl.models.own_networks import NetworkSource, describe_exchange
from privssl.privacy.independence import refuse_memory
from privssl.privacy.plan import Plan
from privssl.remote.step_lookup import check_steps
from privssl.reporting.outside_trackers import check_trackers
from privssl.settings.names import is_outside
from privssl.settings.schema import PrivacySettings

WITHHELD = "withheld"  # written in place of the hash of a private split


@dataclass(frozen=True)
class Prepared:
    """A prepared run: everything is checked, nothing is written."""

    config: Config
    federated_data: data.FederatedDataset
    algorithm: Algorithm[Any]
    plan: Plan | None
    account_plans: Mapping[str, AccountPlan]  # of each agent with labels; empty without privacy
    device: torch.device
    roster: tuple[AgentRef, ...]  # every agent; the rows of sites are elsewhere
    network: models.PublicPart | None  # of the classifier, for the privacy card

    @property
    def labelled_agents(self) -> tuple[Agent, ...]:
        return _select_labelled(self.federated_data)

    @property
    def plugins(self) -> dict[str, dict[str, str | None]]:
        """Plug-ins that the run imported, by config key."""
        return describe_plugins(self.config)

    @property
    def is_nominal(self) -> bool:
        """Whether its epsilons are nominal, of a scheme without a guarantee."""
        return self.plan is not None and self.plan.scope == "as_published"

    @property
    def about_rows(self) -> dict[str, Any]:
        """The form of a row and the class names in output order, for users of the classifier."""
        return self.federated_data.dataset.about_rows

    @property
    def warnings(self) -> list[str]:
        """All warnings before the first round; in a private run without those about rows."""
        # warnings about rows have no noise
        of_rows = [] if self.config.privacy else self.federated_data.dataset.warnings
        return [*self.config.warnings, *self.nominal_warnings, *of_rows]

    @property
    def nominal_warnings(self) -> list[str]:
        """Warnings that a published scheme has no guarantee."""
        privacy = self.config.privacy
        if privacy is None or not self.is_nominal:
            return []
        unprotected = tuple(n for n in privacy.update_at_support if n not in privacy.protect)
        return [str(Nominal(privacy.epsilon, privacy.delta, privacy.protect, unprotected))]

    @property
    def published_split_hash(self) -> str:
        """The hash of the split, withheld in a private run.

        It covers rows and labels without a key: an attacker who knows all labels but one could try
        labels until it matches. The owner's split.json has it.
        """
        return WITHHELD if self.config.privacy else self.federated_data.manifest.hash


def prepare(
    config: Config, dataset: data.Dataset | None = None, network: NetworkSource | None = None
) -> Prepared:
    """Load the data, split it, build the algorithm, and refuse impossible runs.

    ``dataset`` and ``network`` replace those of ``data.name`` and ``model.name``.

    Raises:
        privssl.errors.UserError: see the module's docstring.
        accounting.errors.PlanError: the privacy section permits no true guarantee.
    """
    refuse_taken_names()
    check_trackers(config.run.trackers)
    kind = ALGORITHMS[config.algorithm.name]
    device = device_of_run(config)
    check_side_by_side(config.run, device)
    roster = data.agent_refs(config.data.labels, config.agents)
    federated_data = _load_federated_data(config, dataset)
    dataset = federated_data.dataset
    refuse_other_rows(config, dataset.shape)
    refuse_classes_of_labels_alone(config, dataset)
    refuse_order_by_labels(config, federated_data.manifest, config.data.split)
    task = task_of(config, dataset.classes, dataset.shape, network)
    notes = list[str]()
    if is_outside(config.model.name):
        notes = check_network(config.model.name, task.new_classifier, task.shape, task.classes)
    plan, labelled_agents = None, _select_labelled(federated_data)
    if config.privacy is not None:
        if config.run.engine == "local":
            refuse_other_unit(
                config.privacy.unit, federated_data.agents, federated_data.validation,
                named=dataset.persons is not None,
            )  # fmt: skip
        plan = make_plan(config, sum(agent.role != "query" for agent in roster))
        if plan.visits:
            refuse_shared_rows(labelled_agents, federated_data)
            _refuse_unaffordable(plan, config.privacy)
    plans = _make_account_plans(plan, config.privacy, labelled_agents)
    if plan is not None:
        limit_rows(plan, labelled_agents)
    check_steps(kind)
    algorithm = own_method_checks.make(kind, config, task, plan)
    if plan is not None:
        own_method_checks.refuse_unchecked(algorithm, config.algorithm.name)
        with plugin_errors(plugins_of(config)), _convert_network_errors(config):
            check_private(algorithm, config)
            check_plan_networks(plan, algorithm)
            if plan.visits and config.run.engine == "local":
                algorithm.try_private(device)
    warnings = (*config.warnings, *_collect_warnings(config, federated_data))
    warnings += tuple(check_warm_start(config, federated_data.manifest, task.new_classifier))
    if is_outside(config.model.name):
        exchange = describe_exchange(config.model, task.shape, task.classes, network)
        warnings += (*notes, *(() if exchange is None else (exchange,)))
    config = dataclasses.replace(config, warnings=warnings)
    public_part = models.public_part(config.model)
    return Prepared(config, federated_data, algorithm, plan, plans, device, roster, public_part)


def _collect_warnings(config: Config, federated_data: data.FederatedDataset) -> Iterator[str]:
    """Yield reasons why a run is meaningless or slow; if private, from public numbers alone."""
    classes, threads = federated_data.dataset.class_names, torch.get_num_threads()
    if threads > 1 and config.run.engine == "local" and config.run.workers == "auto":
        yield (
            f"torch computes in {threads} threads here (OMP_NUM_THREADS), which can take several "
            "times as long as one: agents are not divided among processes, and small steps wait "
            "for their threads. Set OMP_NUM_THREADS=1, or unset it"
        )
    if config.data.labelled < len(classes):
        yield (
            f"data.labelled is {config.data.labelled}, but there are {len(classes)} classes: at "
            f"least {len(classes) - config.data.labelled} have no labelled row and cannot be "
            f"learned. Give {len(classes)} or more"
        )
    yield from _find_test_row_warnings(federated_data.dataset)
    own_classifiers = ALGORITHMS[config.algorithm.name].own_classifiers
    if config.run.evaluate_agents and own_classifiers is Algorithm.own_classifiers:
        yield (
            f"run.evaluate_agents has no effect: the server of {config.algorithm.name} has no "
            "network of a single agent. Leave it out"
        )
    if config.privacy is not None:
        return
    parts = [agent.held_labelled for agent in federated_data.agents if agent.held_labelled]
    present = {c for rows in parts for c in rows.y.tolist()} if parts else set(range(len(classes)))
    absent = [name for number, name in enumerate(classes) if number not in present]
    if absent and config.data.labelled >= len(classes):
        yield (
            f"{len(absent)} of {len(classes)} classes have no labelled row ({first_few(absent)}) "
            "and cannot be learned. Give more data.labelled, or data.stratified: true"
        )
    if len(present) == 1:
        yield f"all labelled rows are of class {classes[present.pop()]}: no other can be learned"
    least = 2 if config.model.norm == "batch" else 1
    for agent in federated_data.agents:
        holdings = (agent.held_labelled, agent.held_unlabelled)
        count = sum(len(rows) for rows in holdings if rows is not None)
        if count < least:
            yield f"{agent.id} holds {count} of the {least} rows that a step needs: it takes none"


def _find_test_row_warnings(dataset: Dataset) -> Iterator[str]:
    """Yield reasons why metrics mean little. Allowed in private runs: no agent holds test rows."""
    x, rows = dataset.x_test, len(dataset.x_test)
    counts = dataset.y_test.bincount(minlength=dataset.classes).tolist()
    present = [name for name, n in zip(dataset.class_names, counts, strict=True) if n]
    absent = [name for name, n in zip(dataset.class_names, counts, strict=True) if not n]
    if rows == 1:
        yield "there is a single test row: its accuracy is 0 or 1. Give more"
    elif (x[1:8] == x[:1]).all() and (x == x[:1]).all():  # the first test ends most data sets
        yield f"all {rows} test rows are equal, so the metrics mean nothing. Look at what was read"
    if len(present) == 1 and rows > 1:
        yield (
            f"all {rows} test rows are of class {present[0]}: a classifier that "
            "always says it has accuracy 1. Give test rows of all classes"
        )
    elif absent and rows > 1:
        yield (
            f"{len(absent)} of {dataset.classes} classes have no test row ({first_few(absent)}): "
            "they have no recall"
        )


def _load_federated_data(config: Config, dataset: data.Dataset | None) -> data.FederatedDataset:
    """Return the rows on this machine. Raises ConfigError for settings that sites exclude."""
    if config.run.engine == "local":
        return data.build(
            config.data, config.agents, config.run.seed, dataset,
            labelled_is_declared=config.hides_counts,
        )  # fmt: skip
    privacy, at_server = config.privacy, config.data.labels == "labels-at-server"
    for key, is_set, why in (
        (
            "data.labels: labels-at-both", config.data.labels == "labels-at-both",
            "the server's rows are drawn from those of the agents",
        ),
        ("data.test", config.data.test, "each site has its own rows"),
        (
            "data.validation", config.data.validation and not at_server,
            "rows that no agent holds are at no site",
        ),
        ("privacy.ledger", privacy is not None and privacy.ledger, "each site has its own"),
    ):  # fmt: skip
        if is_set:
            raise ConfigError(f"{key} has no meaning with run.engine flower: {why}. Leave it out")
    refuse_undeclared_columns(config.data)
    if privacy is not None and privacy.scope != "sound":
        raise PrivacyError(
            "the published scope guarantees nothing for any row, and no site takes part in it. "
            "Protect all that support agents train, or set run.engine: local"
        )
    if at_server:  # its rows are here
        return data.build(config.data, config.agents, config.run.seed)
    return data.test_rows_only(config.data, config.run.seed)


@contextmanager
def _convert_network_errors(config: Config) -> Iterator[None]:
    """Convert torch's errors about an own network to ConfigError: vmap refuses some operations."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if not is_outside(config.model.name):
            raise
        raise PrivacyError(
            f"model.name {config.model.name}: the gradient of a single row cannot be computed "
            f"({first_line(error)}), so it cannot be trained privately. Use layers that "
            "torch.func.vmap knows"
        ) from error


def make_plan(config: Config, agents: int) -> Plan:
    """Return the plan of a private config with this number of agents with labels."""
    assert config.privacy is not None
    return ALGORITHMS[config.algorithm.name].make_plan(
        config.privacy, rounds=config.algorithm.rounds,
        rows_per_agent=config.data.labelled / agents, agents=agents,
    )  # fmt: skip


def check_private(algorithm: Algorithm[Any], config: Config) -> None:
    """Raise PrivacyError if a row affects another row's loss, in a batch or by an own network's
    state."""
    own_network = is_outside(config.model.name) and algorithm.mechanism == "dp-sgd"
    if own_network:
        refuse_frozen(config.model.name, algorithm.task.new_classifier())
    algorithm.check_private()
    if own_network:
        refuse_memory(algorithm.task.new_classifier(), algorithm.task.shape)


def task_of(
    config: Config, classes: int, shape: Shape, network: NetworkSource | None = None
) -> Task:
    """Return the learning task of a config for rows of this shape; ``network``: as in prepare."""
    assert config.run.precision != "auto", "config.load says what it is here"
    precision = config.run.precision
    if network is None and models.own_networks.is_imported(config.model.name):
        network = models.own_networks.import_network(config.model.name)

    def new_classifier() -> nn.Module:
        return models.build_classifier(config.model, shape, classes, precision, network)

    def narrow_classifier(share: float) -> nn.Module:
        narrow = dataclasses.replace(config.model, width=round(share * config.model.width))
        return models.build_classifier(narrow, shape, classes, precision)

    is_own = network is not None or is_outside(config.model.name)
    return Task(classes, shape, new_classifier, precision, None if is_own else narrow_classifier)


def _select_labelled(federated_data: data.FederatedDataset) -> tuple[Agent, ...]:
    return tuple(agent for agent in federated_data.agents if agent.held_labelled is not None)


def _make_account_plans(
    plan: Plan | None, privacy: PrivacySettings | None, agents: tuple[Agent, ...]
) -> dict[str, AccountPlan]:
    """Return the account plan of each agent with labels, by id; empty without privacy."""
    if plan is None or privacy is None:
        return {}
    # Accounts of this run alone have the run's budget.
    budget = Budget(privacy.ledger_epsilon or privacy.epsilon, privacy.delta)
    return {agent.id: account_plan(plan, privacy, agent, budget) for agent in agents}


def account_plan(plan: Plan, privacy: PrivacySettings, agent: Agent, budget: Budget) -> AccountPlan:
    """Return the account plan of one agent with labels."""
    public = privacy.record_counts == "public"
    return AccountPlan(
        agent=agent.id,
        budget=budget,
        scope=plan.scope,
        update=plan.update,
        protect=plan.protect,
        event=plan.event,
        record_counts=privacy.record_counts,
        n_public=len(agent.labelled) if public else None,
        unit=privacy.unit,
        adjacency="zero_out" if public else "add_remove",
    )


def check_plan_networks(plan: Plan, algorithm: Algorithm[Any]) -> None:
    """Raise PrivacyError if a plan, and so the guarantee, names a network that does not exist."""
    unknown = [name for name in plan.update if name not in algorithm.networks()]
    if algorithm.mechanism == "dp-sgd" and unknown:
        raise PrivacyError(
            f"{algorithm.cfg.name} has no network {', '.join(unknown)}, which privacy."
            f"update_at_support names. It has {', '.join(algorithm.networks()) or 'none'}"
        )


def _refuse_unaffordable(plan: Plan, privacy: PrivacySettings) -> None:
    """Refuse a budget that does not cover one visit: no labelled row would ever be read."""
    cost = epsilon(is_protected([plan.event]), privacy.delta)
    if cost > privacy.epsilon:
        raise PrivacyError(
            f"one visit to a support agent costs epsilon {round_up(cost)}, and privacy.epsilon "
            f"is {privacy.epsilon:g}, so that no labelled row would ever be read. Give more "
            "privacy.noise_multiplier, fewer privacy.steps or a smaller privacy.sample_rate"
        )
