"""Batched agents: the results of agents in sequence, and no leftovers of a failed visit.

Equal means: up to the order of sums. In float64 this leaves 1e-13 after a few rounds. In float32 a
first step differs by about 1e-7 of its value; over a few rounds APART is far above the largest
measured difference (2e-5) and far below that of any fault, as the controls show. Two things amplify
rounding and are no faults. One is a parameter without effect, whose gradient is all rounding and
which Adam moves by its whole rate (a bias before a norm of single channels: networks here are 8
wide). The other is a decision: a label, or which pixel of four is the largest.
"""

import copy
import functools
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from generators import ImageDiscriminator, ImageGenerator, VariationalImageGenerator
from privssl import models
from privssl.algorithms import ALGORITHMS
from privssl.algorithms.base import Algorithm
from privssl.algorithms.baselines.supervised import FedAvg, FedAvgConfig
from privssl.core.agents import Agent, UnlabelledRows
from privssl.core.engine import Call
from privssl.core.messages import Message, Reply
from privssl.core.rows import IMAGE, WITH_DROPOUT
from privssl.core.task import Task
from privssl.engines import batched
from privssl.engines.batched import BatchedEngine
from privssl.engines.local import LocalEngine
from privssl.engines.process_pool import WorkerEngine
from privssl.errors import ConfigError, DataError
from privssl.experiment.config import load_config
from privssl.experiment.prepare import prepare
from privssl.models.static_norm import collect
from privssl.ops.precision import Precision
from privssl.runs.engine_factory import make_engine
from privssl.runtime.randomness import seeded, stream
from privssl.settings.schema import ModelSettings
from privssl.training import local_training
from privssl.training.batched import scheduler, stacking
from privssl.training.batched.deferred import BatchedCall, FunctionalModule
from privssl.training.batched.scheduler import Cancelled, run_in_lockstep
from privssl.training.batched.stacking import (
    JointSteps,
    Pass,
    Stackable,
    can_compute,
    can_stack,
    run_calls_batched,
    run_passes_batched,
)
from privssl.training.evaluation import HiddenLabelMeter
from privssl.training.losses import hard_label_loss
from tests.support.algorithm_contract import CASES, rows_of
from tests.support.toy_worlds import (
    Simulation,
    apart,
    at_clients,
    at_server,
    federated_data,
    flat,
    make,
    same_bits,
    simulate,
    unopened_account,
)

CPU = torch.device("cpu")
APART = 1e-4
NORMS = ("group", "batch", "static", "none")
CONFIGS = Path(__file__).parents[2] / "configs"


def rng(purpose: str) -> torch.Generator:
    return stream(0, 0, "world", purpose)


# Concurrent steps ----------------------------------------------------------------------------


def test_every_running_step_sends_its_request_before_any_is_answered() -> None:
    heard = []

    def piece(name: str, questions: int) -> Callable[[scheduler.Request], str]:
        def work(ask: scheduler.Request) -> str:
            return name + "".join(ask(f"{name}{n}") for n in range(questions))

        return work

    def answer(questions: Sequence[str]) -> dict[int, str]:
        heard.append(list(questions))
        return {place: question[-1] for place, question in enumerate(questions)}

    said = run_in_lockstep([piece("a", 1), piece("b", 3), piece("c", 0)], answer, CPU)
    assert said == ["a0", "b012", "c"]
    assert heard == [["a0", "b0"], ["b1"], ["b2"]]


def test_a_step_without_an_answer_keeps_waiting() -> None:
    def work(ask: scheduler.Request) -> list[Any]:
        return [ask("late"), ask("late")]

    def early(ask: scheduler.Request) -> list[Any]:
        return [ask("early") for _ in range(3)]

    heard = []

    def answer(questions: Sequence[str]) -> dict[int, int]:
        heard.append(list(questions))
        now = [n for n, question in enumerate(questions) if question == "early"]
        return dict.fromkeys(now or range(len(questions)), len(heard))

    assert run_in_lockstep([work, early], answer, CPU) == [[4, 5], [1, 2, 3]]
    assert heard == [["late", "early"]] * 3 + [["late"]] * 2


def drawing(ask: scheduler.Request, name: str) -> list[float]:
    """Seed torch's generator, and send requests between draws."""
    drawn = []
    with seeded(rng(name)):
        for _ in range(3):
            drawn.append(float(torch.rand(())))
            ask(None)
    return drawn


def no_answer(questions: Sequence[Any]) -> dict[int, None]:
    return dict.fromkeys(range(len(questions)))


def test_each_step_draws_from_torchs_generator_as_if_it_were_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = [drawing(lambda question: None, name) for name in "ab"]
    pieces = [functools.partial(drawing, name=name) for name in "ab"]
    before = torch.get_rng_state()
    assert run_in_lockstep(pieces, no_answer, CPU) == alone
    assert torch.equal(torch.get_rng_state(), before)
    # the control: one generator for all
    monkeypatch.setattr(scheduler, "_set_random_states", lambda states, device: None)
    with torch.random.fork_rng(devices=[]):
        assert run_in_lockstep(pieces, no_answer, CPU) != alone


