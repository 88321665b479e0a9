"""The promises that every algorithm must keep, one check for each.

A check takes a :class:`Trial` and raises BrokenPromise with its observation. Rounds that several
checks use are run once.
"""

import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accounting.ledger import read_journal
from privssl.algorithms.base import Algorithm
from privssl.api.datasets import Dataset as Rows
from privssl.api.experiment import train
from privssl.core.messages import Message
from privssl.data import FederatedDataset
from privssl.data.datasets import Dataset
from privssl.engines.process_pool import WorkerEngine, unsupported_reason
from privssl.remote.protocol import NOTE
from privssl.runtime import plugins
from privssl.testing.engines import (
    CPU,
    DecliningEngine,
    RecordingEngine,
    ReverseOrderEngine,
    UnusedAlgorithmEngine,
    sites_engine,
)
from privssl.testing.federations import (
    SHAPES,
    Simulation,
    apart,
    at_clients,
    at_server,
    federated_data,
    finite,
    flat,
    held_as_in,
    make_algorithm,
    relabelled,
    rounds_to_simulate,
    same_bits,
    simulate,
    through_disk,
    toy_rows,
)

PLACES: dict[str, Callable[..., FederatedDataset]] = {
    "support": federated_data,
    "labels-at-server": at_server,
    "labels-at-client": at_clients,
}


#: Name of an own method in a private run; and settings for a run under DP-SGD.
UNDER_TEST = "the-algorithm-under-test"
DP_SGD: Mapping[str, Any] = {"privacy.sample_rate": 0.5, "privacy.steps": 2}


class BrokenPromise(AssertionError):  # noqa: N818
    """An algorithm breaks a promise; the text has the promise and the observation."""


