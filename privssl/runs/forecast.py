"""Forecast of a run's seconds, bytes and disk (``--dry-run``).

A few rounds run in which one agent of each kind works. The other agents' replies are copies of its
reply, so the server does all its work, and messages have their true shapes. A long visit is timed
on a part of its rows or steps and extrapolated. An agent with an account is replaced by one with
synthetic rows and an account in a temporary folder: labelled rows are not read, and nothing is
charged.
"""

import dataclasses
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accounting.ledger import Account
from privssl.algorithms.local_ssl import ClassifierTraining
from privssl.core.agents import Agent, LabelledRows, UnlabelledRows
from privssl.core.engine import Call
from privssl.core.federation import Federation, Round
from privssl.core.messages import Reply
from privssl.engines.local import LocalEngine
from privssl.engines.process_pool import resolve_worker_count
from privssl.experiment.prepare import Prepared
from privssl.privacy.plan import PrivatePlan
from privssl.runs.round_plan import planned_rounds
from privssl.training.evaluation import Evaluator

SECONDS = 15.0  # approximate time limit
SHARE = 0.15  # of the remaining time, for one visit
LEAST = 0.2  # seconds that every visit may take
FEW_ROWS, FEW_STEPS = 128, 2  # of a first attempt
TESTED = 512  # test rows of an evaluation
WARM = 1.0  # seconds above which a first attempt is not repeated
SNAPSHOTS = 3  # two are kept while the next is written


@dataclass(frozen=True)
class Visit:
    """The time of one step of one agent."""

    role: str
    step: str
    agent: str
    seconds: float  # of the whole visit
    unit: str  # the unit of work: rows, steps or private steps
    timed: int  # number of units
    whole: int
    made_up: bool  # whether its labelled rows are synthetic


@dataclass(frozen=True)
class Forecast:
    """Estimates; bytes are exact if the size of messages does not depend on rows."""

    visits: tuple[Visit, ...]
    rounds: int
    workers: int
    round_seconds: float  # of a typical round
    evaluation_seconds: float  # of one evaluation
    total_seconds: float
    round_bytes: tuple[int, int]  # of a typical round: up, down
    total_bytes: tuple[int, int]
    snapshot_bytes: int

    @property
    def disk_bytes(self) -> int:
        """Return the largest size of checkpoints, without the one that ``best`` names."""
        return SNAPSHOTS * self.snapshot_bytes


def forecast(prepared: Prepared) -> Forecast:
    """Time one visit of each kind, without changing files or accounts.

    Raises privssl.errors.UserError, accounting.errors.AccountingError or OSError if it cannot be
    timed.
    """
    with tempfile.TemporaryDirectory(prefix="privssl-") as folder:
        engine = _SamplingEngine(prepared, Path(folder))
        return _measure_rounds(prepared, engine)


def sampled_rounds(algorithm: Any) -> Iterator[tuple[Round, int]]:
    """Yield representative rounds, with the number of rounds that each represents.

    A round is like the previous one unless a warm-up or a plan's visits end between them. The first
    and the last of a phase may differ, and represent only themselves.
    """
    rounds = planned_rounds(algorithm.phases())
    phase_starts = [planned.number for planned in rounds if planned.number_in_phase == 1]
    boundaries = {start + offset for start in phase_starts for offset in (-1, 0, 1)} | {len(rounds)}
    boundaries.add(getattr(algorithm.cfg, "warm_up", 0) + 1)
    if algorithm.plan is not None:
        boundaries.add(algorithm.plan.visits + 1)
    first_rounds = sorted(begin for begin in boundaries if 1 <= begin <= len(rounds))
    for begin, end in zip(first_rounds, [*first_rounds[1:], len(rounds) + 1], strict=True):
        yield rounds[begin - 1], end - begin