def test_the_error_of_the_first_call_is_raised_and_later_steps_are_cancelled() -> None:
    ended = []

    def piece(name: str, questions: int, error: type[Exception] | None = None) -> Any:
        def work(ask: scheduler.Request) -> None:
            try:
                for _ in range(questions):
                    ask(name)
                ended.append(name)
                if error is not None:
                    raise error(name)
            except Cancelled:
                ended.append(f"{name} given up")
                raise

        return work

    threads = threading.enumerate()
    # b fails first, then a, which comes before it: in sequence the run would have stopped at a
    pieces = [piece("a", 2, KeyError), piece("b", 1, ValueError), piece("c", 9)]
    with pytest.raises(KeyError, match="a"):
        run_in_lockstep(pieces, no_answer, CPU)
    assert ended == ["b", "a", "c given up"]
    assert no_thread_is_new(threads)


def test_an_interruption_ends_every_step() -> None:
    ended = []

    def work(ask: scheduler.Request) -> None:
        try:
            ask(1)
        finally:
            try:
                ask(2)  # a cancelled step gets no answer in its cleanup
            finally:
                ended.append(1)

    def answer(questions: Sequence[Any]) -> dict[int, Any]:
        raise KeyboardInterrupt

    threads, before = threading.enumerate(), torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        run_in_lockstep([work, work], answer, CPU)
    assert ended == [1, 1]
    assert no_thread_is_new(threads)
    assert torch.equal(torch.get_rng_state(), before)


def test_ctrl_c_during_a_step_ends_it_at_its_next_request() -> None:
    went_on, arrived = [], threading.Event()

    def pressed(*_: object) -> None:
        if not arrived.is_set():
            arrived.set()
            raise KeyboardInterrupt

    def work(ask: scheduler.Request) -> None:
        while not arrived.wait(0.05):  # repeated: a signal just before the main thread waits
            os.kill(os.getpid(), signal.SIGINT)  # does not wake it
        ask(1)
        went_on.append(1)

    threads = threading.enumerate()
    # A shell starts background commands with Ctrl-C ignored.
    former = signal.signal(signal.SIGINT, pressed)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_in_lockstep([work, work], no_answer, CPU)
    finally:
        signal.signal(signal.SIGINT, former)
    assert arrived.is_set() and not went_on and no_thread_is_new(threads)


def no_thread_is_new(before: Sequence[threading.Thread]) -> bool:
    """Threads of earlier tests may have ended in between."""
    return set(threading.enumerate()) <= set(before)


# Stacked passes ------------------------------------------------------------------------------


def classifiers(name: str, norm: str, precision: Precision = "float32") -> list[nn.Module]:
    """Three networks of one architecture, each with its own weights and statistics."""
    settings = ModelSettings(name=name, width=8, norm=norm)  # type: ignore[arg-type]
    made = []
    for n in range(3):
        with seeded(rng(f"network {n}")):
            made.append(models.build_classifier(settings, (1, 8, 8), 10, precision))
            for buffer in made[-1].buffers():
                if buffer.is_floating_point():
                    buffer.add_(torch.rand(buffer.shape))
    return made


def images(*counts: int, purpose: str = "rows") -> list[tuple[Tensor, ...]]:
    drawn = rng(purpose)
    return [(torch.rand(count, 1, 8, 8, generator=drawn).requires_grad_(),) for count in counts]


def wanted(networks: Sequence[nn.Module], inputs: Sequence[tuple[Tensor, ...]]) -> list[Pass]:
    return [
        Pass(Stackable("F", network), network.forward, x, torch.is_grad_enabled())
        for network, x in zip(networks, inputs, strict=True)
    ]


Trace = dict[str, Tensor]


def traces(
    networks: Sequence[nn.Module], inputs: Sequence[tuple[Tensor, ...]], outputs: Sequence[Tensor]
) -> list[Trace]:
    """Per network: output, gradients of a loss for weights and rows, and buffers."""
    # different weights for each output, so that no gradient vanishes
    losses = [(y * torch.rand(y.shape, generator=rng("loss"))).sum() for y in outputs]
    torch.autograd.backward(losses)
    found = []
    for network, x, y in zip(networks, inputs, outputs, strict=True):
        named: dict[str, Any] = {name: p.grad for name, p in network.named_parameters()}
        named |= {f"input {n}": t.grad for n, t in enumerate(x)} | dict(network.named_buffers())
        found.append({"output": y.detach()} | {k: v.double() for k, v in named.items()})
    return found


def largest_gap(first: Sequence[Trace], second: Sequence[Trace]) -> float:
    """The largest difference of outputs, gradients and buffers, relative to the largest."""
    gap = 0.0
    for mine, other in zip(first, second, strict=True):
        assert mine.keys() == other.keys()
        scale = max(float(value.abs().max()) for value in mine.values())
        gap = max([gap, *(float((mine[k] - other[k]).abs().max()) / scale for k in mine)])
    return gap


