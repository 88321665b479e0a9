"""Data set, split, and agents with copies of their rows, built from a config.

    federated_data = build(config.data, config.agents, config.run.seed)
    federated_data.agents            # s0, s1, ..., q0, q1, ..., each with its rows
    federated_data.manifest.hash     # equal for equal splits

Labels of unlabelled rows are only in ``FederatedDataset.true_labels``, for
``evaluation.HiddenLabelMeter``.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from privssl.core.agents import (
    Agent,
    AgentLocation,
    AgentRef,
    LabelledRows,
    UnlabelledRows,
    natural_order,
)
from privssl.data import split_manifest as manifests
from privssl.data.datasets import Dataset as Dataset
from privssl.data.datasets import (
    checksum,
    expand_path,
    load_dataset,
    persons_checksum,
    redraw_test_rows,
)
from privssl.data.encoded import HeldRows
from privssl.data.npz import NO_LABEL
from privssl.data.persons import count_persons
from privssl.data.split import SERVER, RoleAssignment, Split, draw_split, holders, settings_of_split
from privssl.data.split_manifest import AgentRows, Manifest
from privssl.data.standardisation import are_standardised
from privssl.errors import DataError
from privssl.runtime import randomness
from privssl.settings.schema import AgentSettings, DataSettings


@dataclass(frozen=True, eq=False)
class FederatedDataset:
    """The data of a run. The run attaches accounts."""

    dataset: Dataset  # without training rows
    agents: tuple[Agent, ...]
    validation: LabelledRows | None  # rows of no agent, for the choice of settings
    true_labels: Tensor  # (N,) by row id. For HiddenLabelMeter only: steps must never see it
    manifest: Manifest

    def measured_rows(self, *, private: bool) -> list[Tensor]:
        """Return the stored rows of the agents in this process, to measure copies of them.

        In a private run only unlabelled rows, which no claim covers.
        """
        unlabelled = [agent.held_unlabelled for agent in self.agents]
        labelled = [] if private else [agent.held_labelled for agent in self.agents]
        return [rows.x for rows in (*labelled, *unlabelled) if rows]

    def measured_labels(self, *, private: bool) -> Tensor:
        """Return true labels (N,) by row id, to measure pseudo-labels.

        In a private run only those of unlabelled rows: a step that reports other ids by mistake
        would put the accuracy of guessed labels into its metrics.
        """
        if not private:
            return self.true_labels
        labels = torch.full_like(self.true_labels, NO_LABEL)
        unlabelled = [holding.unlabelled for holding in self.manifest.agents.values()]
        ids = torch.tensor([*chain.from_iterable(unlabelled)], dtype=torch.int64)
        labels[ids] = self.true_labels[ids]
        return labels


def build(
    data: DataSettings, agents: AgentSettings, seed: int, dataset: Dataset | None = None, *,
    labelled_is_declared: bool = False,
) -> FederatedDataset:  # fmt: skip
    """Load the data, sample or replay the split, and create the agents. Raises DataError if the
    data or the split does not fit the settings.

    Args:
        seed: ``run.seed``; it determines the split, with settings and data.
        dataset: used instead of the one that ``data`` names.
        labelled_is_declared: ``data.labelled`` is a declared number; the split may have another
            one, at some agent 0, because an error would reveal the number.
    """
    dataset = dataset or load_dataset(data)
    if data.test is not None:
        rng = randomness.stream(seed, 0, "world", "split test")
        dataset = redraw_test_rows(dataset, data.test, rng)
    roles = holders(data.labels, agents)
    # Hashing takes half of the time, and runs in parallel.
    with ThreadPoolExecutor(1) as executor:
        digest = executor.submit(checksum, dataset)
        split: Split | Manifest
        if dataset.held is not None:
            split = _use_assigned_split(data, roles, dataset)
        elif data.split:
            split = _replay_split(data, roles, dataset, digest.result(), labelled_is_declared)
        else:
            split = draw_split(data, roles, seed, dataset)
        holdings = split.agents.values()
        ids = [split.validation, *(ids for h in holdings for ids in (h.labelled, h.unlabelled))]
        rows = HeldRows(
            dataset.x_train, dataset.unencoded, chain.from_iterable(ids), dataset.records,
            dataset.persons,
        )  # fmt: skip
        # in natural order, not the file's
        all_agents = tuple(
            _build_agent(
                name, split.agents.get(name, AgentRows((), ())), name in roles.labelled, rows,
                dataset.y_train,
            )
            for name in roles.everyone
        )  # fmt: skip
        validation = None
        if split.validation:
            validation = labelled_rows(split.validation, rows, dataset.y_train)
    if not isinstance(split, Manifest):
        split = _build_manifest(split, data, seed, dataset, digest.result())
    stripped, labels = _drop_training_rows(dataset), dataset.y_train.clone()
    if not labelled_is_declared and _has_standardised_agent(dataset, all_agents):
        stripped = dataclasses.replace(stripped, standardised=True)
    return FederatedDataset(stripped, all_agents, validation, labels, split)


def _has_standardised_agent(dataset: Dataset, agents: Sequence[Agent]) -> bool:
    """Return whether vectors of an agent with labels seem scaled by statistics of its own rows.

    Few rows are never reported, so the result could reveal their number.
    """
    if dataset.unencoded is not None or dataset.scales is not None:
        return False
    for agent in agents:
        if agent.held_labelled is not None:
            labelled = agent.held_labelled.x.numpy()
            unlabelled = [] if agent.held_unlabelled is None else [agent.held_unlabelled.x.numpy()]
            if are_standardised(labelled) or are_standardised(labelled, *unlabelled):
                return True
    return False


def test_rows_only(data: DataSettings, seed: int) -> FederatedDataset:
    """Load only test rows, for a coordinator whose agents are sites."""
    dataset = load_dataset(data)
    manifest = _build_manifest(Split({}, ()), data, seed, dataset, checksum(dataset))
    stripped = _drop_training_rows(dataset)
    return FederatedDataset(stripped, (), None, dataset.y_train.clone(), manifest)


def _build_manifest(
    split: Split, data: DataSettings, seed: int, dataset: Dataset, digest: str
) -> Manifest:
    return Manifest(
        dataset=dataset.name, checksum=digest, rows=len(dataset.y_train), seed=seed,
        settings=settings_of_split(data), agents=split.agents, validation=split.validation,
        persons=persons_checksum(dataset),
    )  # fmt: skip


def _drop_training_rows(dataset: Dataset) -> Dataset:
    """Return the data set without its training rows, of which agents have the only copies.

    Test rows are encoded, if there is an encoder.
    """
    x_test, raw = dataset.x_test, dataset.unencoded
    if raw is not None:
        x_test, raw = raw.encode(raw.test), dataclasses.replace(raw, train=(), test=())
    empty = dataset.x_train[:0].clone()
    return dataclasses.replace(
        dataset, x_train=empty, x_test=x_test, unencoded=raw, records=None,
        persons=dataset.persons and (),
    )  # fmt: skip


def class_counts(
    federated_data: FederatedDataset,
) -> tuple[dict[str, NDArray[np.int64]], dict[str, NDArray[np.int64]]]:
    """Count the labelled, and the unlabelled rows of each agent by class (C,).

    Uses the true labels, so only for the owner of the experiment. Agents without rows of a kind, or
    with rows of unknown class, are left out.
    """
    holdings, y = federated_data.manifest.agents.items(), federated_data.true_labels
    unlabelled = {a: h.unlabelled for a, h in holdings if (y[list(h.unlabelled)] != NO_LABEL).all()}
    return (
        {a: class_counts_of(federated_data, h.labelled) for a, h in holdings if h.labelled},
        {a: class_counts_of(federated_data, ids) for a, ids in unlabelled.items() if ids},
    )


def class_counts_of(federated_data: FederatedDataset, ids: Sequence[int]) -> NDArray[np.int64]:
    """Count some training rows by class (C,), by the true labels if known."""
    labels = federated_data.true_labels.numpy()[list(ids)]
    return np.bincount(labels[labels != NO_LABEL], minlength=federated_data.dataset.classes)


def agent_refs(labels: str, agents: AgentSettings) -> tuple[AgentRef, ...]:
    """Return every agent of a config with its role."""
    roles = holders(labels, agents)
    kinds = {(True, False): "support", (False, True): "query", (True, True): "mixed"}
    return tuple(
        AgentRef(name, "server", AgentLocation.SERVER) if name == SERVER
        else AgentRef(name, kinds[name in roles.labelled, name in roles.unlabelled])
        for name in roles.everyone
    )  # fmt: skip


def _build_agent(
    name: str, holding: AgentRows, has_labels: bool, rows: HeldRows, y: Tensor
) -> Agent:
    unlabelled = unlabelled_rows(holding.unlabelled, rows) if holding.unlabelled else None
    return Agent(
        id=name,
        location=AgentLocation.SERVER if name == SERVER else AgentLocation.EDGE,
        held_labelled=labelled_rows(holding.labelled, rows, y) if has_labels else None,
        held_unlabelled=unlabelled,
    )


def unlabelled_rows(row_ids: tuple[int, ...], rows: HeldRows) -> UnlabelledRows:
    """Return the rows with these numbers."""
    ids = torch.tensor(row_ids, dtype=torch.int64)
    x, origin = rows.take(ids)
    return UnlabelledRows(x, ids, origin, rows.persons_of(ids))


def labelled_rows(row_ids: tuple[int, ...], rows: HeldRows, labels: Tensor) -> LabelledRows:
    """Return the rows with these numbers, and labels from those (N,) of all rows. Raises DataError
    for a missing label."""
    ids = torch.tensor(row_ids, dtype=torch.int64)
    y = labels.index_select(0, ids)
    if (y == NO_LABEL).any():
        raise DataError(
            f"the split gives {int((y == NO_LABEL).sum())} rows to be used with labels that have "
            "none. Leave data.split out to draw a new split"
        )
    x, origin = rows.take(ids)
    return LabelledRows(x, y, ids, origin, rows.persons_of(ids))


def _rules_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the partition's settings; those of labelled rows default to the others."""
    rules = {name: settings.get(name) for name in ("partition", "alpha", "k", "stratified")}
    prefix = "" if settings.get("labelled_partition") is None else "labelled_"
    labelled = {f"labelled_{n}": settings.get(f"{prefix}{n}") for n in ("partition", "alpha", "k")}
    return rules | labelled


