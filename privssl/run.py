"""One run from a config to its results: wire, loop, save, and say what is guaranteed.

``prepare`` does everything that can fail because of the user, and writes nothing. ``carry_out``
makes the run folder and loops over rounds. State lives in the value that the algorithm returns
and in the agents' memories; both are kept as they were after the last finished round, so an
interruption at any moment leaves a checkpoint of a whole round.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from privssl import __version__, checkpoint, data, models, pictures
from privssl import config as configs
from privssl.agents import Agent
from privssl.algorithms import ALGORITHMS
from privssl.algorithms.base import Algorithm, Phase, Task
from privssl.card import guarantee_sentence, privacy_card, render_markdown
from privssl.checkpoint import Snapshot
from privssl.config import Config
from privssl.engines.local import LocalEngine
from privssl.evaluate import Oracle, accuracy
from privssl.learn import network_input
from privssl.privacy import PrivatePlan, make_plan, refuse_coupling_layers
from privssl.run_folder import open_accounts, releases, write_text
from privssl.tracker import RoundRecord, Tracker
from privssl.world import Round, World

Status = Literal["finished", "budget_exhausted", "interrupted"]


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start: everything is checked, nothing is written."""

    config: Config
    federation: data.Federation
    algorithm: Algorithm[Any]
    plan: PrivatePlan | None
    device: torch.device

    @property
    def labelled_agents(self) -> tuple[Agent, ...]:
        return tuple(a for a in self.federation.agents if a.held_labelled is not None)


def prepare(config: Config) -> Prepared:
    """Load the data, split it, build the algorithm, and refuse what cannot be done."""
    federation = data.build(config.data, config.agents, config.run.seed)
    dataset = federation.dataset
    task = Task(
        dataset.classes,
        dataset.shape,
        lambda: models.build_classifier(config.model, dataset.shape, dataset.classes),
    )
    plan = None
    if config.privacy is not None:
        holders = sum(1 for a in federation.agents if a.held_labelled is not None)
        plan = make_plan(
            config.privacy,
            rounds=config.algorithm.rounds,
            rows_per_agent=config.data.labelled / holders,
        )
    algorithm = ALGORITHMS[config.algorithm.name](config.algorithm, task, plan)
    if plan is not None:
        refuse_coupling_layers(algorithm.networks())
    return Prepared(config, federation, algorithm, plan, _device(config.run.device))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


# The loop -----------------------------------------------------------------------------------


@dataclass
class Progress:
    """What a run has come to; saved with every checkpoint."""

    round: int = 0
    best: float = 0.0
    best_round: int = 0
    final: float = 0.0
    up: int = 0
    down: int = 0
    seconds: float = 0.0
    refused: int = 0  # visits that a budget did not pay for


