"""Attack the plan of a finished run: ``python -m privssl.audit RUN_DIR --empirical``.

An attack can refute a guarantee and find bugs; it cannot prove a guarantee. Both attacks use the
training code, the numbers of the run, and synthetic data:

    mechanism   private steps on orthogonal canaries, as often as the agent was charged for; see
                ``audit/mechanism_attack.py``
    canaries    the run's own algorithm trains a synthetic support agent with 1,000 canaries, each
                included with probability 1/2; the attacker sees its messages (arXiv:2305.08846)

A label census is attacked instead by ``audit/histogram_attack.py``. Without a guarantee the
synthetic agent is about as small as the run's agents, and the result is how many of its rows are
found. Inclusion and data are never seeded; each test is fixed before it runs, by constants here and
public settings.
"""

import dataclasses
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from accounting.account_plan import AccountPlan
from accounting.budget import Budget
from accounting.journal_reader import Journal
from accounting.ledger import Account
from accounting.one_run_audit import (
    claim_rejected,
    count_correct,
    guess,
    one_run_ceiling,
    one_run_lower_bound,
)
from accounting.two_sample_audit import AttackRates, roc
from privssl import models
from privssl.algorithms import ALGORITHMS
from privssl.algorithms.base import Algorithm, CanaryLoss
from privssl.audit.histogram_attack import CensusAttack, attack_census, judge_census
from privssl.audit.mechanism_attack import CANNOT_SEE, MechanismAttack, attack_mechanism
from privssl.core.agents import Agent, LabelledRows
from privssl.core.engine import Call
from privssl.core.federation import Federation, Round
from privssl.core.messages import Message, Reply, StateDict
from privssl.core.rows import kind_of
from privssl.core.task import Task
from privssl.engines.local import LocalEngine
from privssl.errors import RunFolderError, UserError
from privssl.experiment.config import Config
from privssl.models.own_networks import is_imported
from privssl.privacy.label_histogram import CensusPlan
from privssl.privacy.per_example_gradients import Parameters, per_example_gradients
from privssl.privacy.plan import PrivatePlan
from privssl.privacy.secure_noise import secure_uniform
from privssl.training.batched.deferred import FunctionalModule
from privssl.training.local_training import load_weights, network_input

CONFIDENCE = 1 - 0.05 / 3  # of each of three tests, so that all together err in 5% at most
CANARIES = 1000  # of the one-run attack
GUESSES = 400  # half of them "in", half "out"; no guess about the others
FEWEST = 200  # canaries without a guarantee: about 100 are out, for 1% FPR
AT_ONCE = 64  # canaries per gradient batch
ALARM = 1e-4  # a p-value below it contradicts the promised distribution
ROUNDING = 1e-5  # relative, of a contribution in single precision

_NO_CANARIES = "canaries: not applicable: labels are released once, as counts"
_NO_CODE = (
    "canaries: not tried: the network is {}, and an audit runs no code that a run folder names"
)
_PROFILE = tuple(10.0**-power for power in range(1, 11))  # deltas at which the guarantee is tested


@dataclass(frozen=True)
class CanaryAttack:
    """The result of attacking a synthetic support agent's messages; ``rates`` by network."""

    canaries: int
    guesses: int
    correct: int
    visits: int
    lower_bound: float
    ceiling: float
    rejects_claim: bool
    rates: Mapping[str, AttackRates]


@dataclass
class AttackReport:
    """Both attacks on the plan of the agent that was charged most."""

    agent: str
    epsilon: float  # of these visits alone; nominal in scope as_published
    delta: float
    sound: bool
    mechanism: MechanismAttack | CensusAttack | None = None
    canaries: CanaryAttack | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    cannot_see: tuple[str, ...] = CANNOT_SEE

    @property
    def baseline_only(self) -> bool:
        """Whether even full disclosure would give a bound below the guarantee in both attacks."""
        ceilings = [result.ceiling for result in (self.mechanism, self.canaries) if result]
        return bool(ceilings) and max(ceilings) < self.epsilon


