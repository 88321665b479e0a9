"""FedAvg under DP-SGD: what docs/privacy.md promises, with agents in sequence and batched.

The mechanism is tested in test_dp_sgd.py, and per-example gradients of several agents in
test_per_example_gradients.py. Tests here check what an agent is charged and sends, that batched
agents reach the weights they reach alone, and that each has its own noise, batches, rows and
budget.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import privssl.train as train
from accounting.ledger import read_journal
from privssl.algorithms.baselines.supervised import FedAvg, ProximalRequest
from privssl.algorithms.local_ssl import ModelUpdate
from privssl.audit import __main__ as audit
from privssl.core.agents import LabelledRows
from privssl.core.engine import Call
from privssl.core.federation import Federation, Round
from privssl.core.messages import Declined, Reply, StateDict
from privssl.engines import batched
from privssl.engines.batched import BatchedEngine
from privssl.engines.local import LocalEngine
from privssl.errors import ConfigError, PrivacyError
from privssl.experiment import config
from privssl.experiment.config import Config
from privssl.experiment.prepare import Prepared, prepare
from privssl.models import build_classifier
from privssl.privacy import batched_dp_sgd, noisy_optimizer, per_example_gradients, secure_noise
from privssl.privacy.dp_sgd import ClippedSum, NoisyOptimizerStep
from privssl.privacy.plan import PrivatePlan
from privssl.settings.schema import ModelSettings
from privssl.training import optim
from privssl.training.batched.deferred import ExampleLoss
from privssl.training.batched.stacking import JointSteps, Stackable
from tests.support.private_fedssl import (
    Sealed,
    accounts,
    carry_out,
    context,
    epsilon_of_full_batches,
)
from tests.support.private_visit import (
    as_floats,
    header,
    tensor_names,
    with_row,
    without_row,
)
from tests.support.toy_worlds import apart, same_bits, without_noise

TINY = """
run: {seed: 0, evaluate_every: 1000, images_every: 1000, checkpoint_every: 1, device: cpu}
data: {name: toy, labelled: 25, unlabelled: 30}
agents: {support: 3, query: 1}
model: {name: small_cnn, width: 4}
algorithm: {name: fedavg, rounds: 3}
"""
PRIVATE = TINY + "privacy: {epsilon: 50.0, noise_multiplier: 4.0, sample_rate: 0.5, steps: 3}\n"
BOTH = pytest.mark.parametrize("at_once", [1, 8])


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., Config]:
    def load(*overrides: str, text: str = PRIVATE) -> Config:
        path = tmp_path / "tiny.yaml"
        path.write_text(text)
        return config.load_config(path, overrides)

    return load


def make_request(prepared: Prepared) -> ProximalRequest:
    F = prepared.algorithm.networks()["F"]
    return ProximalRequest({k: v.clone() for k, v in F.state_dict().items()})


def visit(prepared: Prepared, agent: Any, came: ProximalRequest) -> ModelUpdate | Declined:
    assert isinstance(prepared.algorithm, FedAvg)
    return prepared.algorithm.labelled_pass(agent, came, context(agent.id))


def engine_of(prepared: Prepared, at_once: int) -> LocalEngine:
    agents = prepared.federated_data.agents
    common: dict[str, Any] = {"seed": 0, "device": torch.device("cpu")}
    if at_once == 1:
        return LocalEngine(agents, **common)
    return BatchedEngine(agents, algorithm=prepared.algorithm, at_once=at_once, **common)


def collect_replies(
    prepared: Prepared, folder: Path, at_once: int, rounds: int = 2
) -> list[Reply[Any]]:
    """All replies of the first rounds, in order, and the final weights."""
    folder.mkdir()
    found: list[Reply[Any]] = []
    with accounts(prepared, folder):
        engine = engine_of(prepared, at_once)
        deliver = engine.deliver

        def recording(calls: Sequence[Call]) -> list[Reply[Any]]:
            replies = list(deliver(calls))
            found.extend(replies)
            return replies

        engine.deliver = recording  # type: ignore[method-assign]
        federation = Federation(engine, 0)
        state = prepared.algorithm.start(federation)
        for number in range(1, rounds + 1):
            federation.begin(Round(number, "train", number))
            state = prepared.algorithm.round(state, federation)
    return [*found, Reply(found[0].sender, ModelUpdate(state.F))]


# Budgets ----------------------------------------------------------------------------------------


@BOTH
def test_a_budget_for_three_visits_pays_for_exactly_three_visits_of_each_agent(
    at_once: int, configured: Callable[..., Config], tmp_path: Path
) -> None:
    three, four = (epsilon_of_full_batches(visits, 4.0, 1e-5) for visits in (3, 4))
    settings = ("privacy.sample_rate=1.0", "privacy.steps=1", "algorithm.rounds=6")
    chosen = configured(*settings, f"privacy.epsilon={(three + four) / 2}",
                        f"run.batched_agents={at_once}")  # fmt: skip
    results = carry_out(prepare(chosen), tmp_path / "run")
    assert (results["status"], results["rounds"]) == ("budget_exhausted", 6)
    for name in ("s0", "s1", "s2"):
        journal = read_journal(tmp_path / f"run/ledger/{name}.jsonl")
        assert len(journal.visits) == 3 and not journal.problems
    # Six visits were planned, so the claim is the budget.
    assert results["privacy"]["guarantee"]["epsilon"] == (three + four) / 2
    found = audit.audit(tmp_path / "run")  # INCONCLUSIVE, because there is no config.yaml
    assert found.verdict == audit.Verdict.INCONCLUSIVE and not found.problems


def sealed(prepared: Prepared) -> Prepared:
    for agent in prepared.labelled_agents:
        rows = agent.labelled
        agent.held_labelled = Sealed(rows.x, rows.y, rows.ids)
    return prepared


@BOTH
def test_with_a_budget_of_zero_no_labelled_row_is_read(
    at_once: int, configured: Callable[..., Config], tmp_path: Path
) -> None:
    chosen = configured("privacy.epsilon=0.0", f"run.batched_agents={at_once}")
    results = carry_out(sealed(prepare(chosen)), tmp_path / "run")
    assert (results["status"], results["rounds"]) == ("finished", 3)
    assert results["privacy"]["guarantee"]["epsilon"] == 0


@BOTH
def test_every_visit_is_charged_before_its_rows_are_read(
    at_once: int, configured: Callable[..., Config], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="a labelled row was read"):  # by the first agent
        collect_replies(sealed(prepare(configured())), tmp_path / "ledger", at_once)
    assert len(read_journal(tmp_path / "ledger/s0.jsonl").visits) == 1
    for name in ("s1", "s2"):  # these never began
        assert not read_journal(tmp_path / f"ledger/{name}.jsonl").visits


@BOTH
def test_a_declined_visit_reads_nothing_and_the_other_agents_continue(
    at_once: int, configured: Callable[..., Config], tmp_path: Path
) -> None:
    three = epsilon_of_full_batches(3, 4.0, 1e-5)
    prepared = prepare(configured(
        "privacy.sample_rate=1.0", "privacy.steps=1", f"privacy.epsilon={three * 1.001}"
    ))  # fmt: skip
    with accounts(prepared, tmp_path) as agents:
        poor = agents["s1"]
        assert poor.account is not None and prepared.plan is not None
        for number in range(3):
            with poor.account.spend(prepared.plan.event, f"elsewhere {number}"):
                pass
        rows = poor.labelled
        poor.held_labelled = Sealed(rows.x, rows.y, rows.ids)
        step = prepared.algorithm.labelled_pass  # type: ignore[attr-defined]
        calls = [Call(agents[n].ref, step, make_request(prepared), 1) for n in ("s0", "s1", "s2")]
        replies = list(engine_of(prepared, at_once).deliver(calls))
    assert [reply.declined for reply in replies] == [False, True, False]
    assert replies[1].content == Declined("privacy budget is spent")


# What leaves an agent -----------------------------------------------------------------------------


@BOTH
def test_a_visit_sends_the_parameters_of_the_classifier_with_weight_one_and_no_metrics(
    at_once: int, configured: Callable[..., Config], tmp_path: Path
) -> None:
    prepared = prepare(configured())
    for reply in collect_replies(prepared, tmp_path / "ledger", at_once)[:-1]:
        assert (reply.weight, dict(reply.metrics)) == (1.0, {})
        named = prepared.algorithm.networks()["F"].named_parameters()
        assert tensor_names(reply.payload) == {f"F/{name}" for name, _ in named}
        assert "fields" in header(reply.payload)["__metadata__"]


CLIP = 0.5
#: One step on all rows that moves the weights by a thousand times its sum.
ONE_STEP = (
    *("privacy.sample_rate=1.0", "privacy.steps=1", "privacy.learning_rate=1000.0"),
    *(f"privacy.clip_norm={CLIP}", "privacy.augment=mid", "privacy.views=2"),
)


def sums_of_a_visit(
    prepared: Prepared, folder: Path, at_once: int, change: Callable[[LabelledRows], LabelledRows]
) -> list[dict[str, Tensor]]:
    """What all three agents send after s1's rows have been changed."""
    agent = prepared.labelled_agents[1]
    kept, agent.held_labelled = agent.labelled, change(as_floats(agent.labelled))
    try:
        return [dict(r.payload.F) for r in collect_replies(prepared, folder, at_once, rounds=1)[:3]]
    finally:
        agent.held_labelled = kept


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The distance between two neighbours' sums, in clipping norms."""
    gap = torch.cat([(one[key].double() - other[key].double()).flatten() for key in one])
    return float(gap.norm()) / 1000 * (25 / 3) / CLIP  # learning rate, public divisor


