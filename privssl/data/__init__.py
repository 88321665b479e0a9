"""From a config to the parties: data set, split, and each agent with its own copy of its rows.

    federation = build(config.data, config.agents, config.run.seed)
    federation.agents            # s0, s1, ..., q0, q1, ..., each with its rows
    federation.manifest.hash     # the same for everybody who has the same split

Unlabelled rows lose their labels here. ``FederatedDataset.true_labels`` has them, for
``evaluation.HiddenLabelMeter`` and for nothing else.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
from privssl.data.datasets import Dataset, checksum, expand_path, load_dataset
from privssl.data.npz import NO_LABEL
from privssl.data.split import SERVER, RoleAssignment, Split, draw_split, holders, settings_of_split
from privssl.data.split_manifest import AgentRows, Manifest
from privssl.errors import DataError
from privssl.settings.schema import AgentSettings, DataSettings

__all__ = [
    "FederatedDataset",
    "build",
    "class_counts",
    "class_counts_of",
    "test_rows_only",
    "agent_refs",
]


@dataclass(frozen=True, eq=False)
class FederatedDataset:
    """Everything that a run is given. Accounts are not in it; the run attaches them."""

    dataset: Dataset  # without training rows
    agents: tuple[Agent, ...]
    validation: LabelledRows | None  # rows that no agent holds, to choose settings on
    true_labels: Tensor  # (N,) by row id. For evaluate.Oracle only: steps must never see it
    manifest: Manifest


def build(
    data: DataSettings,
    agents: AgentSettings,
    seed: int,
    dataset: Dataset | None = None,
    *,
    labelled_is_declared: bool = False,
) -> FederatedDataset:
    """Load the data, split it, or replay the split of ``data.split``, and set up the agents.

    Args:
        seed: ``run.seed``; the split follows from it, the settings and the data.
        dataset: used instead of loading the one that ``data`` names.
        labelled_is_declared: whether ``data.labelled`` is what was declared, and a split may have
            another number of labelled rows, at an agent none: a refusal would tell the number.

    Raises:
        DataError: the data or the split cannot be had as asked; the text says why.
    """
    dataset = dataset or load_dataset(data)
    who = holders(data.labels, agents)
    # Hashing takes half of all this, and other threads can work meanwhile.
    with ThreadPoolExecutor(1) as beside:
        told = beside.submit(checksum, dataset)
        split: Split | Manifest
        if data.split:
            split = _replay(data, who, dataset, told.result(), labelled_is_declared)
        else:
            split = draw_split(data, who, seed, dataset)
        # In an order that no file decides: JSON sorts its keys.
        held = tuple(
            _agent(name, split.agents.get(name, AgentRows((), ())), name in who.labelled, dataset)
            for name in who.everyone
        )
        validation = _labelled(split.validation, dataset) if split.validation else None
    if not isinstance(split, Manifest):
        split = _manifest(split, data, seed, dataset, told.result())
    rest, labels = _without_training_rows(dataset), dataset.y_train.clone()
    return FederatedDataset(rest, held, validation, labels, split)


def test_rows_only(data: DataSettings, seed: int) -> FederatedDataset:
    """What a coordinator has whose agents are sites: the test rows, and nobody's rows."""
    dataset = load_dataset(data)
    nobody = _manifest(Split({}, ()), data, seed, dataset, checksum(dataset))
    rest = _without_training_rows(dataset)
    return FederatedDataset(rest, (), None, dataset.y_train.clone(), nobody)


def _manifest(
    split: Split, data: DataSettings, seed: int, dataset: Dataset, digest: str
) -> Manifest:
    """What is kept and shown of a split that was drawn."""
    return Manifest(
        dataset=dataset.name, checksum=digest, rows=len(dataset.y_train), seed=seed,
        settings=settings_of_split(data), agents=split.agents, validation=split.validation,
    )  # fmt: skip


def _without_training_rows(dataset: Dataset) -> Dataset:
    """Every training row is with who holds it: no second copy is kept, in memory or in reach."""
    return dataclasses.replace(dataset, x_train=dataset.x_train[:0].clone())


def class_counts(
    federated_data: FederatedDataset,
) -> tuple[dict[str, NDArray[np.int64]], dict[str, NDArray[np.int64]]]:
    """How many rows of each class each agent holds: with labels, and without.

    Made from the true labels of all rows, so it is for the owner of the experiment alone.

    Returns:
        agent -> counts (C,), for the labelled and for the unlabelled rows; agents that hold
        none of a kind, or rows of a class that nobody knows, are not in that dict.
    """
    held = federated_data.manifest.agents.items()
    return (
        {a: class_counts_of(federated_data, h.labelled) for a, h in held if h.labelled},
        {
            a: class_counts_of(federated_data, h.unlabelled)
            for a, h in held
            if h.unlabelled and (federated_data.true_labels[list(h.unlabelled)] != NO_LABEL).all()
        },
    )