def both_ways(
    networks: Sequence[nn.Module], inputs: Sequence[tuple[Tensor, ...]]
) -> tuple[list[Trace], list[Trace]]:
    """Traces of each network alone, and of all stacked."""
    others = [copy.deepcopy(network) for network in networks]
    again = [tuple(x.detach().clone().requires_grad_() for x in xs) for xs in inputs]
    alone = [network(*x) for network, x in zip(others, again, strict=True)]
    passes = wanted(networks, inputs)
    assert all(can_stack(one.copy, one.inputs) for one in passes)
    one_by_one = traces(others, again, alone)
    return one_by_one, traces(networks, inputs, run_passes_batched(passes))


# small_cnn is tested with every norm; other networks have one norm here, the rest is slow.
@pytest.mark.fast_cases(6)
@pytest.mark.parametrize(
    ("name", "norm"),
    [
        pytest.param(
            name, norm,
            marks=() if name == "small_cnn" or norm == NORMS[n % 2] else pytest.mark.slow,
        )
        for n, name in enumerate(IMAGE.networks)
        for norm in NORMS
    ],
)  # fmt: skip
def test_a_stacked_pass_equals_the_pass_of_each_network_on_its_own_rows(
    name: str, norm: str
) -> None:
    drops = name in WITH_DROPOUT
    if drops and norm == "static":
        return  # neither dropout in training nor static norm in evaluation is stacked
    networks = [network.train(not drops) for network in classifiers(name, norm)]
    counts = (6, 6, 6) if norm in ("batch", "static") else (6, 8, 1)
    # With the usual rows, one unit of fedavg_cnn is at the kink of ReLU, where rounding decides.
    inputs = images(*counts, purpose="other rows" if name == "fedavg_cnn" else "rows")
    alone, together = both_ways(networks, inputs)
    assert largest_gap(alone, together) < APART


def test_the_comparison_of_passes_detects_exchanged_rows() -> None:
    # The control of the test above.
    alone, _ = both_ways(classifiers("small_cnn", "group"), images(6, 6, 6))
    first, second, third = images(6, 6, 6)
    _, swapped = both_ways(classifiers("small_cnn", "group"), [second, first, third])
    assert largest_gap(alone[:1], swapped[:1]) > 100 * APART
    assert largest_gap(alone[2:], swapped[2:]) < APART


@pytest.mark.parametrize("spectral", [True, False])
def test_generators_and_discriminators_can_be_stacked(spectral: bool) -> None:
    drawn = rng("numbers")

    def numbers(*shape: int) -> Tensor:
        return torch.rand(shape, generator=drawn).requires_grad_()

    shape, rows = (1, 8, 8), (5, 3, 5)
    with seeded(rng("G and D")):
        G = [ImageGenerator(shape, 10, width=8) for _ in rows]
        D = [ImageDiscriminator(shape, 10, width=8, spectral=spectral) for _ in rows]
    mixing = [
        (numbers(b, *shape), numbers(b, 10), numbers(b, 10), numbers(b, 32), numbers(b, 2))
        for b in rows
    ]
    assert largest_gap(*both_ways(G, mixing)) < APART
    with seeded(rng("variational G")):
        coded = [VariationalImageGenerator(shape, 10, width=8) for _ in rows]
    fresh = [tuple(one.detach().clone().requires_grad_() for one in some) for some in mixing]
    assert largest_gap(*both_ways(coded, fresh)) < APART
    judged = [(numbers(b, *shape), numbers(b, 10)) for b in rows]
    assert largest_gap(*both_ways(D, judged)) < APART


def test_many_rows_are_processed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacking, "ROWS_AT_ONCE", 12)  # two agents of six rows
    alone, together = both_ways(classifiers("small_cnn", "group"), images(6, 5, 6))
    assert largest_gap(alone, together) < APART


def test_a_backward_pass_of_one_agent_changes_no_gradient_of_another() -> None:
    networks, inputs = classifiers("small_cnn", "group"), images(4, 6, 4)
    first, *_ = run_passes_batched(wanted(networks, inputs))
    first.sum().backward()
    assert inputs[0][0].grad is not None and float(inputs[0][0].grad.abs().max()) > 0
    for x, network in zip(inputs[1:], networks[1:], strict=True):
        assert all(p.grad is None or not p.grad.any() for p in (*network.parameters(), *x))


def test_batches_that_couple_rows_are_stacked_only_with_equal_sizes() -> None:
    networks, inputs = classifiers("small_cnn", "batch"), images(4, 6, 4)
    kinds = [one.kind() for one in wanted(networks, inputs)]
    assert kinds[0] == kinds[2] != kinds[1]
    for network in networks:
        network.eval()
    assert len({one.kind() for one in wanted(networks, inputs)}) == 1


def test_passes_without_gradients_are_not_stacked_with_passes_that_need_them() -> None:
    networks, inputs = classifiers("small_cnn", "group"), images(4, 4, 4)
    with torch.no_grad():
        plain = wanted(networks[:2], inputs[:2])
    outputs = run_passes_batched([*plain, *wanted(networks[2:], inputs[2:])])
    assert [out.requires_grad for out in outputs] == [False, False, True]
    networks[0].eval()
    assert not plain[0].copy.modes()  # the copy has no mode-dependent layers