@BOTH
@pytest.mark.parametrize("value", [0.3, 1e15])
def test_nulling_a_row_moves_its_agents_sum_by_at_most_the_clip_norm_and_no_other_sum(
    value: float, at_once: int, configured: Callable[..., Config], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    without_noise(monkeypatch)
    prepared = prepare(configured(*ONE_STEP))
    whole = sums_of_a_visit(prepared, tmp_path / "1", at_once, with_row(value))
    nulled = sums_of_a_visit(prepared, tmp_path / "2", at_once, with_row(math.nan))
    assert distance(whole[1], nulled[1]) <= 1 + 1e-4
    if value == 0.3:
        assert distance(whole[1], nulled[1]) > 0.5  # such a row is clipped, so the bound is reached
    assert same_bits(whole[0], nulled[0]) and same_bits(whole[2], nulled[2])


@BOTH
@pytest.mark.parametrize(("counts", "bounded"), [("private", True), ("public", False)])
def test_with_private_counts_removing_a_row_moves_the_sum_by_at_most_the_clip_norm(
    counts: str, bounded: bool, at_once: int, configured: Callable[..., Config], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # The control: with public counts, removing a row changes the draws of the rows after it.
    without_noise(monkeypatch)
    prepared = prepare(configured(*ONE_STEP, f"privacy.record_counts={counts}"))
    whole = sums_of_a_visit(prepared, tmp_path / "1", at_once, lambda rows: rows)
    fewer = sums_of_a_visit(prepared, tmp_path / "2", at_once, without_row)
    assert (distance(whole[1], fewer[1]) <= 1 + 1e-4) == bounded


@BOTH
def test_two_runs_with_one_seed_have_different_noise(
    at_once: int, configured: Callable[..., Config], tmp_path: Path
) -> None:
    prepared = prepare(configured("privacy.sample_rate=1.0"))
    first, again = (
        collect_replies(prepared, tmp_path / str(n), at_once, rounds=1)[0] for n in (1, 2)
    )
    assert not same_bits(first.payload.F, again.payload.F)


@pytest.mark.slow
def test_attacks_on_a_run_find_no_more_than_it_claims(
    configured: Callable[..., Config], tmp_path: Path
) -> None:
    configured()  # writes tiny.yaml
    output = f"run.output={tmp_path / 'run'}"
    assert train.main([str(tmp_path / "tiny.yaml"), "run.batched_agents=3", output]) == 0
    assert audit.main([str(tmp_path / "run"), "--empirical"]) == 0


def test_the_card_names_no_query_pass_because_unlabelled_rows_are_not_read(
    configured: Callable[..., Config], tmp_path: Path
) -> None:
    mixed = ("data.labels=labels-at-client", "agents.support=0", "agents.query=0", "agents.mixed=3")
    results = carry_out(prepare(configured(*mixed)), tmp_path / "run")
    assert results["status"] == "finished"
    card = (tmp_path / "run" / "privacy.md").read_text()
    assert "trained by DP-SGD under the agent's account" in card and "the constant 1" in card
    assert "query pass" not in card


# Configs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("algorithm.learning_rate=0.1", "privacy.learning_rate sets them"),
        ("algorithm.local_epochs=2", "privacy.steps sets them"),
        ("algorithm.weak=none", "privacy.augment sets them"),
        ("privacy.protect=[G]", "fedavg trains F alone"),
        ("privacy.visits=2", "no agent trains after round 2"),
        ("model.norm=batch", "no single row can be clipped"),
        ("run.precision=bfloat16", "clipped and noised in float32"),
    ],
)
def test_a_private_run_refuses_settings_that_are_unsupported_or_without_effect(
    wrong: str, said: str, configured: Callable[..., Config]
) -> None:
    more = ["privacy.update_at_support=[G]"] if wrong == "privacy.protect=[G]" else []
    with pytest.raises(ConfigError, match=said):
        configured(wrong, *more)