def _use_assigned_split(data: DataSettings, roles: RoleAssignment, dataset: Dataset) -> Split:
    """Return the data set's own split. Raises DataError if the settings require another."""
    assert dataset.held is not None
    actual, expected = set(dataset.held), set(roles.everyone)
    if actual != expected or data.split or data.validation:
        reason = "data.split and data.validation can divide them no more"
        raise DataError(
            f"data gives rows to {_format_names(actual)}, and the config has "
            f"{_format_names(expected)} ({reason}). Leave these settings out"
        )
    return Split({agent: AgentRows(*ids) for agent, ids in dataset.held.items()}, ())


def _replay_split(
    data: DataSettings, roles: RoleAssignment, dataset: Dataset, digest: str,
    labelled_is_declared: bool,
) -> Manifest:  # fmt: skip
    """Read the split from a file. Raises DataError unless data, agents and numbers of rows fit."""
    split = manifests.read_manifest(expand_path("split", data.split))
    split.check(dataset, digest)
    _check_agents(data, split, "labelled", roles.labelled, some_may_have_none=labelled_is_declared)
    _check_agents(data, split, "unlabelled", roles.unlabelled)
    held = split.agents.values()
    counts: dict[str, tuple[int | None, int]] = {
        key: (requested, count_persons(dataset.persons, [*ids]))
        for key, requested, ids in (
            ("labelled", data.labelled, chain.from_iterable(h.labelled for h in held)),
            ("unlabelled", data.unlabelled, chain.from_iterable(h.unlabelled for h in held)),
            ("validation", data.validation, split.validation),
        )
    }
    unit = "rows" if dataset.persons is None else "persons"
    if labelled_is_declared:
        del counts["labelled"]
    for key, (requested, actual) in counts.items():
        if requested is not None and requested != actual:
            raise DataError(
                f"{data.split} has {actual} {key} {unit}, but data.{key} is {requested}. "
                f"Set data.{key} to {actual}, or leave data.split out"
            )
    recorded, defaults = _rules_of(split.settings), _rules_of(dataclasses.asdict(DataSettings()))
    for rule, value in _rules_of(dataclasses.asdict(data)).items():
        if value not in (recorded[rule], defaults[rule]):
            raise DataError(
                f"data.{rule} is {value}, but {data.split} was drawn with {recorded[rule]}. Leave "
                f"data.{rule} out, or leave data.split out to draw a new split"
            )
    return split


def _check_agents(
    data: DataSettings, split: Manifest, kind: str, expected: tuple[str, ...], *,
    some_may_have_none: bool = False,
) -> None:  # fmt: skip
    actual = {agent for agent, holding in split.agents.items() if getattr(holding, kind)}
    if actual != set(expected) and not (some_may_have_none and actual < set(expected)):
        raise DataError(
            f"{data.split} gives {kind} rows to {_format_names(actual)}, but the config "
            f"(data.labels {data.labels}) to {_format_names(expected)}. Change agents, or leave "
            "data.split out"
        )


def _format_names(agents: set[str] | tuple[str, ...]) -> str:
    return ", ".join(sorted(agents, key=natural_order)) or "no agent"