class NotChecked(Exception):  # noqa: N818
    """A promise cannot be checked here, or does not apply to this algorithm."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """An algorithm on toy rows, and simulated rounds."""

    kind: type[Algorithm[Any]]
    settings: Mapping[str, Any]  # of its Config; also norm, precision, width, rows
    labels: str  # data.labels
    also_sent: frozenset[torch.Size]
    private: Mapping[str, Any]
    sequential: bool
    sparse: bool

    def algorithm(self) -> Algorithm[Any]:
        return make_algorithm(self.kind, **self.settings)

    @property
    def form(self) -> str:
        """Kind of the toy rows: image, vector or sequence."""
        form: str = self.settings.get("rows", "image")
        return form

    @property
    def rows(self) -> Dataset:
        return toy_rows(self.form)

    def parties(self, **how: Any) -> FederatedDataset:
        return PLACES[self.labels](**{"dataset": self.rows, **how})

    @cached_property
    def last(self) -> int:
        """Number of rounds that exercise everything."""
        return rounds_to_simulate(self.algorithm())

    @cached_property
    def whole(self) -> Simulation:
        """All rounds, with all messages."""
        return simulate(self.algorithm(), self.parties(), engine=RecordingEngine)

    @cached_property
    def part(self) -> Simulation:
        """All rounds but the last."""
        return simulate(self.algorithm(), self.parties(), self.last - 1)

    @cached_property
    def elsewhere(self) -> Any:
        """Run all rounds at sites; return the final state.

        Each visit uses a new algorithm object, all messages are bytes, and torch's global generator
        has another state.
        """
        algorithm = self.algorithm()
        with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
            torch.manual_seed(20_241)  # a seed used nowhere else

            def make_engine(
                agents: Any, *, seed: int, device: torch.device, check_wire: bool
            ) -> Any:
                return sites_engine(agents, algorithm, seed, Path(folder))

            after = simulate(algorithm, self.parties(), engine=make_engine)
            after.engine.close()
            return after.state

    @property
    def messages(self) -> list[Message]:
        """Return all messages in either direction."""
        recorded = self.whole.engine.recorded
        return [m for call, reply in recorded for m in (call.message, reply.content)]


def learns(trial: Trial) -> None:
    """Check that a round changes the released classifier."""
    if same_bits(trial.whole.algorithm.classifier(trial.whole.begun), trial.whole.classifier):
        raise BrokenPromise(f"after {trial.last} rounds it has the bits of the first state")


def no_reply(trial: Trial) -> None:
    """Check that a round without replies trains nothing, whether first or last.

    Each weight stays, becomes that of another network, or is between both (a moving average).
    """
    first = simulate(trial.algorithm(), trial.parties(), 1, engine=DecliningEngine)
    before = through_disk(trial.part, trial.last - 1)
    last = simulate(
        trial.algorithm(), trial.parties(), trial.last, engine=DecliningEngine, resume=before
    )
    for number, after in ((1, first), (trial.last, last)):
        initial = _collect_weights(after.begun)
        for path, weight in _collect_weights(after.state).items():
            name = path.rpartition("/")[2]
            others = [old for other_path, old in initial.items() if other_path.endswith(f"/{name}")]
            if not any(_is_between(weight, initial.get(path, old), old) for old in others):
                raise BrokenPromise(
                    f"weights of the state moved although no agent replied in round {number}"
                )


def _collect_weights(state: Any) -> dict[str, Tensor]:
    weights = flat({n: value for n, value in vars(state).items() if isinstance(value, Mapping)})
    return {path: torch.as_tensor(value).double() for path, value in weights.items()}


def _is_between(weight: Tensor, first: Tensor, second: Tensor) -> bool:
    """Return whether each entry is between the others, up to rounding."""
    if not weight.shape == first.shape == second.shape:
        return False
    low, high = torch.minimum(first, second) - 1e-6, torch.maximum(first, second) + 1e-6
    return bool(((low <= weight) & (weight <= high)).all())


def metrics(trial: Trial) -> None:
    """Check that agents log numbers under names that a site sends."""
    names = {name for _, reply in trial.whole.engine.recorded for name in reply.metrics}
    if unknown := sorted(name for name in names if not re.fullmatch(NOTE, name)):
        raise BrokenPromise(f"a site does not send {', '.join(unknown)}. Name it train/WORD")


def determinism(trial: Trial) -> None:
    """Check that equal seeds give equal bits in any process, and other seeds other bits."""
    with torch.random.fork_rng(devices=[]):
        try:
            same = same_bits(trial.whole.state, trial.elsewhere)
        except Exception:
            same = False  # the check ``sites`` reports the reason
        if not same and (reason := _explain_difference(trial)):
            raise BrokenPromise(reason)
        torch.manual_seed(20_241)
        other = simulate(trial.algorithm(), trial.parties(), max(1, trial.last - 1), seed=1)
    if same_bits(trial.part.state if trial.last > 1 else trial.whole.state, other.state):
        raise BrokenPromise("seeds 0 and 1 give the same bits. Draw from ctx.rng(purpose)")


def _explain_difference(trial: Trial) -> str | None:
    """Return the reason for different bits that a simulation shows; None: only sites differ."""
    torch.manual_seed(20_242)
    if not same_bits(trial.whole.state, simulate(trial.algorithm(), trial.parties()).state):
        return (
            "two runs of one seed differ: something draws from a global generator, from time or "
            "from a set. Draw from ctx.rng(purpose), on the server from federation.rng(purpose)"
        )
    fresh = simulate(trial.algorithm(), trial.parties(), engine=UnusedAlgorithmEngine)
    if not same_bits(trial.whole.state, fresh.state):
        return (
            "a visit depends on what its process did before: the algorithm object keeps something "
            "between visits. Keep it in agent.memory"
        )
    return None


def order(trial: Trial) -> None:
    """Check that agents of a parallel step may work in any order."""
    if trial.sequential:
        raise NotChecked("its agents work one after the other")
    backwards = simulate(trial.algorithm(), trial.parties(), engine=ReverseOrderEngine).state
    if (gap := apart(trial.whole.state, backwards)) > 1e-6:
        raise BrokenPromise(f"in the opposite order of agents the state differs by {gap:.2g}")


def fields(trial: Trial) -> None:
    """Check that only declared fields are sent, in immutable messages."""
    for message in trial.messages:
        name = type(message).__name__
        if not dataclasses.is_dataclass(message):
            raise BrokenPromise(f"{name} is no dataclass")
        declared = [field.name for field in dataclasses.fields(message)]
        if list(vars(message)) != declared:
            raise BrokenPromise(f"{name} carries {list(vars(message))} and declares {declared}")
        if not type(message).__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise BrokenPromise(f"{name} can be changed. Make it @dataclass(frozen=True)")


def rows(trial: Trial) -> None:
    """Check that no row is sent: every tensor has the shape of a weight, or a declared one."""
    networks = [*trial.whole.algorithm.networks().values()]
    networks.append(trial.whole.algorithm.task.new_classifier())
    weight_shapes = {tensor.shape for n in networks for tensor in n.state_dict().values()}
    for message in trial.messages:
        for name, tensor in _list_tensors(vars(message)):
            if trial.sparse and tensor.dim() == 1:
                continue
            if tensor.shape not in weight_shapes | trial.also_sent:
                raise BrokenPromise(
                    f"{type(message).__name__}.{name} is {tuple(tensor.shape)}, the shape of no "
                    "weight. If it is no row, declare it: also_sent=[...]"
                )


def _list_tensors(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, item in tree.items() if isinstance(tree, Mapping) else ():
        if isinstance(item, Tensor):
            yield f"{path}{name}", item
        else:
            yield from _list_tensors(item, f"{path}{name}.")


def resume(trial: Trial) -> None:
    """Check that a resumed run ends with the bits of an uninterrupted one."""
    stop = trial.last - 1
    interrupted = trial.part
    resumed = simulate(
        trial.algorithm(), trial.parties(), trial.last, resume=through_disk(interrupted, stop)
    )
    if not same_bits(trial.whole.state, resumed.state):
        raise BrokenPromise(
            f"resumed after round {stop}, it ends in another state: something that matters is "
            "neither in the state nor in agent.memory"
        )
    if not same_bits(trial.whole.engine.memories(), resumed.engine.memories()):
        raise BrokenPromise(f"resumed after round {stop}, agents remember something else")


def labels(trial: Trial) -> None:
    """Check that hidden labels change no bit, and that given labels do."""
    federated = trial.parties()
    reference = trial.whole.state
    for labelled in (False, True):
        changed = relabelled(federated, labelled=labelled, rows=trial.rows)
        with tempfile.TemporaryDirectory() as folder:
            settings = held_as_in(federated, changed, Path(folder))
            other_parties = trial.parties(**settings)
        same = same_bits(reference, simulate(trial.algorithm(), other_parties).state)
        if not same and not labelled:
            raise BrokenPromise("labels that agents do not have change the result")
        if same and labelled:
            raise BrokenPromise("labels that agents have change nothing: nobody learns from them")


def parties(trial: Trial) -> None:
    """Check one agent of each kind, and finite weights for agents with rows of one class."""
    few, one_class = {"query": 1}, {"partition": "classes_per_agent", "k": 1}
    skewed: dict[str, Any] = {**one_class, "query": 10}
    if trial.labels == "support":
        few, skewed = few | {"support": 1}, skewed | {"support": 10}
    elif trial.labels == "labels-at-client":
        few, skewed = {"mixed": 1}, {**one_class, "mixed": 10}
    rounds = 1 if len(trial.algorithm().phases()) == 1 else None
    for case, settings, count in (
        ("one agent of each kind", few, rounds),
        ("one class", skewed, 1),
    ):
        no_agents = {"support": 0, "query": 0, "mixed": 0}
        federated = federated_data(
            **{**no_agents, "labels": trial.labels, "dataset": trial.rows, **settings}
        )
        after = simulate(trial.algorithm(), federated, count)
        if not finite(after.state):
            raise BrokenPromise(f"with {case} at an agent the state has NaN or infinite numbers")
        if case != "one class" and same_bits(after.begun, after.state):
            raise BrokenPromise("with one agent of each kind nothing is learned")


def workers(trial: Trial) -> None:
    """Check that worker processes give the bits of one process."""
    if reason := unsupported_reason(CPU):
        raise NotChecked(reason)
    algorithm, engines = trial.algorithm(), list[WorkerEngine]()

    def make_engine(
        agents: Any, *, seed: int, device: torch.device, check_wire: bool
    ) -> WorkerEngine:
        engines.append(
            WorkerEngine(agents, algorithm=algorithm, workers=2, seed=seed, device=device)
        )
        return engines[0]

    try:
        after = simulate(algorithm, trial.parties(), engine=make_engine)
        memories = after.engine.memories()
    finally:
        for worker_engine in engines:
            worker_engine.close()
    if not same_bits(trial.whole.state, after.state):
        raise BrokenPromise("two worker processes give another state than one process")
    if not same_bits(trial.whole.engine.memories(), memories):
        raise BrokenPromise("agents remember something else in worker processes")


def sites(trial: Trial) -> None:
    """Check that sites that exchange bytes give the bits of one process."""
    if not same_bits(trial.whole.state, trial.elsewhere):
        raise BrokenPromise(
            "sites give another state than one process: a field is no tensor, number or text, or "
            "the server reads what a step wrote on the algorithm object"
        )


def privacy(trial: Trial) -> None:
    """Check that a private run spends by its plan, and that its audit confirms the guarantee."""
    if not trial.kind.can_be_private:
        raise NotChecked("can_be_private is False")
    if trial.labels != "support":
        raise NotChecked("it is tried where support agents have the labels")
    is_own = trial.kind.__module__.partition(".")[0] != "privssl"
    name = UNDER_TEST if is_own else trial.kind.Config.__dataclass_fields__["name"].default
    census = trial.kind.mechanism == "census"
    config = {
        "run": {"workers": 1},
        "data": {"labelled": 40, "unlabelled": 60},
        "agents": {"support": 2, "query": 2},
        "model": {"name": SHAPES[trial.form][1], "width": 4},
        "algorithm": {"name": name, **({} if census else {"rounds": 3})},
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
    }
    overrides = {**({} if census else DP_SGD), **trial.private}
    with tempfile.TemporaryDirectory() as folder, plugins.provided("algorithms", name, trial.kind):
        run = train(config, overrides, Rows(trial.rows), output=Path(folder) / "run")
        ledgers = sorted((run.folder / "ledger").glob("*.jsonl"))
        visits = {path.stem: len(read_journal(path).visits) for path in ledgers}
        verdict = run.audit()
    if sorted(visits) != ["s0", "s1"] or not all(visits.values()):
        raise BrokenPromise(
            f"support agents were charged {visits}: labelled rows are read in charged visits"
        )
    if verdict["verdict"] != "consistent":
        problems = verdict["problems"] or verdict["doubts"]
        raise BrokenPromise(f"the audit says {verdict['verdict']}: {problems}")


PROMISES: dict[str, Callable[[Trial], None]] = {
    check.__name__: check
    for check in (
        learns, no_reply, metrics, determinism, order, fields, rows, resume, labels, parties,
        workers, sites, privacy,
    )
}  # fmt: skip