def test_the_same_settings_are_accepted_without_privacy(configured: Callable[..., Config]) -> None:
    configured("algorithm.learning_rate=0.1", "model.norm=batch", text=TINY)


def test_a_classifier_that_couples_rows_is_refused_by_layer_name(
    configured: Callable[..., Config],
) -> None:
    prepared = prepare(configured())
    assert isinstance(prepared.algorithm, FedAvg)
    prepared.algorithm._F = build_classifier(ModelSettings(norm="batch"), (1, 8, 8), 10, "float32")
    with pytest.raises(PrivacyError, match="BatchNorm2d"):
        prepared.algorithm.check_private()


# Batched agents -----------------------------------------------------------------------------------

SETTINGS = {
    "plainly": (),
    "views": ("privacy.views=3", "privacy.augment=mid"),
    "momentum, averaged": ("privacy.momentum=0.7", "privacy.average_last=1.0"),
    "every row": ("privacy.sample_rate=1.0", "privacy.clip_norm=0.01"),
    "private counts": ("privacy.record_counts=private", "privacy.augment=weak"),
}


@pytest.fixture
def same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make noise and batches independent of the order of agents, and noise of the memory layout.
    The noise is small, since all weights move in one direction.
    """

    def noise(count: int) -> np.ndarray:
        return np.full(count, 0.1 * np.random.default_rng(count).standard_normal())

    def batch(self: PrivatePlan, rows: int) -> Tensor:
        return torch.arange(rows) % 3 != 1

    monkeypatch.setattr(secure_noise, "secure_normal", noise)
    monkeypatch.setattr(PrivatePlan, "draw_batch", batch)


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many agents' gradients were computed together, each time."""
    sizes: list[int] = []
    real = batched_dp_sgd._sum_batched

    def counted(wanted: Sequence[ClippedSum]) -> Sequence[Any]:
        sizes.append(len(wanted))
        return real(wanted)

    monkeypatch.setattr(batched_dp_sgd, "_sum_batched", counted)
    return sizes