def class_counts_of(federated_data: FederatedDataset, ids: Sequence[int]) -> NDArray[np.int64]:
    """How many of some training rows are of each class (C,), by the true labels where known."""
    labels = federated_data.true_labels.numpy()[list(ids)]
    return np.bincount(labels[labels != NO_LABEL], minlength=federated_data.dataset.classes)


def agent_refs(labels: str, agents: AgentSettings) -> tuple[AgentRef, ...]:
    """Every agent of a config with the role that its rows will give it."""
    who = holders(labels, agents)
    kinds = {(True, False): "support", (False, True): "query", (True, True): "mixed"}
    return tuple(
        AgentRef(name, "server", AgentLocation.SERVER) if name == SERVER
        else AgentRef(name, kinds[name in who.labelled, name in who.unlabelled])
        for name in who.everyone
    )  # fmt: skip


def _agent(name: str, holding: AgentRows, labels: bool, dataset: Dataset) -> Agent:
    unlabelled = None
    if holding.unlabelled:
        ids = torch.tensor(holding.unlabelled)
        unlabelled = UnlabelledRows(_copy_rows(dataset.x_train, ids), ids)
    return Agent(
        id=name,
        location=AgentLocation.SERVER if name == SERVER else AgentLocation.EDGE,
        held_labelled=_labelled(holding.labelled, dataset) if labels else None,
        held_unlabelled=unlabelled,
    )


def _labelled(rows: tuple[int, ...], dataset: Dataset) -> LabelledRows:
    ids = torch.tensor(rows, dtype=torch.int64)
    y = _copy_rows(dataset.y_train, ids)
    if (y == NO_LABEL).any():
        raise DataError(
            f"the split gives {int((y == NO_LABEL).sum())} rows to be used with labels that have "
            "none. Leave data.split out to draw a new split"
        )
    return LabelledRows(_copy_rows(dataset.x_train, ids), y, ids)


def _copy_rows(rows: Tensor, ids: Tensor) -> Tensor:
    """Rows of an agent's own; by index_select, which copies them whole: rows[ids] takes ten times
    as long."""
    return rows.index_select(0, ids)


def _rules(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What rows are shared out by; labelled ones by the rule of the others where none is named."""
    own = {name: settings.get(name) for name in ("partition", "alpha", "k", "stratified")}
    before = "" if settings.get("labelled_partition") is None else "labelled_"
    of_labels = {f"labelled_{n}": settings.get(f"{before}{n}") for n in ("partition", "alpha", "k")}
    return own | of_labels


def _replay(
    data: DataSettings,
    who: RoleAssignment,
    dataset: Dataset,
    digest: str,
    labelled_is_declared: bool,
) -> Manifest:
    """The split of a file, if it is one of this data, these agents and these numbers of rows."""
    split = manifests.read_manifest(expand_path("split", data.split))
    split.check(dataset, digest)
    _check_agents(data, split, "labelled", who.labelled, some_may_have_none=labelled_is_declared)
    _check_agents(data, split, "unlabelled", who.unlabelled)
    counts: dict[str, tuple[int | None, int]] = {
        "labelled": (data.labelled, sum(len(h.labelled) for h in split.agents.values())),
        "unlabelled": (data.unlabelled, sum(len(h.unlabelled) for h in split.agents.values())),
        "validation": (data.validation, len(split.validation)),
    }
    if labelled_is_declared:
        del counts["labelled"]
    for key, (asked, there) in counts.items():
        if asked is not None and asked != there:
            raise DataError(
                f"{data.split} has {there} {key} rows, but data.{key} is {asked}. "
                f"Set data.{key} to {there}, or leave data.split out"
            )
    drawn, mute = _rules(split.settings), _rules(dataclasses.asdict(DataSettings()))
    for rule, value in _rules(dataclasses.asdict(data)).items():
        if value not in (drawn[rule], mute[rule]):  # a mute config asks for nothing
            raise DataError(
                f"data.{rule} is {value}, but {data.split} was drawn with {drawn[rule]}, and says "
                f"who has which rows. Leave data.{rule} out, or leave data.split out to draw a new "
                "split"
            )
    return split


def _check_agents(
    data: DataSettings,
    split: Manifest,
    kind: str,
    expected: tuple[str, ...],
    *,
    some_may_have_none: bool = False,
) -> None:
    there = {agent for agent, holding in split.agents.items() if getattr(holding, kind)}
    if there != set(expected) and not (some_may_have_none and there < set(expected)):
        raise DataError(
            f"{data.split} gives {kind} rows to {_names(there)}, but the config (data.labels "
            f"{data.labels}) to {_names(expected)}. Change agents, or leave data.split out"
        )


def _names(agents: set[str] | tuple[str, ...]) -> str:
    """In words, however many there are.

    >>> _names(("q0", "q1")), _names(())
    ('q0, q1', 'nobody')
    """
    return ", ".join(sorted(agents, key=natural_order)) or "nobody"