class Run:
    """A prepared run in its folder."""

    def __init__(self, prepared: Prepared, folder: Path, trackers: Sequence[Tracker]) -> None:
        config = prepared.config
        self._prepared, self._config, self._folder = prepared, config, folder
        self._algorithm, self._trackers = prepared.algorithm, trackers
        dataset = prepared.federation.dataset
        self._test = (dataset.x_test, dataset.y_test)
        self._oracle = Oracle(prepared.federation.true_labels)
        self._judge = self._algorithm.task.new_classifier().to(prepared.device)
        self._engine = LocalEngine(
            prepared.federation.agents, seed=config.run.seed, device=prepared.device,
            meter=self._oracle, check_wire=config.run.check_wire,
        )  # fmt: skip
        self._world = World(self._engine, config.run.seed)
        self._digest = configs.digest(config)
        self.progress = Progress()
        self._durations: list[float] = []
        self._state: Any = None
        self._memories: Mapping[str, Mapping[str, Tensor]] = {}

    # A run's life: begin or restore, rounds, end ----------------------------------------------

    def begin(self) -> None:
        """The state before round 1."""
        self._state = self._algorithm.start(self._world)
        self._memories = self._engine.memories()
        self.save()  # a run that dies in its first round can be resumed as well
        for tracker in self._trackers:
            counts = data.class_counts(self._prepared.federation)
            tracker.images(0, "images/partition", pictures.partition_plot(*counts))

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot, as if the run had never stopped."""
        self._state = self._algorithm.StateType(**snapshot.state)  # type: ignore[arg-type]
        self._memories = snapshot.memories
        self._engine.restore(snapshot.memories)
        known = {f.name for f in dataclasses.fields(Progress)}
        self.progress = Progress(**{k: v for k, v in snapshot.extra.items() if k in known})  # type: ignore[arg-type]

    def carry_out(self) -> Status:
        """All rounds that are left. Saves and returns "interrupted" on Ctrl-C."""
        rounds = _rounds(self._algorithm.phases())
        try:
            for now in rounds[self.progress.round :]:
                self._one_round(now, last=now is rounds[-1])
            self._state = self._algorithm.finish(self._state, self._world)
        except KeyboardInterrupt:
            self.save()
            return "interrupted"
        return "budget_exhausted" if self.progress.refused else "finished"

    def _one_round(self, now: Round, *, last: bool) -> None:
        begun = time.perf_counter()
        self._world.begin(now)
        state = self._algorithm.round(self._state, self._world)
        values = self._measure(state, now, last)
        seconds = time.perf_counter() - begun
        # From here on the round counts: nothing before this line has changed what is saved.
        self._state, self._memories = state, self._engine.memories()
        p, traffic = self.progress, self._world.traffic
        self.progress = dataclasses.replace(
            p, round=now.number, up=p.up + traffic.up, down=p.down + traffic.down,
            seconds=p.seconds + seconds, refused=p.refused + self._world.silences,
            **self._accuracies(values, now.number),
        )  # fmt: skip
        self._durations.append(seconds)
        record = RoundRecord(
            now.number, rounds_of(self._algorithm), now.phase, {**values, "time/round_s": seconds}
        )
        for tracker in self._trackers:
            tracker.round(record)
        if now.number % self._config.run.images_every == 0 or last or now.number == 1:
            self._show(now.number)
        if now.number % self._config.run.checkpoint_every == 0 or last:
            self.save()

    def _accuracies(self, values: Mapping[str, float], number: int) -> dict[str, Any]:
        reached = values.get("test/accuracy")
        if reached is None:
            return {}
        if reached > self.progress.best:
            return {"final": reached, "best": reached, "best_round": number}
        return {"final": reached}

    def _measure(self, state: Any, now: Round, last: bool) -> dict[str, float]:
        values = {**self._world.mean_notes(), **self._algorithm.metrics(state)}
        values |= self._oracle.report()
        traffic = self._world.traffic
        values |= {"comm/up_bytes": traffic.up, "comm/down_bytes": traffic.down}
        for agent in self._prepared.labelled_agents:
            if agent.account is not None:
                values[f"dp/epsilon/{agent.id}"] = agent.account.spent()
                values[f"dp/budget_left/{agent.id}"] = agent.account.left()
        if now.number % self._config.run.evaluate_every == 0 or last:
            values |= self._evaluate(state)
        return values

    def _evaluate(self, state: Any) -> dict[str, float]:
        """Accuracy on held-out rows. Nothing in a run is chosen by it."""
        sets = {"test": self._test}
        held_out = self._prepared.federation.validation
        if held_out is not None:
            sets["validation"] = (held_out.x, held_out.y)
        weights = {"accuracy": self._algorithm.classifier(state)}
        for name, other in self._algorithm.also_evaluated(state).items():
            weights[f"accuracy_{name}"] = other
        return {
            f"{rows}/{name}": accuracy(self._judge, classifier, x, y, device=self._prepared.device)
            for rows, (x, y) in sets.items()
            for name, classifier in weights.items()
        }

    def _show(self, number: int) -> None:
        x, y = self._test
        few = min(len(x), 500)  # held-out rows: a picture must not show an agent's row
        drawn = self._algorithm.pictures(self._state, network_input(x[:few]), y[:few])
        for tag, image in drawn.items():
            for tracker in self._trackers:
                tracker.images(number, tag, image)

    def save(self) -> None:
        """Write a checkpoint of the last finished round."""
        seqs = {
            f"ledger_seq/{a.id}": a.account.seq
            for a in self._prepared.labelled_agents
            if a.account is not None
        }
        checkpoint.save(
            self._folder / "checkpoints",
            Snapshot(
                round=self.progress.round,
                state=vars(self._state),
                memories=self._memories,
                config_digest=self._digest,
                extra={**dataclasses.asdict(self.progress), **seqs},
            ),
        )

    def close(self) -> None:
        self._engine.close()
        for tracker in self._trackers:
            tracker.close()

    # What remains ---------------------------------------------------------------------------

    def conclude(self, status: Status) -> dict[str, Any]:
        """Write results.json, the weights and the privacy card; return the results."""
        if status != "interrupted":
            weights = self._algorithm.classifier(self._state)
            checkpoint.save_weights(self._folder / "classifier.safetensors", weights)
        card = self._card()
        if card is not None:
            write_text(self._folder / "privacy.json", json.dumps(card, indent=2) + "\n")
            write_text(self._folder / "privacy.md", render_markdown(card))
        results = self._results(status, card)
        write_text(self._folder / "results.json", json.dumps(results, indent=2) + "\n")
        return results | {"sentence": guarantee_sentence(card)}

    def _results(self, status: Status, card: Mapping[str, Any] | None) -> dict[str, Any]:
        config, p = self._config, self.progress
        plan = self._prepared.plan
        return {
            "name": config.run.name,
            "algorithm": config.algorithm.name,
            "dataset": config.data.name,
            "seed": config.run.seed,
            "status": status,
            "rounds": p.round,
            "agents": {k: v for k, v in vars(config.agents).items() if isinstance(v, int) and v},
            "labels": config.data.labelled,
            "test_accuracy": {"final": p.final, "best": p.best, "best_round": p.best_round},
            "seconds": {
                "total": round(p.seconds, 3),
                "round_median": round(statistics.median(self._durations or [0.0]), 4),
            },
            "bytes": {"up": p.up, "down": p.down},
            "privacy": {
                "guarantee": None if card is None else card["guarantee"],
                "nominal_epsilon": None if card is None else card["nominal_epsilon"],
                "scope": "none" if plan is None else plan.scope,
            },
            "split_hash": self._prepared.federation.manifest.hash,
            "versions": {
                "privssl": __version__,
                "torch": version("torch"),
                "opacus": version("opacus"),
            },
        }

    def _card(self) -> dict[str, Any] | None:
        plan, privacy = self._prepared.plan, self._config.privacy
        if plan is None or privacy is None:
            return None
        accounts = [a.account for a in self._prepared.labelled_agents if a.account is not None]
        return privacy_card(
            [(a.agent, a.plan, a.events, a.head) for a in accounts],
            scope=plan.scope,
            delta=privacy.delta,
            releases=releases(plan, self._algorithm),
            algorithm=self._config.algorithm.name,
            dataset=self._config.data.name,
        )


def rounds_of(algorithm: Algorithm[Any]) -> int:
    """Rounds of a whole run."""
    return sum(phase.rounds for phase in algorithm.phases())


def _rounds(phases: Sequence[Phase]) -> list[Round]:
    listed: list[Round] = []
    for phase in phases:
        for number in range(1, phase.rounds + 1):
            listed.append(Round(len(listed) + 1, phase.name, number))
    return listed


def execute(
    prepared: Prepared, folder: Path, trackers: Sequence[Tracker], snapshot: Snapshot | None
) -> dict[str, Any]:
    """Carry a run out in its folder; the results, with the guarantee as a sentence."""
    with ExitStack() as stack:
        seqs = None
        if snapshot is not None:
            prefix = "ledger_seq/"
            seqs = {
                key.removeprefix(prefix): int(value)
                for key, value in snapshot.extra.items()
                if key.startswith(prefix)
            }
        open_accounts(prepared, folder, seqs)
        run = Run(prepared, folder, trackers)
        stack.callback(run.close)
        if snapshot is None:
            run.begin()
        else:
            run.restore(snapshot)
        status = run.carry_out()
        return run.conclude(status)