def largest_gap(prepared: Prepared, folder: Path) -> float:
    """The largest difference in all sent tensors and the state, between sequential and batched
    agents.
    """
    alone, together = (collect_replies(prepared, folder / str(n), n) for n in (1, 8))
    pairs = zip(alone, together, strict=True)
    return max(apart(one.payload, other.payload) for one, other in pairs)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("which", SETTINGS)
@pytest.mark.usefixtures("same_noise", "in_float64")
def test_in_float64_batched_agents_end_where_sequential_agents_end_to_eleven_digits(
    which: str, configured: Callable[..., Config], tmp_path: Path, stacks: list[int]
) -> None:
    assert largest_gap(prepare(configured(*SETTINGS[which])), tmp_path) < 1e-11
    # Even if one agent has one row more; with private counts each agent is computed alone.
    assert set(stacks) == (set() if which == "private counts" else {3})


@pytest.mark.parametrize(
    "which",
    [
        pytest.param(n, marks=() if n == "momentum, averaged" else pytest.mark.slow)
        for n in SETTINGS
    ],
)  # float64 resolves eleven digits
@pytest.mark.usefixtures("same_noise")
def test_in_float32_batched_agents_end_where_sequential_agents_end_to_four_digits(
    which: str, configured: Callable[..., Config], tmp_path: Path
) -> None:
    # Small steps and no augmentation: in networks of noise, and between pixels, rounding decides
    # which value is the largest (seen: 6e-3; not in float64).
    plain = [chosen for chosen in SETTINGS[which] if "augment" not in chosen]
    chosen = configured(*plain, "privacy.learning_rate=0.1")
    assert largest_gap(prepare(chosen), tmp_path) < 1e-4


