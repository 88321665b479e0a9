"""Small federations with toy rows and tiny networks, and a simulation of a few rounds.

``simulate`` runs rounds like a run, without a run folder.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from privssl import models
from privssl.algorithms.base import Algorithm
from privssl.core.federation import Federation, Round
from privssl.core.task import Task
from privssl.data import FederatedDataset, build
from privssl.data.datasets import Dataset, checksum, load_dataset
from privssl.engines.local import LocalEngine
from privssl.ops.precision import Precision
from privssl.runs import checkpoint
from privssl.runs.checkpoint import Snapshot
from privssl.settings.schema import AgentSettings, DataSettings, ModelSettings

#: Settings that make any algorithm fast; each is used if the algorithm has it.
QUICK = {
    "rounds": 3,
    "local_steps": 2,
    "batch_size": 6,
    "warm_up": 1,
    "views": 1,
    "generator_width": 4,
    "noise_size": 4,
}


def federated_data(
    *,
    labels: str = "support",
    support: int = 2,
    query: int = 2,
    mixed: int = 0,
    dataset: Dataset | None = None,
    **data: Any,
) -> FederatedDataset:
    """Distribute toy rows to agents: 20 labelled and 60 unlabelled by default."""
    settings: dict[str, Any] = {"labels": labels, "labelled": 20, "unlabelled": 60} | data
    agents = AgentSettings(support, query, mixed)
    return build(DataSettings(name="toy", **settings), agents, 0, dataset or toy_rows("image"))


def held_as_in(parties: FederatedDataset, dataset: Dataset, folder: Path) -> dict[str, Any]:
    """Return settings with which each agent holds the same rows of this data set.

    A new split would depend on all classes.
    """
    split = dataclasses.replace(parties.manifest, checksum=checksum(dataset))
    split.write(folder / "split.json")
    return {"dataset": dataset, "split": str(folder / "split.json")}


def at_server(**data: Any) -> FederatedDataset:
    """Put all labels at a labelled server."""
    return federated_data(labels="labels-at-server", support=0, **data)


def at_clients(**data: Any) -> FederatedDataset:
    """Give agents both kinds of rows."""
    return federated_data(labels="labels-at-client", support=0, query=0, mixed=2, **data)


#: The toy rows in the shape of each kind, and a network.
SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "image": ((1, 8, 8), "small_cnn"),
    "sequence": ((8, 8), "text_cnn"),
    "vector": ((64,), "mlp"),
}


@cache
def toy_rows(kind: str) -> Dataset:
    """Return 1,000 training rows, 100 of each of ten classes, in the shape of a kind."""
    toy = load_dataset(DataSettings(name="toy"))
    x_train, x_test = (x.view(-1, *SHAPES[kind][0]) for x in (toy.x_train, toy.x_test))
    return dataclasses.replace(toy, x_train=x_train, x_test=x_test)


def make_algorithm(
    kind: type[Algorithm[Any]], *, norm: str = "group", precision: Precision = "float32",
    width: int = 4, rows: str = "image", **settings: Any,
) -> Algorithm[Any]:  # fmt: skip
    """Create an algorithm for toy rows of a kind, by default with a classifier of width 4."""
    keys = {field.name for field in dataclasses.fields(kind.Config)}
    quick = {key: value for key, value in QUICK.items() if key in keys}
    shape, network = SHAPES[rows]

    def new_classifier(share: float = 1.0) -> nn.Module:
        model = ModelSettings(network, round(share * width), norm)  # type: ignore[arg-type]
        return models.build_classifier(model, shape, 10, precision)

    task = Task(10, shape, new_classifier, precision, new_classifier)
    return kind(kind.Config(**(quick | settings)), task)


def relabelled(
    parties: FederatedDataset, *, labelled: bool, rows: Dataset | None = None
) -> Dataset:
    """Return the toy rows with some labels increased by one class, everything else unchanged."""
    kind, rows = "labelled" if labelled else "unlabelled", rows or toy_rows("image")
    ids = [i for holding in parties.manifest.agents.values() for i in getattr(holding, kind)]
    y = rows.y_train.clone()
    y[ids] = (y[ids] + 1) % 10
    return dataclasses.replace(rows, y_train=y)


# Rounds -------------------------------------------------------------------------------------


@dataclass
class Simulation:
    """The result of a few rounds."""

    algorithm: Algorithm[Any]
    engine: Any
    federation: Federation
    begun: Any  # the state before round 1
    state: Any

    @property
    def classifier(self) -> Mapping[str, Tensor]:
        return self.algorithm.classifier(self.state)


def rounds_to_simulate(algorithm: Algorithm[Any]) -> int:
    """Return 2, or all rounds if there are phases, which may differ."""
    phases = algorithm.phases()
    return 2 if len(phases) == 1 else sum(phase.rounds for phase in phases)


def _make_round(algorithm: Algorithm[Any], number: int) -> Round:
    """Return round ``number`` of a run; after the last phase, another one of it."""
    before = 0
    for phase in algorithm.phases():
        if number <= before + phase.rounds:
            break
        before += phase.rounds
    return Round(number, phase.name, number - before)


def simulate(
    algorithm: Algorithm[Any],
    parties: FederatedDataset,
    rounds: int | None = None,
    *,
    seed: int = 0,
    engine: Callable[..., Any] = LocalEngine,
    check_wire: bool = False,
    resume: Snapshot | None = None,
) -> Simulation:
    """Simulate rounds 1 to ``rounds``, or those after a snapshot. Agents start without a memory.

    The default is ``rounds_to_simulate``.
    """
    rounds = rounds_to_simulate(algorithm) if rounds is None else rounds
    for agent in parties.agents:
        agent.memory = {}
    instance = engine(parties.agents, seed=seed, device=torch.device("cpu"), check_wire=check_wire)
    federation = Federation(instance, seed)
    if resume is None:
        initial, done = algorithm.start(federation), 0
    else:
        initial, done = algorithm.StateType(**resume.state), resume.round  # type: ignore[arg-type]
        instance.restore(resume.memories)
    state = initial
    for number in range(done + 1, rounds + 1):
        federation.begin(_make_round(algorithm, number))
        state = algorithm.round(state, federation)
    return Simulation(algorithm, instance, federation, initial, state)


def through_disk(played: Simulation, number: int) -> Snapshot:
    """Save and load a checkpoint after round ``number``."""
    snapshot = Snapshot(number, vars(played.state), played.engine.memories(), "digest")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save_snapshot(Path(folder), snapshot)
        loaded = checkpoint.load_snapshot(Path(folder), "digest")
        # Read while the file exists: a snapshot has only the positions of agents' tensors.
        return dataclasses.replace(
            loaded, state=_read(loaded.state), memories=_read(loaded.memories)
        )


def _read(tree: Any) -> Any:
    return {key: _read(item) for key, item in tree.items()} if isinstance(tree, Mapping) else tree


# Comparing ----------------------------------------------------------------------------------


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Flatten a state, memory or message to path -> tensor or number."""
    items = tree if isinstance(tree, Mapping) else vars(tree)
    leaves: dict[str, Any] = {}
    for key, value in items.items():
        nested = isinstance(value, Mapping)
        leaves |= flat(value, f"{path}/{key}") if nested else {f"{path}/{key}": value}
    return leaves


def same_bits(first: Any, second: Any) -> bool:
    """Return whether two states, memories or messages are bitwise equal."""
    a, b = flat(first), flat(second)
    return a.keys() == b.keys() and all(
        torch.equal(v, b[k]) if isinstance(v, Tensor) else v == b[k] for k, v in a.items()
    )


def apart(first: Any, second: Any) -> float:
    """Return the largest difference between two states of equal shape."""
    a, b = flat(first), flat(second)
    assert a.keys() == b.keys()
    gaps = [(torch.as_tensor(v) - torch.as_tensor(b[k])).abs().max() for k, v in a.items()]
    return float(torch.stack([gap.double() for gap in gaps]).max())


def finite(tree: Any) -> bool:
    """Return whether no number in it is infinite or NaN."""
    return all(bool(torch.as_tensor(v).isfinite().all()) for v in flat(tree).values())