def test_passes_that_cannot_be_stacked_are_computed_alone() -> None:
    x = (torch.rand(4, 1, 8, 8),)

    def stacks(network: nn.Module, *inputs: Any) -> bool:
        return can_stack(Stackable("F", network), inputs or x)

    plain = classifiers("small_cnn", "group")[0]
    assert stacks(plain)
    assert not stacks(plain, x[0][:0]) and not stacks(plain, x[0], x[0][:2])
    assert not stacks(plain, None) and not stacks(plain, torch.zeros(()))
    assert not stacks(classifiers("small_cnn", "none", "bfloat16")[0])
    dropping = classifiers("trinet_cnn", "group")[0]
    assert not stacks(dropping.train()) and stacks(dropping.eval())
    static = classifiers("small_cnn", "static")[0]
    assert stacks(static.train()) and not stacks(static.eval())
    static.train()
    seen: list[bool] = []

    def looked_at() -> Iterator[Tensor]:
        seen.append(stacks(static))
        yield x[0]

    collect(static, looked_at())
    assert seen == [False]
    # torch's writes to ``out``
    torchs = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(10, 3))
    assert not stacks(torchs, torch.rand(4, 10)) and stacks(nn.Linear(10, 3), torch.rand(4, 10))
    unknown = nn.utils.parametrize.register_parametrization(nn.Linear(10, 3), "bias", nn.Softplus())
    assert not stacks(unknown, torch.rand(4, 10))
    assert not stacks(nn.Sequential(plain, nn.Softplus()))  # a layer that is not on the list
    inside: list[bool] = []

    def looked_into(row: Tensor) -> Tensor:
        inside.append(stacks(plain, row))
        return row

    torch.func.vmap(looked_into)(x[0][:, None])
    assert inside == [False]
    plain.register_forward_hook(lambda *_: None)
    assert not stacks(plain)


# Joint steps ---------------------------------------------------------------------------------