@pytest.mark.ci
@pytest.mark.usefixtures("same_noise", "in_float64")
def test_microbatches_and_stacks_do_not_change_the_result(
    configured: Callable[..., Config], tmp_path: Path, stacks: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("privssl.privacy.local_dp_sgd.choose_max_microbatch_size", lambda *_: 4)
    prepared = prepare(configured())
    numbers = sum(p.numel() for p in prepared.algorithm.networks()["F"].parameters())
    monkeypatch.setattr(batched_dp_sgd, "NUMBERS_AT_ONCE", 4 * 2 * numbers)
    assert largest_gap(prepared, tmp_path) < 1e-11
    assert {1, 2} == set(stacks)


def neighbours_rows(wanted: Sequence[ClippedSum]) -> Sequence[Any]:
    """A fault: each agent gets the sums of the previous one."""
    found = list(_SUMMED(wanted))
    return found[-1:] + found[:-1]


def one_in_a_million(wanted: Sequence[ClippedSum]) -> Sequence[Any]:
    return [{key: total * (1 + 1e-6) for key, total in own.items()} for own in _SUMMED(wanted)]


_SUMMED = batched_dp_sgd._sum_batched


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("mistake", [neighbours_rows, one_in_a_million])
@pytest.mark.usefixtures("same_noise", "in_float64")
def test_the_comparison_detects_a_fault_in_the_batched_sums(
    mistake: Callable[..., Any], configured: Callable[..., Config], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(batched_dp_sgd, "_sum_batched", mistake)
    assert largest_gap(prepare(configured()), tmp_path) > 1e-10


@pytest.mark.usefixtures("same_noise")
def test_agents_that_cannot_be_stacked_are_computed_alone(
    configured: Callable[..., Config], tmp_path: Path, stacks: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(Stackable, "is_single", lambda self: True)
    # Not bit-equal: the memory layout differs between networks that could be stacked and others.
    assert largest_gap(prepare(configured("privacy.learning_rate=0.1")), tmp_path) < 1e-4
    assert not stacks


def test_agents_with_different_losses_are_not_stacked() -> None:
    network = nn.Linear(3, 2)
    vars(network)["_stackable"] = Stackable("F", network)
    own = {"F": dict(network.named_parameters())}
    drawn = torch.ones(4, dtype=torch.bool)

    def can(loss: Any, parameters: Any = own) -> bool:
        return batched_dp_sgd.can_sum(ClippedSum(loss, parameters, {}, drawn, 1.0))

    shared = ExampleLoss(lambda fields, F: F(fields["x"]).sum(), (), {"F": network})
    assert can(shared)
    assert not can(lambda parameters, fields: fields["x"].sum())
    assert not can(shared, {**own, "G": own["F"]})  # a network that the loss does not name


def test_gradients_and_noise_of_all_agents_are_made_in_one_call(
    configured: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[bool] = []
    real = per_example_gradients.factored_gradients

    def counted(*what: Any, agents: bool = False) -> Any:
        times.append(agents)
        return real(*what, agents=agents)

    monkeypatch.setattr(batched_dp_sgd, "factored_gradients", counted)
    monkeypatch.setattr("privssl.privacy.dp_sgd.factored_gradients", counted)
    agents: list[int] = []
    add_noise = noisy_optimizer.add_noise

    def with_noise(optimisers: Sequence[noisy_optimizer.SecureNoiseOptimizer]) -> None:
        agents.append(len(optimisers))
        add_noise(optimisers)

    monkeypatch.setattr(noisy_optimizer, "add_noise", with_noise)
    chosen = prepare(configured("run.batched_agents=3"))
    carry_out(chosen, tmp_path / "run")
    assert times == [True] * 9  # three rounds of three steps
    assert agents == [3] * 9


# What an agent's stack could reveal about another agent ------------------------------------------


def sent_by_s1(
    chosen: Config, folder: Path, change: Callable[[LabelledRows], LabelledRows]
) -> StateDict:
    """What s1 sends when it is batched with s0, whose rows are changed."""
    prepared = prepare(chosen)
    s0, s1, *_ = prepared.federated_data.agents
    assert s0.held_labelled is not None
    s0.held_labelled = change(s0.held_labelled)
    assert isinstance(prepared.algorithm, FedAvg)
    with accounts(prepared, folder):
        federation = Federation(engine_of(prepared, 2), 0)
        federation.begin(Round(1))
        F, step = prepared.algorithm.start(federation).F, prepared.algorithm.labelled_pass
        replies = federation.call_all((s0.ref, s1.ref), step, ProximalRequest(F))
    sent = replies[1].payload
    assert replies[1].sender == s1.ref and isinstance(sent, ModelUpdate)
    return sent.F


def one_less(rows: LabelledRows) -> LabelledRows:
    return LabelledRows(rows.x[:-1], rows.y[:-1], rows.ids[:-1])


@pytest.fixture
def of_28_pixels(configured: Callable[..., Config], tmp_path: Path) -> Callable[..., Config]:
    """Two support agents with 28x28 images. Views of 8x8 pixels have equal bits in any stack."""

    def load(rows: int, *overrides: str) -> Config:
        drawn, y = np.random.default_rng(0), np.arange(2 * rows + 20) % 10
        x = drawn.integers(0, 256, (len(y), 28, 28)).astype(np.uint8)
        np.savez(tmp_path / "rows.npz", x_train=x[20:], y_train=y[20:], x_test=x[:20],
                 y_test=y[:20])  # fmt: skip
        return configured(
            "data.name=npz", f"data.root={tmp_path / 'rows.npz'}", f"data.labelled={2 * rows - 20}",
            "data.unlabelled=20", "agents.support=2", "privacy.augment=strong", "privacy.steps=1",
            "run.batched_agents=2", *overrides,
        )  # fmt: skip

    return load


def bits_differ_by_a_row(load: Callable[..., Config], folder: Path) -> bool:
    """Whether s1 sends other bits if s0 has one row less, with private counts."""
    chosen = load(20, "privacy.record_counts=private", "privacy.sample_rate=1.0")
    everybody = sent_by_s1(chosen, folder / "all", lambda rows: rows)
    return not same_bits(everybody, sent_by_s1(chosen, folder / "fewer", one_less))


def bits_differ_by_the_batch(
    load: Callable[..., Config], folder: Path, patch: pytest.MonkeyPatch
) -> bool:
    """Whether s1 sends other bits if s0 draws another batch of 257 rows, with public counts. Views
    are made in blocks of 64 rows; the last block has one row, and other bits in a stack.
    """
    chosen, found = load(267, "privacy.sample_rate=0.05"), []
    for first_of_s0 in (0, 250):
        firsts = iter((first_of_s0, 250))  # the first of ten drawn rows, for s0 and s1

        def draw(self: PrivatePlan, rows: int, firsts: Iterator[int] = firsts) -> Tensor:
            return (torch.arange(rows) - next(firsts)) // 10 == 0

        patch.setattr(PrivatePlan, "draw_batch", draw)
        found.append(sent_by_s1(chosen, folder / str(first_of_s0), lambda rows: rows))
    return not same_bits(*found)


@pytest.mark.parametrize("stacked", [False, True])
def test_neither_rows_nor_batches_of_an_agent_change_a_bit_of_what_another_agent_sends(
    stacked: bool, of_28_pixels: Callable[..., Config], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    without_noise(monkeypatch)
    if stacked:  # the control: private views in one stack
        monkeypatch.setattr(batched, "WHEN_CHARGED", object)
    assert bits_differ_by_a_row(of_28_pixels, tmp_path / "counts") == stacked
    assert bits_differ_by_the_batch(of_28_pixels, tmp_path / "coins", monkeypatch) == stacked


# Noise --------------------------------------------------------------------------------------------


def joint_noise(multipliers: Sequence[float], numbers: int = 40_000) -> list[Tensor]:
    """The noise that a joint step adds to the sums of several agents."""
    steps = []
    for multiplier in multipliers:
        parameter = nn.Parameter(torch.zeros(numbers, dtype=torch.float64))
        steps.append(
            NoisyOptimizerStep(
                noisy_optimizer.SecureNoiseOptimizer(
                    optim.SGD([parameter], lr=1.0), noise_multiplier=multiplier,
                    max_grad_norm=2.0, expected_batch_size=None, loss_reduction="sum",
                ),
                expected_batch=1.0,
            )
        )  # fmt: skip
        parameter.summed_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    batched_dp_sgd.noisy_steps_batched(steps, JointSteps())
    for step in steps:
        assert all(p.grad is None and p.summed_grad is None for p in step.optimiser.params)
    return [-step.optimiser.params[0].detach() for step in steps]


def correlations(noise: Sequence[Tensor]) -> list[float]:
    pairs = itertools.combinations(noise, 2)
    return [abs(float(torch.corrcoef(torch.stack(pair))[0, 1])) for pair in pairs]


def test_in_a_joint_step_each_agent_has_independent_noise_of_its_own_deviation() -> None:
    multipliers = (0.5, 1.0, 3.0)
    noise = joint_noise(multipliers)
    for own, multiplier in zip(noise, multipliers, strict=True):
        assert float(own.std()) == pytest.approx(2.0 * multiplier, rel=0.02)
        assert float(own.mean()) == pytest.approx(0.0, abs=2.0 * multiplier * 6 / 200)
    assert max(correlations(noise)) < 6 / 200  # six deviations of 1 / sqrt(40,000): once in 10^8


def test_the_check_of_independent_noise_detects_shared_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = secure_noise.secure_normal(40_000)
    monkeypatch.setattr(secure_noise, "secure_normal", lambda count: drawn[:count])
    assert min(correlations(joint_noise((0.5, 1.0, 3.0)))) > 0.99
