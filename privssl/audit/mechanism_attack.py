"""Attack private steps alone, without training, by canaries that share no coordinate.

Canary i has a gradient only along coordinate i of every protected network, so each coordinate is an
independent experiment: the canary is included with probability 1/2, and the attacker sees its
coordinate of every release. The likelihood ratio (Neyman, Pearson) bounds epsilon from below
(Clopper, Pearson), and releases must follow the distributions that the accounting assumes. It runs
the training code, ``dp_sgd.PrivateTraining``, with the run's plan, a new object for each visit.

* Trials without a canary cost little and bound the rare false positives, so there are many more.
* Some steps run without noise: they give the largest contribution of a row, and the sampled rows.
* Whole visits by ``local_dp_sgd.train_rows_privately`` test views, momentum and averages, an agent
  without rows, and noise shared between visits.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from accounting.budget import Unit
from accounting.mechanism_tests import (
    batch_size_p,
    inclusion_p,
    log_likelihood_ratio,
    noise_scale_p,
    repeats_p,
    sample_rate_p,
)
from accounting.two_sample_audit import two_sample_bound_from_scores
from privssl.core.agents import LabelledRows
from privssl.core.task import Context
from privssl.privacy.dp_sgd import PrivateTraining
from privssl.privacy.local_dp_sgd import train_rows_privately
from privssl.privacy.per_example_gradients import Parameters
from privssl.privacy.plan import PrivatePlan
from privssl.privacy.secure_noise import secure_uniform

MEMBERS, OTHERS = 240_000, 12_000_000  # trials with and without the canary, at most
MEMBER_STEPS, OTHER_STEPS = 24_000_000, 1_200_000_000  # trials x steps, at most: about 80 seconds
#: Side of the square of coordinates of a repetition, and the share of included canaries.
WITH_MEMBERS, WITH_OTHERS = (64, 1 / 2), (512, 1 / 2048)

#: Limits of the attacks. Printed with every report, and in docs/privacy.md.
CANNOT_SEE = (
    "what another computer did, or this one in the past: the code installed here is attacked",
    "faults that only some rows cause, because no row of the run is used",
    "one person's row at two agents, rows that are read before they are charged, and settings "
    "that were chosen by looking at rows",
    "visits or runs that were charged nothing or too little: the ledger and the folder show them",
    "a clip norm that depends on the rows, if canaries of one length and their noise look as "
    "planned",
    "what is released beside the noisy sums or added after the noise: another field of a "
    "message, a buffer, a log, a file, the time of a step",
    "small leaks in what the networks of a synthetic agent send: large ones are seen",
    "losses, networks and views of the run that mix rows: in private steps the canaries have a "
    "loss of their own",
    "batched agents, worker processes, sites, GPUs, other numbers of threads, and kernels for "
    "other processors",
    "low bits: noise with gaps, and sums that round differently if there is one row more",
    "noise that a seed repeats after a restart, in a fork or in another run",
    "small faults: noise within 1% of its deviation, rows drawn within 1% of the rate, batch sizes "
    "whose variance is within 30%",
    "faults that show in fewer than one in a million releases, and leaks below the claim",
)

_CHOOSING = 1 / 4  # share of the trials that choose the threshold
_TOO_LONG = 2.0  # norm of a canary's gradient in clip norms, so that clipping is tested
_ROWS_AT_ONCE = 4096
_MOST_TESTED = 2_000_000  # releases whose distribution is tested, of each kind
_MOST_COMPARED = 1000  # steps whose noise is compared, all pairs
_STEPS_WITHOUT_NOISE = 400
_VISITS, _LONGEST_VISIT = 24, 50  # whole visits, and their steps at most

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class MechanismAttack:
    """The lower bound from releases of private steps, and tests of their distribution.

    ``p_values`` are of the tests that ``canary_attack.SAYS`` lists. ``sensitivity``: the largest
    contribution of one canary to one step, in clip norms: 1 at most.
    """

    steps: int
    members: int
    others: int
    lower_bound: float
    ceiling: float
    sensitivity: float
    p_values: Mapping[str, float]

    @property
    def trials_run(self) -> str:
        """Describe the trials for a report."""
        return f"{self.members} canaries in, {self.others} out, {self.steps} private steps"


def attack_mechanism(
    plan: PrivatePlan, steps: int, delta: float, confidence: float, *, counts_public: bool = True,
    unit: Unit = "record",
) -> MechanismAttack:  # fmt: skip
    """Attack ``steps`` private steps of a plan, about the same rows; epsilon is at ``delta``.

    With the unit person the sensitivity is that of a person with two rows.
    """
    samples = _ReleaseSamples(plan, steps)
    targets = (
        max(2, min(MEMBERS, MEMBER_STEPS // steps)), max(2, min(OTHERS, OTHER_STEPS // steps)),
    )  # fmt: skip
    while samples.trials[1] < targets[0]:
        samples.add(*WITH_MEMBERS)
    while samples.trials[0] < targets[1]:
        samples.add(*WITH_OTHERS)
    bound = two_sample_bound_from_scores(
        np.concatenate(samples.scores[1]), np.concatenate(samples.scores[0]), delta, confidence,
        choosing=_CHOOSING,
    )  # fmt: skip
    sampled, contribution = _measure_without_noise(plan)
    sizes, rate = sampled.sum(axis=1), plan.sample_rate
    p_values = {
        "noise": noise_scale_p(np.concatenate(samples.tested[0]) / plan.noise_multiplier),
        "included rows": inclusion_p(
            np.concatenate(samples.tested[1]),
            noise_multiplier=plan.noise_multiplier,
            sample_rate=rate,
        ),
        "batches": sample_rate_p(hits=int(sizes.sum()), trials=sampled.size, rate=rate),
    }
    if rate < 1:
        p_values["batch sizes"] = batch_size_p(sizes, rows=sampled.shape[1], rate=rate)
    if steps > 1:
        p_values["repeated noise"] = repeats_p(np.stack(samples.noise, axis=1))
    return MechanismAttack(
        steps=steps, members=samples.trials[1], others=samples.trials[0],
        lower_bound=bound.lower_bound, ceiling=bound.ceiling,
        sensitivity=max(contribution, _measure_view_sensitivity(plan, counts_public, unit)),
        p_values=p_values | _test_visits(plan, counts_public),
    )  # fmt: skip


class _ReleaseSamples:
    """Releases of many repetitions; [0]: of excluded canaries, [1]: of included ones."""

    def __init__(self, plan: PrivatePlan, steps: int) -> None:
        self._plan, self._steps = plan, steps
        self.trials = [0, 0]
        self.scores: tuple[list[Floats], list[Floats]] = [], []
        self.tested: tuple[list[Floats], list[Floats]] = [], []
        self.noise: list[Floats] = []  # of each step of the first repetition

    def add(self, side: int, share: float) -> None:
        """Add one repetition."""
        plan, included = self._plan, secure_uniform(side * side) < share
        noise_limit = 0 if self.noise else _MOST_COMPARED
        remaining = _MOST_TESTED
        score = np.zeros(len(included))
        for y in _release_steps(plan, self._steps, included, side):
            score += log_likelihood_ratio(
                y[:, None], noise_multiplier=plan.noise_multiplier, sample_rate=plan.sample_rate
            )
            if remaining > 0 and sum(map(len, self.tested[0])) < 2 * _MOST_TESTED:
                for member in (0, 1):
                    self.tested[member].append(y[included == member])
                remaining -= len(y)  # so that both kinds of repetitions occur
            if len(self.noise) < noise_limit:
                self.noise.append(y[~included])
        for member in (0, 1):
            self.scores[member].append(score[included == member])
            self.trials[member] += len(self.scores[member][-1])


class _CoordinateNetwork(nn.Module):
    """A network of one square of numbers: the release is the noisy sum itself."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(side, side))