def _measure_rounds(prepared: Prepared, engine: "_SamplingEngine") -> Forecast:
    algorithm, run = prepared.algorithm, prepared.config.run
    federation = Federation(engine, run.seed)
    state = algorithm.start(federation)
    visits: dict[tuple[str, str], Visit] = {}
    seconds, up, down, most = 0.0, 0, 0, 0
    typical, typical_bytes = 0.0, (0, 0)
    for current, repeats in sampled_rounds(algorithm):
        federation.begin(current)
        engine.begin_round()
        start = time.perf_counter()
        state = algorithm.round(state, federation)
        elapsed = time.perf_counter() - start - engine.spent + engine.estimated
        visits |= engine.visits
        traffic = federation.traffic
        seconds += repeats * elapsed
        up, down = up + repeats * traffic.up, down + repeats * traffic.down
        if repeats > most:
            most, typical, typical_bytes = repeats, elapsed, (traffic.up, traffic.down)
    rounds = len(planned_rounds(algorithm.phases()))
    evaluation_seconds = _measure_evaluation(prepared, state)
    evaluations = -(-rounds // run.evaluate_every)
    return Forecast(
        tuple(visits.values()), rounds, engine.workers, typical, evaluation_seconds,
        seconds + evaluations * evaluation_seconds, typical_bytes, (up, down),
        _count_bytes(vars(state)) + engine.memory_bytes(),
    )  # fmt: skip


class _SamplingEngine(LocalEngine):
    """Lets one agent of each kind work in each round, and repeats its reply for the others."""

    def __init__(self, prepared: Prepared, folder: Path) -> None:
        agents = prepared.federated_data.agents
        super().__init__(agents, seed=prepared.config.run.seed, device=prepared.device)
        self._prepared, self._folder = prepared, folder
        self.workers = resolve_worker_count(prepared.config.run.workers, agents, prepared.device)
        if prepared.config.run.batched_agents > 1:
            self.workers = 1
        self._roles: dict[str, list[Agent]] = {}
        for agent in agents:
            self._roles.setdefault(agent.role, []).append(agent)
        under_account = prepared.account_plans.keys()
        self._chosen = {
            role: _choose_typical(group, under_account) for role, group in self._roles.items()
        }
        self._memories: dict[str, Any] = {role: {} for role in self._roles}
        # Number of rows of each kind's working agent in all rounds: its memory may be about them.
        self._rows: dict[str, int] = {}
        self._deadline = time.perf_counter() + SECONDS
        self.begin_round()

    def begin_round(self) -> None:
        """Drop the visits of the previous round; each kind works once in every round."""
        self.spent = self.estimated = 0.0
        self.visits: dict[tuple[str, str], Visit] = {}
        self._replies: dict[tuple[str, str], Reply[Any]] = {}

    def memory_bytes(self) -> int:
        """Return the bytes of all agents' memories, if each is as large as that of its kind."""
        return sum(
            len(agents) * _count_bytes(self._memories[role]) for role, agents in self._roles.items()
        )

    def _run_calls(self, calls: Sequence[Call]) -> Iterator[Reply[Any]]:
        serial = parallel = longest = 0.0
        for call in calls:
            kind = call.to.role, call.step.__name__
            if kind not in self._replies:
                start = time.perf_counter()
                self._replies[kind], self.visits[kind] = self._time_visit(call)
                self.spent += time.perf_counter() - start
            seconds = self.visits[kind].seconds
            if self.workers == 1 or call.to.id in self._prepared.account_plans:
                serial += seconds
            else:
                parallel, longest = parallel + seconds, max(longest, seconds)
            yield dataclasses.replace(self._replies[kind], sender=call.to)
        self.estimated += max(serial, longest, (serial + parallel) / self.workers)

    def _time_visit(self, call: Call) -> tuple[Reply[Any], Visit]:
        """Return the reply of a visit, maybe of a part of it, and the time of the whole visit."""
        agent = self._chosen[call.to.role]
        made_up = agent.id in self._prepared.account_plans
        unit, units = self._count_work(agent)
        memory = self._memories[call.to.role]
        if unit == "rows" and (made_up or call.to.role in self._rows):
            probed = timed = units if made_up else self._rows[call.to.role]
        else:
            probed = timed = min(units, FEW_ROWS if unit == "rows" else FEW_STEPS)
        reply, seconds = self._run_visit(call, agent, unit, probed)
        if seconds < WARM:  # the first visit also fills caches
            self._memories[call.to.role] = memory
            reply, seconds = self._run_visit(call, agent, unit, probed)
        rate = seconds / probed if probed else 0.0
        if unit != "rows" or call.to.role not in self._rows:
            time_limit = max(LEAST, SHARE * (self._deadline - time.perf_counter()))
            timed = min(units, max(2 * probed, int(probed * time_limit / seconds)))
            if timed > probed:
                self._memories[call.to.role] = memory
                reply, timed_seconds = self._run_visit(call, agent, unit, timed)
                if unit != "rows":
                    rate = max(0.0, (timed_seconds - seconds) / (timed - probed))
                else:
                    rate = timed_seconds / timed
                seconds = timed_seconds
        if unit == "rows":
            self._rows.setdefault(call.to.role, timed)
        seconds += rate * (units - timed)
        names = call.to.role, call.step.__name__, agent.id
        return reply, Visit(*names, seconds, unit, timed, units, made_up)

    def _count_work(self, agent: Agent) -> tuple[str, int]:
        """Return the unit by which a visit can be shortened, and the number of units."""
        plan, cfg = self._prepared.plan, self._prepared.algorithm.cfg
        if agent.id in self._prepared.account_plans:
            if isinstance(plan, PrivatePlan):
                return "private steps", plan.steps
            return "rows", _count_rows(agent)
        if isinstance(cfg, ClassifierTraining):
            return "steps", cfg.local_steps
        if hasattr(cfg, "local_steps"):  # it uses only some steps: not shortened
            return "visit", 1
        return "rows", _count_rows(agent)

    def _run_visit(
        self, call: Call, agent: Agent, unit: str, units: int
    ) -> tuple[Reply[Any], float]:
        """Run one visit with a part of its work, by a copy of the agent; keep its memory."""
        algorithm = self._prepared.algorithm
        cfg, plan = algorithm.cfg, algorithm.plan
        if unit == "private steps":
            plan = dataclasses.replace(plan, steps=units)
        elif unit == "steps":
            cfg = dataclasses.replace(cfg, local_steps=units)
        short = algorithm
        if (cfg, plan) != (algorithm.cfg, algorithm.plan):
            short = type(algorithm)(cfg, algorithm.task, plan)
        copy = self._copy_agent(agent, units if unit == "rows" else _count_rows(agent))
        copy.memory = self._memories[call.to.role]
        if agent.id in self._prepared.account_plans:
            copy.account = self._open_account(copy, plan)
        self._agents[agent.id] = copy
        own_call = dataclasses.replace(call, to=agent.ref, step=getattr(short, call.step.__name__))
        start = time.perf_counter()
        try:
            reply = self._run_call(own_call)
            return reply, time.perf_counter() - start
        finally:
            self._memories[call.to.role] = copy.memory
            if copy.account is not None:
                copy.account.close()

    def _copy_agent(self, agent: Agent, limit: int) -> Agent:
        """Copy an agent with at most this many rows of each kind, and synthetic ones under an
        account."""
        labelled, unlabelled = agent.held_labelled, agent.held_unlabelled
        if labelled is not None and agent.id in self._prepared.account_plans:
            labelled = self._draw_synthetic_rows()
        elif labelled is not None:
            labelled = LabelledRows(labelled.x[:limit], labelled.y[:limit], labelled.ids[:limit])
        if unlabelled is not None:
            unlabelled = UnlabelledRows(unlabelled.x[:limit], unlabelled.ids[:limit])
        return Agent(
            id=agent.id, location=agent.location, held_labelled=labelled, held_unlabelled=unlabelled
        )

    def _draw_synthetic_rows(self) -> LabelledRows:
        """Return random rows, as many as an agent has by the config."""
        dataset = self._prepared.federated_data.dataset
        count = self._prepared.config.data.labelled // len(self._prepared.account_plans)
        rng = torch.Generator().manual_seed(0)
        x = torch.rand(count, *dataset.shape, generator=rng)
        x = x if dataset.x_test.is_floating_point() else x.mul(255).to(dataset.x_test.dtype)
        y = torch.randint(dataset.classes, (count,), generator=rng)
        privacy = self._prepared.config.privacy
        is_person = privacy is not None and privacy.unit == "person"
        persons = tuple(map(str, range(count))) if is_person else None
        return LabelledRows(x, y, torch.arange(count), persons=persons)

    def _open_account(self, agent: Agent, plan: Any) -> Account:
        """Open a separate account for one visit, in a folder that is removed at the end."""
        own_plan = self._prepared.account_plans[agent.id]
        ledger_plan = dataclasses.replace(own_plan, event=plan.event)
        path = Path(tempfile.mkdtemp(dir=self._folder)) / f"{agent.id}.jsonl"
        return Account.open(path, ledger_plan, resume=False)


def _choose_typical(agents: Sequence[Agent], under_account: Collection[str]) -> Agent:
    """Return the agent with the median number of rows.

    Under accounts, where that number may be private, the middle one by order.
    """

    def count_rows(agent: Agent) -> int:
        return 0 if agent.id in under_account else _count_rows(agent)

    return sorted(agents, key=count_rows)[len(agents) // 2]


def _count_rows(agent: Agent) -> int:
    holdings = (agent.held_labelled, agent.held_unlabelled)
    return max((len(rows) for rows in holdings if rows is not None), default=0)


def _measure_evaluation(prepared: Prepared, state: Any) -> float:
    """Return the seconds of one evaluation, from a part of the test rows."""
    algorithm, data = prepared.algorithm, prepared.federated_data
    x, y = data.dataset.x_test[:TESTED], data.dataset.y_test[:TESTED]
    weights = [algorithm.classifier(state), *algorithm.also_evaluated(state).values()]
    evaluator = Evaluator(algorithm.task.new_classifier(), {"test": (x, y)}, prepared.device)
    seconds = 0.0
    for _ in range(2):  # the first one also fills caches
        start = time.perf_counter()
        evaluator.accuracies({"": dict(weights[0])})
        seconds = time.perf_counter() - start
    row_count = len(data.dataset.y_test) + (0 if data.validation is None else len(data.validation))
    return seconds * len(weights) * row_count / len(y)


def _count_bytes(value: Any) -> int:
    """Return the bytes of the tensors in a tree, each counted as often as it is stored."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(map(_count_bytes, value.values()))
    return sum(map(_count_bytes, value)) if isinstance(value, tuple | list) else 0
