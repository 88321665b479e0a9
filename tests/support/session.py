"""Settings of every test: one thread, deterministic results, and caches of expensive parts."""

import copy
import functools
import signal
from collections.abc import Iterator, Sequence
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from privssl.core.agents import Agent
from privssl.engines.process_pool import resolve_worker_count
from privssl.ops import dispatch
from privssl.reporting import figures, generator_quality
from privssl.runs import engine_factory
from privssl.settings import yaml_reader
from tests.support.kernel_generations import HERE

# More threads would change the order of sums, and so the last bits of a result.
torch.set_num_threads(1)
# Nondeterministic operations raise an error. (Set in this way, torch does not load its compiler,
# which would take each worker seconds.)
torch.set_deterministic_debug_mode("error")
# Start autograd without threads. After a torch.export it would start with threads, and no later
# test could train in a worker process.
torch.autograd.backward(torch.zeros((), requires_grad=True))
# Every run reads its configs several times, and nothing changes the parsed result.
patch.object(yaml_reader, "_compose_root", functools.cache(yaml_reader._compose_root)).start()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed every test alike: the order of tests in a pytest worker depends on their speed."""
    torch.default_generator.manual_seed(27182)  # torch.manual_seed would also look for GPUs
    np.random.seed(27182)


@pytest.fixture(scope="session", autouse=True)
def equal_splits_are_drawn_once() -> Iterator[None]:
    """Draw the figure of equal splits once: it takes a quarter of a short run."""
    draw, drawn = figures.partition_plot, dict[str, figures.Picture]()

    def draw_once(*counts: dict[str, NDArray[np.int64]]) -> figures.Picture:
        key = repr([{agent: each.tolist() for agent, each in kind.items()} for kind in counts])
        if key not in drawn:
            drawn[key] = draw(*counts)[::8, ::8]  # each run writes it as PNG
        return drawn[key].copy()

    with patch.object(figures, "partition_plot", draw_once):
        yield


@pytest.fixture(scope="session", autouse=True)
def runs_have_as_many_workers_as_they_ask_for() -> Iterator[None]:
    """Make "auto" one worker: starting workers takes half of a short run."""

    def count_asked(
        asked: int | Literal["auto"], agents: Sequence[Agent], device: torch.device
    ) -> int:
        return resolve_worker_count(1 if asked == "auto" else asked, agents, device)

    with patch.object(engine_factory, "resolve_worker_count", count_asked):
        yield


@pytest.fixture(scope="session", autouse=True)
def equal_judges_are_trained_once() -> Iterator[None]:
    """Train the judge of generators once per set of test rows."""
    train, trained = generator_quality.train_judge, dict[Any, generator_quality.Judge]()

    def train_once(x: Tensor, y: Tensor, classes: int) -> generator_quality.Judge:
        key = (
            generator_quality.LEAST_STEPS, classes,
            *((t.shape, t.dtype, t.numpy().tobytes()) for t in (x, y)),
        )  # fmt: skip
        if key not in trained:
            trained[key] = train(x, y, classes)
        return copy.deepcopy(trained[key])

    with patch.object(generator_quality, "train_judge", train_once):
        yield


@pytest.fixture(params=HERE)
def each_generation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Use our kernels as compiled for each instruction set."""
    with patch.object(dispatch, "_find_latest", lambda: request.param):
        yield request.param


@pytest.fixture
def default_sighup() -> Iterator[None]:
    """Restore the default handler of SIGHUP, which nohup ignores."""
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, former)