def sgd(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def adam(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(network.parameters(), lr=0.01, betas=(0.5, 0.99), fused=True)


def slower(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.01)


class Forgetful(JointSteps):
    """A fault: the moments of the previous step are lost."""

    def take(self, steps: Sequence[local_training.OptimizerStep]) -> None:
        for step in steps:
            for optimiser in step.optimisers:
                optimiser.state.clear()
        self._own = []
        super().take(steps)


def walked(
    kinds: Sequence[Callable[[nn.Module], torch.optim.Optimizer]],
    take: Callable[[Sequence[local_training.OptimizerStep]], None],
) -> list[dict[str, Tensor]]:
    """Weights after steps of several networks; the first takes fewer steps."""
    networks = classifiers("small_cnn", "group")
    optimisers = [kind(network) for kind, network in zip(kinds, networks, strict=True)]
    for n in range(4):
        steps = [
            local_training.OptimizerStep(
                (one,), network(torch.rand(3, 1, 8, 8, generator=rng(f"{n}"))).exp().sum(),
                0.5 if place == 1 else None,
            )
            for place, (one, network) in enumerate(zip(optimisers, networks, strict=True))
            if n < 2 or place > 0
        ]  # fmt: skip
        take(steps)
    return [local_training.weights_of(network) for network in networks]


def one_by_one(steps: Sequence[local_training.OptimizerStep]) -> None:
    for step in steps:
        local_training.minimise(step.optimisers, step.loss, clip_norm=step.clip_norm)


@pytest.mark.parametrize("kinds", [(sgd, sgd, sgd), (adam, adam, adam), (sgd, adam, slower)])
def test_a_joint_step_equals_the_step_of_each_optimiser_to_the_bit(kinds: Any) -> None:
    alone, together = walked(kinds, one_by_one), walked(kinds, JointSteps().take)
    assert all(same_bits(a, b) for a, b in zip(alone, together, strict=True))
    forgotten = walked(kinds, Forgetful().take)  # the control
    assert apart(alone[1], forgotten[1]) > APART


def test_a_joint_step_uses_a_changed_learning_rate() -> None:
    def changing(take: Callable[[Sequence[local_training.OptimizerStep]], None]) -> Any:
        def changed(steps: Sequence[local_training.OptimizerStep]) -> None:
            take(steps)
            for step in steps:
                step.optimisers[0].param_groups[0]["lr"] *= 0.5

        return changed

    kinds = (sgd, sgd, sgd)
    alone = walked(kinds, changing(one_by_one))
    together = walked(kinds, changing(JointSteps().take))
    assert all(same_bits(a, b) for a, b in zip(alone, together, strict=True))


# The engine ----------------------------------------------------------------------------------


def lockstepped(algorithm: Algorithm[Any], at_once: int = 8) -> Any:
    """A class of engines, as ``simulate`` expects."""
    return functools.partial(BatchedEngine, algorithm=algorithm, at_once=at_once)


def of_case(case: str) -> Algorithm[Any]:
    name, own = CASES[case]
    return make(name, width=8, **own)


def three_each(**rows: Any) -> Any:
    """33, 33 and 34 unlabelled rows, so that batches differ in length."""
    return federated_data(support=3, query=3, labelled=30, unlabelled=100, **rows)


PLACES: dict[str, Callable[..., Any]] = {
    "support": three_each,
    "server": functools.partial(at_server, query=3, unlabelled=100),
    "client": functools.partial(at_clients, labelled=40, unlabelled=100),
}


@functools.cache
def alone(case: str) -> Simulation:
    """Agents in sequence, with labels at support agents: cached for all tests."""
    return simulate(of_case(case), three_each())


def within_for(case: str) -> float:
    """The largest difference by rounding. G and D amplify it: on one kind of processor to 1.4e-3
    (moments of the last layers of G), on others to 2e-5. In float64, below, all differences are
    small.
    """
    return 30 * APART if case.startswith("fedssl") else APART


def assert_equal_in_lockstep(
    algorithm: Algorithm[Any], place: str, within: float = APART, **rows: Any
) -> None:
    alone = simulate(algorithm, PLACES[place](**rows))
    together = simulate(algorithm, PLACES[place](**rows), engine=lockstepped(algorithm))
    assert apart(alone.state, together.state) < within
    mine, theirs = alone.engine.memories(), together.engine.memories()
    assert flat(mine).keys() == flat(theirs).keys()
    assert not flat(mine) or apart(mine, theirs) < within
    assert alone.federation.mean_metrics() == pytest.approx(
        together.federation.mean_metrics(), rel=10 * within
    )
    assert alone.federation.traffic == together.federation.traffic


def cases_but(*without: str, fast: Collection[str] = tuple(ALGORITHMS)) -> pytest.MarkDecorator:
    """Every case for every place of labels; those in ``fast``, with support agents, are fast."""
    return pytest.mark.parametrize(
        ("case", "place"),
        [
            pytest.param(c, p, marks=[pytest.mark.slow] * (c not in fast or p != "support"))
            for c in CASES for p in PLACES
            if c not in without and CASES[c][0] in batched.ALGORITHMS
        ],
    )  # fmt: skip


#: Methods with the steps of fedavg or pseudo, which differ in what is sent or averaged.
SAME_PASSES = {"supervise", "fedsem"}


# Every bias before a batch norm is without effect, so Adam moves those of this case by rounding. In
# float64, below, a fault a millionth as large is detected; only a few cases run here.
@pytest.mark.fast_cases(1)
@cases_but("pseudo, batch norm", fast=("fedssl", "mixmatch"))
def test_batched_results_equal_those_of_agents_in_sequence(case: str, place: str) -> None:
    assert_equal_in_lockstep(of_case(case), place, within_for(case), dataset=rows_of(case))


# The cases left out use float32 or bfloat16 numbers, whatever torch's default is. Methods with the
# same passes as another are slow.
@pytest.mark.fast_cases(3)
@cases_but(
    "fedssl, as printed", "fedssl, bfloat16", "fedssl, synthetic rows, bfloat16",
    fast=[*ALGORITHMS.keys() - SAME_PASSES],
)  # fmt: skip
@pytest.mark.usefixtures("in_float64")
def test_in_float64_batched_results_are_equal_to_eleven_digits(case: str, place: str) -> None:
    # So the remaining difference is rounding, and not a small fault.
    without_effect = case == "pseudo, batch norm"
    within = 1e-8 if without_effect else 1e-11
    assert_equal_in_lockstep(of_case(case), place, within, dataset=rows_of(case))


@pytest.mark.usefixtures("in_float64")
def test_the_float64_comparison_detects_a_fault_of_one_in_a_million(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = stacking._run_stacked
    monkeypatch.setattr(
        stacking, "_run_stacked", lambda passes: [out * (1 + 1e-6) for out in real(passes)]
    )
    algorithm = of_case("pseudo")
    alone = simulate(algorithm, three_each())
    together = simulate(algorithm, three_each(), engine=lockstepped(algorithm))
    assert 1e-10 < apart(alone.state, together.state) < APART  # in float32 it could be rounding


def test_batch_norm_counts_the_batches_of_each_agent_separately() -> None:
    assert_equal_in_lockstep(make("fedavg", norm="batch", width=8, local_epochs=2), "support")


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("pseudo", "_run_stacked"), ("pseudo", "_run_calls"), ("fedavg", "_run_calls"),
        ("fedssl, gate open", "_run_calls"),
    ],
)  # fmt: skip
def test_visits_of_several_agents_are_stacked(
    case: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The control of the tests above: an engine that never stacks would pass them.
    sizes = []
    real = getattr(stacking, what)

    def counted(several: Sequence[Any]) -> Sequence[Any]:
        sizes.append(len(several))
        return real(several)  # type: ignore[no-any-return]

    monkeypatch.setattr(stacking, what, counted)
    algorithm = of_case(case)
    simulate(algorithm, three_each(), engine=lockstepped(algorithm))
    assert sizes.count(3) > 0.9 * len(sizes)


def shift_inputs(passes: Sequence[Pass]) -> list[Any]:
    """A fault: each agent gets the results of its neighbour's rows."""
    inputs = [one.inputs for one in passes]
    kept = [
        Pass(one.copy, one.forward, inputs[place - 1], one.derivatives)
        if len(inputs[place - 1][0]) == len(one.inputs[0]) else one
        for place, one in enumerate(passes)
    ]  # fmt: skip
    return run_passes_batched(kept)


def softened(
    fields: Mapping[str, Tensor], by: float, *, F: FunctionalModule, D: FunctionalModule
) -> dict[str, Any]:
    """Call two networks, one of them twice, and return a tree."""
    p = F(fields["x"]).softmax(dim=1)
    judged = D(fields["x"], p)
    return {"one": (judged * by).sum(), "rest": (p, D.frozen()(fields["x"], p).mean())}


def computations(rows: Sequence[int], by: Sequence[float]) -> list[BatchedCall]:
    """One computation per agent; D has spectral norms, whose vectors change."""
    found = []
    for place, (count, factor) in enumerate(zip(rows, by, strict=True)):
        with seeded(rng(f"F and D {place}")):
            F = models.build_classifier(ModelSettings(width=8), (1, 8, 8), 10)
            D = ImageDiscriminator((1, 8, 8), 10, width=8)
            x = torch.rand(count, 1, 8, 8).requires_grad_()
        for name, network in {"F": F, "D": D}.items():
            setattr(network, stacking.COPY, Stackable(name, network))
        found.append(BatchedCall(softened, {"x": x}, (factor,), {"F": F, "D": D}))
    return found


def results(computed: Sequence[Any], of: Sequence[BatchedCall]) -> list[Tensor]:
    """All results: numbers, gradients, and buffers of the networks."""
    losses = [tree["one"] + tree["rest"][1] for tree in computed]
    torch.autograd.backward(losses)
    found = [x for tree in computed for x in (tree["one"], *tree["rest"])]
    for one in of:
        found.append(one.fields["x"].grad)
        for network in one.networks.values():
            found += [p.grad for p in network.parameters()]
            found += network.buffers()
    return [x.detach() for x in found]


@pytest.mark.parametrize("rows", [(6, 6, 6), (6, 4, 6)])
@pytest.mark.parametrize("by", [(2.0, 2.0, 2.0), (2.0, 3.0, 2.0)])
def test_stacked_computations_equal_those_of_each_agent_alone(
    rows: Sequence[int], by: Sequence[float]
) -> None:
    alone, together = computations(rows, by), computations(rows, by)
    assert all(map(can_compute, together))
    first = results([one.run_single() for one in alone], alone)
    second = results(run_calls_batched(together), together)
    for one, other in zip(first, second, strict=True):
        assert torch.allclose(one, other, atol=APART)
    assert len({stacking._batch_key_of(one) for one in together}) == len(
        set(zip(rows, by, strict=True))
    )


def test_computations_without_gradients_return_results_without_gradients() -> None:
    with torch.no_grad():
        plain = computations((6, 6), (2.0, 2.0))
    wanted = [*plain, *computations((6, 6), (2.0, 2.0))]
    asks = [one["one"].requires_grad for one in run_calls_batched(wanted)]
    assert asks == [False, False, True, True]


@pytest.mark.slow
def test_an_engine_that_is_deleted_releases_its_copies() -> None:
    algorithm = of_case("pseudo")
    engine = simulate(algorithm, three_each(), engine=lockstepped(algorithm)).engine
    assert isinstance(engine, BatchedEngine)
    copies = [weakref.ref(copy._F) for copy in engine._copies]
    assert copies and all(one() is not None for one in copies)
    del engine
    gc.collect()
    assert all(one() is None for one in copies)


def test_computations_that_cannot_be_stacked_run_alone() -> None:
    dropping = models.build_classifier(ModelSettings("trinet_cnn"), (1, 8, 8), 10).train()
    strange = models.build_classifier(ModelSettings(), (1, 8, 8), 10)
    x = {"x": torch.rand(4, 1, 8, 8)}
    assert can_compute(BatchedCall(hard_label_loss, x, (), {}))
    # not a copy of the engine
    assert not can_compute(BatchedCall(hard_label_loss, x, (), {"F": strange}))
    setattr(dropping, stacking.COPY, Stackable("F", dropping))
    assert not can_compute(BatchedCall(hard_label_loss, x, (), {"F": dropping}))
    dropping.eval()
    assert can_compute(BatchedCall(hard_label_loss, x, (), {"F": dropping}))


def shift_fields(wanted: Sequence[BatchedCall]) -> list[Any]:
    """The same fault for computations: one field of each agent is its neighbour's. (With all fields
    the agents would only be permuted, and their mean would be equal.)
    """
    kept = []
    for place, one in enumerate(wanted):
        (mine, *rest), form = tree_flatten(one.fields)
        other = tree_flatten(wanted[place - 1].fields)[0][0]
        moved = replace(one, fields=tree_unflatten([other, *rest], form))
        kept.append(moved if other.shape == mine.shape else one)
    return run_calls_batched(kept)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("case", ["pseudo", "fedavg", "fedssl, gate open"])
@pytest.mark.parametrize("mistake", ["rows", "moments"])
def test_the_comparison_of_results_detects_shifted_rows_and_lost_moments(
    case: str, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mistake == "rows":
        monkeypatch.setattr(batched, "run_passes_batched", shift_inputs)
        monkeypatch.setattr(batched, "run_calls_batched", shift_fields)
    else:
        monkeypatch.setattr(batched, "JointSteps", Forgetful)
    algorithm = of_case(case)
    wrong = simulate(algorithm, three_each(), engine=lockstepped(algorithm))
    assert apart(alone(case).state, wrong.state) > within_for(case)


def test_batched_runs_repeat_to_the_bit_and_the_number_at_once_hardly_matters() -> None:
    def after(at_once: int) -> Simulation:
        algorithm = of_case("pseudo")
        return simulate(algorithm, three_each(), engine=lockstepped(algorithm, at_once))

    whole = after(8)
    assert same_bits(whole.state, after(8).state)
    assert apart(after(2).state, whole.state) < APART


def test_networks_that_are_never_stacked_keep_their_bits() -> None:
    algorithm = of_case("fedssl, bfloat16")
    alone = simulate(algorithm, three_each())
    together = simulate(algorithm, three_each(), engine=lockstepped(algorithm))
    assert same_bits(alone.state, together.state)


def test_dropout_draws_the_same_numbers_as_in_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    def new() -> nn.Module:
        return models.build_classifier(ModelSettings(name="trinet_cnn", width=8), (1, 8, 8), 10)

    algorithm = FedAvg(
        FedAvgConfig(rounds=2, local_epochs=2, batch_size=5), Task(10, (1, 8, 8), new)
    )
    alone = simulate(algorithm, three_each())
    assert (
        apart(alone.state, simulate(algorithm, three_each(), engine=lockstepped(algorithm)).state)
        < APART
    )
    # the control: one generator for all batched visits
    monkeypatch.setattr(scheduler, "_set_random_states", lambda states, device: None)
    mixed_up = simulate(algorithm, three_each(), engine=lockstepped(algorithm))
    assert apart(alone.state, mixed_up.state) > APART


# Steps computed alone ------------------------------------------------------------------------


@dataclass(frozen=True)
class Note(Message):
    text: str = ""
    t: Tensor = field(default_factory=lambda: torch.zeros(3))


class Steps:
    """An algorithm whose steps report their thread, or fail."""

    def __init__(self) -> None:
        self.F = nn.Linear(3, 3)

    def where(self, agent: Agent, message: Note, ctx: Any) -> Note:
        ctx.weight = float(len(agent.id))
        ctx.log_metric("loss", 0.5)
        agent.memory = {**agent.memory, agent.id: torch.zeros(1)}
        return Note(threading.current_thread().name, torch.rand(3))

    def ask(self, agent: Agent, message: Note, ctx: Any) -> Note:
        return Note(t=self.F(torch.ones(1, 3)).detach()[0])

    def pay(self, agent: Agent, message: Note, ctx: Any) -> Note:
        if agent.account is not None:
            agent.account.pay()  # type: ignore[attr-defined]
        return self.ask(agent, message, ctx)

    def uneven(self, agent: Agent, message: Note, ctx: Any) -> Note:
        """Three steps, the first agent's after two passes each; the last agent skips one."""
        F = local_training.load_weights(self.F, {"weight": torch.eye(3), "bias": torch.zeros(3)})
        descent = torch.optim.SGD(F.parameters(), lr=0.1)
        for step in range(3):
            x = torch.rand(2, 3, generator=ctx.rng(f"{step}"))
            y = F(F(x)) if agent.id == "q0" else F(x)
            if agent.id != "q3" or step != 1:
                local_training.minimise(descent, y.square().sum())
        return Note(t=local_training.weights_of(F)["weight"][0])

    def fail(self, agent: Agent, message: Note, ctx: Any) -> Note:
        self.F(torch.ones(1, 3))
        if agent.id == "q1":
            raise DataError("q1 has no such file")
        self.F(torch.ones(1, 3))
        if agent.id == "q0":
            raise DataError("q0 has no such file")
        return Note()


def engine_of(steps: Any, names: Sequence[str] = ("q0", "q1", "q2", "q3"), **how: Any) -> Any:
    rows = UnlabelledRows(torch.zeros(4, 1, 8, 8), torch.arange(4))
    agents = [Agent(id=name, held_unlabelled=rows) for name in names]
    if how.pop("alone", False):
        return LocalEngine(agents, seed=3, device=CPU, **how)
    return BatchedEngine(agents, algorithm=steps, at_once=3, seed=3, device=CPU, **how)


def asked(there: Any, step: Any, names: Sequence[str]) -> list[Reply[Any]]:
    refs = {agent.id: agent for agent in there.roster()}
    visits = [Call(refs[name], step, Note(), 1, names[:n].count(name) + 1)
              for n, name in enumerate(names)]  # fmt: skip
    replies: list[Reply[Any]] = list(there.deliver(visits))
    return replies


HERE = threading.current_thread().name


def test_replies_equal_those_of_the_local_engine_in_the_order_of_calls() -> None:
    steps, names = Steps(), ["q3", "q0", "q2", "q1"]
    one, other = engine_of(steps, alone=True), engine_of(steps)
    for mine, theirs in zip(
        asked(one, steps.where, names), asked(other, steps.where, names), strict=True
    ):
        assert (mine.sender, mine.weight, mine.metrics) == (
            theirs.sender,
            theirs.weight,
            theirs.metrics,
        )
        assert torch.equal(mine.payload.t, theirs.payload.t)
        assert mine.payload.text == HERE
    assert same_bits(one.memories(), other.memories())


def test_visits_with_different_numbers_of_passes_share_their_optimiser_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = []

    class Counted(JointSteps):
        def take(self, steps: Sequence[local_training.OptimizerStep]) -> None:
            sizes.append(len(steps))
            super().take(steps)

    monkeypatch.setattr(batched, "JointSteps", Counted)
    steps, names = Steps(), ["q0", "q1", "q3"]
    alone, together = (
        torch.stack([reply.payload.t for reply in asked(there, steps.uneven, names)])
        for there in (engine_of(steps, alone=True), engine_of(steps))
    )
    assert float((alone - together).abs().max()) < APART < float((alone[0] - alone[1]).abs().max())
    assert sizes == [3, 3, 2]  # the second and last step of q3 is taken with the others' second


def test_an_agent_with_a_privacy_account_is_batched_before_it_is_charged() -> None:
    # Its steps on labelled rows are tested in test_private_fedavg.py.
    steps = Steps()
    there = engine_of(steps)
    there._agents["q1"].account = unopened_account()
    replies = asked(there, steps.where, ["q0", "q1", "q2"])
    assert HERE not in {reply.payload.text for reply in replies}


@pytest.mark.parametrize("charged", [False, True])
def test_after_its_charge_an_agent_shares_no_stack_with_other_agents(
    charged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks, paid, steps = list[int](), list[str](), Steps()

    def counted(passes: Sequence[Pass]) -> list[Any]:
        stacks.append(len(passes))
        return run_passes_batched(passes)

    monkeypatch.setattr(batched, "run_passes_batched", counted)
    there = engine_of(steps)
    for name in ("q0", "q1"):
        there._agents[name].account = unopened_account(
            visits=lambda: len(paid),
            paid_visits=lambda: len(paid),
            pay=lambda: paid.append("") if charged else None,
        )
    asked(there, steps.pay, ["q0", "q1", "q2"])
    assert stacks == ([1] if charged else [3])


def test_single_calls_and_other_algorithms_run_in_the_calling_thread() -> None:
    steps = Steps()
    for names, step in (
        (["q0"], steps.where),
        (["q0", "q0"], steps.where),  # an agent's second visit continues from its first
        (["q0", "q1"], Steps().where),
    ):
        replies = asked(engine_of(steps), step, names)
        assert {reply.payload.text for reply in replies} == {HERE}


def test_the_error_of_the_first_call_is_raised_and_no_thread_is_left() -> None:
    steps, threads = Steps(), threading.enumerate()
    for alone in (True, False):
        with pytest.raises(DataError, match="q0 has no such file"):
            asked(engine_of(steps, alone=alone), steps.fail, ["q2", "q0", "q1"])
    assert no_thread_is_new(threads)


def test_the_given_algorithm_is_not_modified() -> None:
    steps = Steps()
    there = engine_of(steps)
    before = copy.deepcopy(steps.F.state_dict())
    said = [reply.payload.t for reply in asked(there, steps.ask, ["q0", "q1"])]
    assert torch.equal(said[0], said[1])
    assert "forward" not in vars(steps.F) and same_bits(before, steps.F.state_dict())
    there.close()
    there.close()


# Settings ------------------------------------------------------------------------------------


def made(*overrides: str, config: str = "pseudo.yaml") -> Any:
    prepared = prepare(load_config(CONFIGS / config, ["run.device=cpu", *overrides]))
    with closing(
        make_engine(prepared, HiddenLabelMeter(prepared.federated_data.true_labels))
    ) as engine:
        return engine


def test_a_run_gets_the_configured_engine() -> None:
    assert type(made("run.workers=1")) is LocalEngine
    assert type(made("run.batched_agents=4")) is BatchedEngine
    assert type(made("run.batched_agents=1", "run.workers=1")) is LocalEngine
    if isinstance(made("run.workers=2"), WorkerEngine):
        assert type(made("run.batched_agents=4", "run.workers=1")) is BatchedEngine


def test_batched_agents_are_refused_for_algorithms_that_gain_too_little() -> None:
    with pytest.raises(ConfigError, match="4, but agents of semifl gain too little from it"):
        made("run.batched_agents=4", config="semifl.yaml")


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["run.batched_agents=4", "run.workers=2"],
         "4 agents in one stream work in one process, and workers is 2. Leave one of the two out"),
        (["run.batched_agents=4", "run.precision=bfloat16"],
         "is 4, but networks that multiply in bfloat16 are computed one by one. "
         "Give 1, or run.precision: float32"),
        (["run.batched_agents=4", "run.engine=flower"],
         "has no effect: with run.engine flower agents are sites"),
    ],
)  # fmt: skip
def test_settings_without_effect_are_refused(overrides: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        made(*overrides)
    assert text in str(refused.value)