class _OrthogonalCanaries:
    """Rows with orthogonal gradients.

    Canary i has a gradient along coordinate i alone, the same in every protected network and too
    long, so that joint clipping must shorten it. Observed is their mean direction. It is a product
    of two factors, like a linear layer's gradients, which is cheap for many rows.
    """

    def __init__(self, plan: PrivatePlan, side: int) -> None:
        self.networks = {name: _CoordinateNetwork(side) for name in plan.protect}
        self._each = 1 / math.sqrt(len(self.networks))
        self._unit = plan.learning_rate * plan.clip_norm / plan.expected_batch
        self._ends = math.sqrt(_TOO_LONG * plan.clip_norm * self._each) * torch.eye(side)

    def factors(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of canaries by number (B,): (B, side) twice."""
        side = len(self._ends)
        return self._ends[indices // side], self._ends[indices % side]

    @staticmethod
    def row_loss(parameters: Parameters, fields: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of one row, or the sum over all its views."""
        left, right = fields["left"], fields["right"]
        losses = [functional.linear(right, net["weight"]) * left for net in parameters.values()]
        return torch.stack(losses).sum()

    def reset(self) -> None:
        with torch.no_grad():
            for network in self.networks.values():
                network.weight.zero_()

    def released(self) -> Floats:
        """Return how far the weights have moved since, in clip norms (coordinates,)."""
        weights = [net.weight.detach().double().numpy() for net in self.networks.values()]
        return np.asarray(-np.sum(weights, axis=0).ravel() * (self._each / self._unit))


def _release_steps(plan: PrivatePlan, steps: int, included: Bools, side: int) -> Iterator[Floats]:
    """Yield each step's release about each canary, in clip norms (canaries,)."""
    one_step = dataclasses.replace(plan, steps=1, momentum=0.0, average_last=0.0, learning_rate=1.0)
    canaries, indices = (
        _OrthogonalCanaries(one_step, side),
        torch.from_numpy(np.flatnonzero(included)),
    )

    def fields_of(batch: Tensor, step: int) -> Mapping[str, Tensor]:
        return dict(zip(("left", "right"), canaries.factors(indices[batch]), strict=True))

    for step in range(steps):
        if step % plan.steps == 0:  # as in a run: one object per visit
            training = PrivateTraining(one_step, canaries.networks)
        canaries.reset()
        training.run(len(indices), fields_of, canaries.row_loss, max_microbatch_size=_ROWS_AT_ONCE)
        yield canaries.released()


def _measure_without_noise(plan: PrivatePlan) -> tuple[Bools, float]:
    """Return rows sampled in each step (steps, rows), and the largest contribution of a row."""
    side, share = WITH_MEMBERS
    included = secure_uniform(side * side) < share
    noiseless = dataclasses.replace(plan, noise_multiplier=0.0)
    sampled, largest = [], 0.0
    for y in _release_steps(noiseless, _STEPS_WITHOUT_NOISE, included, side):
        sampled.append(y[included] != 0)
        largest = max(largest, float(np.abs(y).max()))
    return np.stack(sampled), largest


def _release_visits(
    plan: PrivatePlan, visits: int, indices: Tensor, side: int, counts_public: bool,
    unit: Unit = "record",
) -> Iterator[Floats]:  # fmt: skip
    """Yield the release of each of several visits about each coordinate, (coordinates,).

    ``indices``: canaries that are rows of the agent, equal ones of one person; in every second
    visit the agent has no rows.
    """
    canaries = _OrthogonalCanaries(plan, side)
    x = torch.cat(canaries.factors(indices), dim=1)[:, None, None]  # (rows, 1, 1, 2 side)
    persons = tuple(map(str, indices.tolist())) if unit == "person" else None
    y = torch.zeros(len(indices), dtype=torch.int64)
    rows = LabelledRows(x, y, indices, persons=persons)
    no_rows = LabelledRows(x[:0], y[:0], indices[:0], persons=persons and ())

    def draw(x: Tensor, y: Tensor, ctx: Context) -> Mapping[str, Tensor]:
        return {"left": x[:, 0, 0, :side], "right": x[:, 0, 0, side:]}

    for visit in range(visits):
        canaries.reset()
        ctx = Context(0, visit, "s0", f"{visit}", "attempt", torch.device("cpu"), telemetry=False)
        train_rows_privately(
            plan, canaries.networks, no_rows if visit % 2 else rows, ctx, draw, canaries.row_loss,
            counts_public=counts_public,
        )  # fmt: skip
        yield canaries.released()


def _measure_view_sensitivity(plan: PrivatePlan, counts_public: bool, unit: Unit) -> float:
    """Return the largest contribution of a row with all its views, or of a person with two rows, in
    clip norms: views are clipped jointly."""
    views = dataclasses.replace(
        plan, views=max(2, plan.views), steps=1, momentum=0.0, average_last=0.0, sample_rate=1.0,
        noise_multiplier=0.0,
    )  # fmt: skip
    side, _ = WITH_MEMBERS
    indices = torch.arange(side).repeat_interleave(2 if unit == "person" else 1)
    release = next(_release_visits(views, 1, indices, side, counts_public, unit))
    return float(np.abs(release).max())


def _test_visits(plan: PrivatePlan, counts_public: bool) -> dict[str, float]:
    """Test the releases of whole visits; return p-values by name."""
    plan = dataclasses.replace(plan, steps=min(plan.steps, _LONGEST_VISIT))
    side, _ = WITH_MEMBERS
    indices = torch.from_numpy(np.flatnonzero(secure_uniform(side * side) < 1 / side))
    releases = np.stack(list(_release_visits(plan, _VISITS, indices, side, counts_public)), axis=1)
    weights = _compute_step_weights(plan)
    length, rate = float(np.sqrt(np.square(weights).sum())), plan.sample_rate
    excluded = np.ones(len(releases), dtype=np.bool_)
    excluded[indices.numpy()] = False
    noise = releases[excluded] / (length * plan.noise_multiplier)
    # Scaled to the mean and variance of one step, which the test expects.
    included = rate + (releases[indices.numpy(), ::2] - rate * weights.sum()) / length
    return {
        "noise of visits": noise_scale_p(noise),
        "repeated noise of visits": repeats_p(noise),
        "rows of visits": inclusion_p(
            included, noise_multiplier=plan.noise_multiplier, sample_rate=rate
        ) if len(indices) else 1.0,
    }  # fmt: skip


def _compute_step_weights(plan: PrivatePlan) -> Floats:
    """Return the effect of each step's noisy sum on the release of a visit (steps,), at learning
    rate 1.

    Momentum is v = m v + g, and the release is the mean of the last iterates.
    """
    effect = np.cumsum(float(plan.momentum) ** np.arange(plan.steps))  # after so many more steps
    averaged = max(1, round(plan.average_last * plan.steps))
    last = np.arange(plan.steps - averaged, plan.steps)[:, None]
    lag = last - np.arange(plan.steps)  # (averaged, steps)
    return np.asarray(np.where(lag >= 0, effect[np.maximum(lag, 0)], 0.0).mean(axis=0))