def attack(
    config: Config, card: Mapping[str, Any], journals: Mapping[str, Journal]
) -> AttackReport:
    """Attack the plan of a run.

    Args:
        config: of the run. card: its privacy card. journals: of its agents, verified.

    Raises:
        RunFolderError: the card does not name the training data.
    """
    privacy = config.privacy
    if privacy is None or not card.get("task"):
        raise RunFolderError(
            "privacy.json does not say what rows look like (task), so no row can be made to attack "
            "with. Runs of this version write it"
        )
    name, journal = max(journals.items(), key=lambda item: len(item[1].events))
    rows = config.data.labelled / max(len(card["agents"]), 1)
    algorithm_type = ALGORITHMS[config.algorithm.name]
    plan = algorithm_type.make_plan(
        privacy, rounds=config.algorithm.rounds, rows_per_agent=rows, agents=len(card["agents"])
    )
    charged = [event for event in journal.events if event == plan.event]
    cost = journal.plan.cost(charged)
    delta = journal.plan.delta_of(cost)
    report = AttackReport(name, cost.epsilon(delta), delta, plan.scope == "sound")
    if len(charged) < len(journal.events):
        report.notes.append(
            f"{len(journal.events) - len(charged)} of {len(journal.events)} visits were charged "
            "under another plan than config.yaml gives; attacked are the others"
        )
    if not charged:
        if journal.events:
            report.problems.append("no visit was charged as config.yaml plans it")
        return report
    classes = int(card["task"]["classes"])
    if isinstance(plan, CensusPlan):
        report.notes.append(_NO_CANARIES)
        report.mechanism = attack_census(plan, len(charged), report.epsilon, classes)
        report.problems += judge_census(report.mechanism, report.epsilon)
        return report
    assert isinstance(plan, PrivatePlan)  # there are only two mechanisms
    report.mechanism = attack_mechanism(
        plan, len(charged) * plan.steps, delta, CONFIDENCE,
        counts_public=journal.plan.record_counts == "public", unit=journal.plan.unit,
    )  # fmt: skip
    _judge_mechanism(report, report.mechanism)
    if is_imported(config.model.name):
        report.notes.append(_NO_CODE.format(config.model.name))
        return report
    task = _build_task(config, card["task"])
    canaries = CANARIES if report.sound else min(CANARIES, max(FEWEST, round(2 * rows)))
    # The divisor is public and not part of the guarantee: it fits the rows of the synthetic agent,
    # or steps would be too long.
    canary_plan = dataclasses.replace(plan, expected_batch=plan.sample_rate * canaries / 2)
    algorithm = algorithm_type(config.algorithm, task, canary_plan)
    profile = [(cost.epsilon(d), d) for d in _PROFILE]
    visits = min(len(charged), plan.visits)
    report.canaries = attack_messages(
        algorithm, canary_plan, task, visits, delta, profile, canaries, journal.plan
    )
    _judge_canaries(report, report.canaries)
    return report


def _build_task(config: Config, entry: Mapping[str, Any]) -> Task:
    classes, shape = int(entry["classes"]), tuple(map(int, entry["shape"]))
    name = config.model.name
    if not is_imported(name) and name not in kind_of(shape).networks:
        raise UserError(f"not a privacy card of this run: {name} takes no rows of shape {shape}")
    model = dataclasses.replace(config.model, weights="")
    return Task(classes, shape, lambda: models.build_classifier(model, shape, classes))


SAYS = {
    "noise": "the noise is not normal with the planned deviation",
    "repeated noise": "noise of different steps is not independent",
    "included rows": "rows do not take part as often, or are not clipped, as planned",
    "batches": "batches are not drawn with the planned rate",
    "batch sizes": "batch sizes do not vary as those of rows that are drawn independently",
    "noise of visits": "what a visit releases has not the noise of its steps",
    "repeated noise of visits": "noise of different visits is not independent",
    "rows of visits": "rows do not move what a visit releases as planned",
}


def _judge_mechanism(report: AttackReport, result: MechanismAttack) -> None:
    for name, p in result.p_values.items():
        if p < ALARM:
            report.problems.append(f"mechanism: {SAYS[name]} (p = {p:.2g})")
    if not result.sensitivity <= 1 + ROUNDING:
        report.problems.append(
            f"mechanism: one row adds {result.sensitivity:.4f} clip norms to one step, where the "
            "accounting allows 1"
        )
    if result.lower_bound > report.epsilon:
        report.problems.append(
            f"mechanism: {result.steps} steps leak at least epsilon {result.lower_bound:.4f} "
            f"(95%), above the {report.epsilon:.4f} that they are charged"
        )


class _RecordingEngine(LocalEngine):
    """An engine that records all messages."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.messages: list[tuple[Message, Message]] = []

    def deliver(self, calls: Sequence[Call]) -> list[Reply[Any]]:
        replies = list(super().deliver(calls))
        self.messages += [(c.message, r.payload) for c, r in zip(calls, replies, strict=True)]
        return replies


def attack_messages(
    algorithm: Algorithm[Any], plan: PrivatePlan, task: Task, visits: int, delta: float,
    profile: Sequence[tuple[float, float]], canaries: int, promised: AccountPlan,
) -> CanaryAttack:  # fmt: skip
    """Train one synthetic support agent with the run's own algorithm and guess which canaries were
    included.

    Args:
        visits: of that agent, each by the plan.
        profile: (epsilon, delta) pairs that the plan guarantees for these visits.
        canaries: their number; GUESSES / CANARIES of them are guessed.
        promised: of the agent whose plan is attacked: whether its counts are public.
    """
    shape = (canaries, *task.shape)
    noise = np.frombuffer(os.urandom(int(np.prod(shape))), dtype=np.uint8).copy()
    x = torch.from_numpy(noise).view(shape)
    y = torch.from_numpy((secure_uniform(canaries) * task.classes).astype(np.int64))
    included = secure_uniform(canaries) < 0.5
    synthetic = LabelledRows(x, y, torch.arange(canaries))
    messages = _record_visits(algorithm, plan, synthetic, included, visits, promised)
    # Ratio of squared noise to a canary's squared contribution per visit, times 4: see
    # _score_by_projection.
    ridge = 4 * plan.noise_multiplier**2 / (plan.steps * plan.sample_rate**2)
    rows, networks = (network_input(x), y), algorithm.networks()
    scores = {
        name: _score_canaries(
            networks[name], loss, name, messages, rows, ridge if name in plan.protect else None
        )
        for name, loss in algorithm.canary_losses().items()
        if name in plan.update
    }
    combined = np.sum([(s - s.mean()) / (s.std() + 1e-12) for s in scores.values()], axis=0)
    guesses = 2 * (canaries * GUESSES // (2 * CANARIES))
    correct = count_correct(guess(combined, guesses), included)
    tally = {"canaries": canaries, "guesses": guesses, "correct": correct}
    return CanaryAttack(
        **tally, visits=visits,
        lower_bound=one_run_lower_bound(**tally, delta=delta, confidence=CONFIDENCE),
        ceiling=one_run_ceiling(
            canaries=canaries, guesses=guesses, delta=delta, confidence=CONFIDENCE
        ),
        rejects_claim=claim_rejected(**tally, profile=profile, confidence=CONFIDENCE),
        rates={name: roc(s[included], s[~included]) for name, s in scores.items()},
    )  # fmt: skip


def _record_visits(
    algorithm: Algorithm[Any], plan: PrivatePlan, rows: LabelledRows, included: NDArray[np.bool_],
    visits: int, run_plan: AccountPlan,
) -> list[tuple[Message, Message]]:  # fmt: skip
    """Yield the requests and replies of the synthetic agent, visit by visit."""
    indices = torch.from_numpy(np.flatnonzero(included))
    seed = int.from_bytes(os.urandom(4), "big")
    with tempfile.TemporaryDirectory() as folder:
        # Of the run's plan, whether counts are public: it determines how rows are sampled.
        account_plan = dataclasses.replace(
            run_plan, agent="s0", n_public=None, unit="record",  # of canaries, one row each
            budget=Budget(1e9, 1e-12),  # this account pays for an experiment on synthetic rows
            scope=plan.scope, update=plan.update, protect=plan.protect, event=plan.event,
        )  # fmt: skip
        account = Account.open(Path(folder) / "s0.jsonl", account_plan, resume=False)
        labelled = LabelledRows(rows.x[indices], rows.y[indices], rows.ids[indices])
        agent = Agent(id="s0", held_labelled=labelled, account=account)
        engine = _RecordingEngine([agent], seed=seed, device=torch.device("cpu"))
        try:
            federation = Federation(engine, seed)
            state = algorithm.start(federation)
            for number in range(1, visits + 1):
                federation.begin(Round(number, "audit", number))
                state = algorithm.round(state, federation)
        finally:
            engine.close()
    return engine.messages


def _score_canaries(
    network: nn.Module, loss: CanaryLoss, name: str, messages: Sequence[tuple[Message, Message]],
    canaries: tuple[Tensor, Tensor], ridge: float | None,
) -> NDArray[np.float64]:  # fmt: skip
    """Return membership scores of canaries over all visits: (canaries,).

    Args:
        canaries: their rows (N, *shape) as network input, and classes (N,).
        ridge: of :func:`_score_by_projection`; None for a network trained without noise, whose
            score is the decrease of the canary's loss.
    """
    scores = torch.zeros(len(canaries[1]), dtype=torch.float64)
    for request, reply in messages:
        before: StateDict = getattr(request, name)
        after: StateDict | None = getattr(reply, name)
        if after is None:
            continue
        if ridge is None:
            loss_after = _compute_losses(load_weights(network, after), loss, canaries)
            visit_scores = (
                _compute_losses(load_weights(network, before), loss, canaries) - loss_after
            )
        else:
            load_weights(network, before)
            update = {k: after[k] - before[k] for k, _ in network.named_parameters()}
            visit_scores = _score_by_projection(network, loss, canaries, update, ridge)
        scores += visit_scores.nan_to_num()  # a diverged network has no information
    return scores.numpy()


def _compute_losses(
    network: nn.Module, loss: CanaryLoss, canaries: tuple[Tensor, Tensor]
) -> Tensor:
    """Return the loss of each canary (N,)."""
    network.eval()
    with torch.no_grad():
        rows = zip(*canaries, strict=True)
        return torch.stack([loss(network, x[None], y[None]).double() for x, y in rows])


def _score_by_projection(
    network: nn.Module, loss: CanaryLoss, canaries: tuple[Tensor, Tensor], update: StateDict,
    ridge: float,
) -> Tensor:  # fmt: skip
    """Return how much of an update is each canary's own descent (N,): the best linear estimate.

    Gradients are correlated, so an absent canary still aligns with the others' update. With unit
    gradients U (N, P), inclusion of variance 1/4 and noise of variance ridge / 4 in every
    parameter, the linear estimate of least mean square error is (U U^T + ridge I)^-1 U d.
    """
    network.eval()
    parameters = {"here": dict(network.named_parameters())}

    def row_loss(params: Parameters, fields: Mapping[str, Tensor]) -> Tensor:
        return loss(FunctionalModule(network, params["here"]), fields["x"][None], fields["y"][None])

    units = []
    for x, y in zip(*(torch.split(part, AT_ONCE) for part in canaries), strict=True):
        by_name = per_example_gradients(row_loss, parameters, {"x": x, "y": y})["here"]
        gradients = torch.cat([g.flatten(1) for g in by_name.values()], dim=1)
        # Directions only: clipping shortens most gradients to one length.
        units.append(gradients / gradients.norm(dim=1, keepdim=True).clamp(min=1e-12))
    u = torch.cat(units).nan_to_num()  # (N, P)
    d = -torch.cat([update[k].flatten() for k in parameters["here"]]).nan_to_num()  # (P,)
    gram = (u @ u.T).double() + ridge * torch.eye(len(u), dtype=torch.float64)
    scores: Tensor = torch.linalg.solve(gram, (u @ d).double())
    return scores


def _judge_canaries(report: AttackReport, result: CanaryAttack) -> None:
    if not report.sound:
        return  # there is no guarantee to refute
    if result.lower_bound > report.epsilon or result.rejects_claim:
        report.problems.append(
            f"canaries: {result.correct} of {result.guesses} guesses about who was in were right, "
            f"more than epsilon {report.epsilon:.4f} allows (95%)"
        )
