"""Start-up: modules that are not imported without need, and the number of threads.

Torch's compiler, torchvision and Opacus take as long to import as torch itself, and their memory is
needed once per worker.
"""

import copy
import functools
import gc
import importlib
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from privssl.algorithms import ALGORITHMS
from privssl.runtime.process import gc_paused
from privssl.training import optim
from tests.support.fresh_imports import run_afresh

CONFIG = Path(__file__).parents[2] / "configs" / "server_sl.yaml"
COMPILER = "torch._dynamo"
STEPS = """
import torch
from privssl.training.optim import Adam, SGD
w = torch.zeros(2, requires_grad=True)
for optimiser in ({}, {}):
    optimiser.zero_grad()
    w.sum().backward()
    optimiser.step()
"""


@functools.cache
def imported_modules(code: str) -> frozenset[str]:
    """The modules that a new process has imported after running the code."""
    ask = f"{code}\nimport sys; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return frozenset(ended.stdout.split())


def imported_of(code: str, *modules: str) -> list[str]:
    """The given modules that the code imports."""
    return [module for module in modules if module in imported_modules(code)]


#: Code that prepares a run and takes training steps; one process serves several tests.
PREPARED = (
    "from pathlib import Path; from privssl.experiment import config, prepare\n"
    f"prepare.prepare(config.load_config(Path({str(CONFIG)!r}), ['data.name=digits']))\n"
) + STEPS.format("SGD([w], lr=1.0, momentum=0.9, nesterov=True)", "Adam([w], lr=1.0, fused=True)")


def test_training_steps_do_not_load_the_compiler() -> None:
    assert not imported_of(PREPARED, COMPILER)
    # The control: an entry of this name in sys.modules is noticed.
    assert imported_of(f"import sys; sys.modules[{COMPILER!r}] = sys", COMPILER)


def test_a_run_imports_only_its_own_algorithm() -> None:
    modules = {kind.__module__ for kind in ALGORITHMS.values()}
    assert len(modules) > 5
    assert imported_of(PREPARED, *modules) == [ALGORITHMS["server_sl"].__module__]


def test_a_run_without_privacy_imports_neither_opacus_nor_plotting_libraries() -> None:
    slow = ("opacus", "scipy", "sklearn", "torchvision", "matplotlib", "tensorboard", COMPILER)
    assert not imported_of(PREPARED, *slow)
    # The control: an import of each name is noticed.
    named = "".join(f"sys.modules[{name!r}] = sys\n" for name in slow)
    assert imported_of(f"import sys\n{named}", *slow) == [*slow]


COMMANDS = (
    "privssl.train",
    "privssl.compare.__main__",
    "privssl.reproduce.__main__",
    "privssl.audit.__main__",
    "privssl.site.__main__",
    "privssl.doctor",
    "privssl.schema",
    "privssl.export",
)
HELP_AND_ERROR = """
import io, sys
from {module} import main
sys.stdout = io.StringIO()
for argument in ("--help", "--no-such-option"):
    try:
        main([argument])
    except SystemExit:
        pass
sys.stdout = sys.__stdout__
"""


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("module", COMMANDS)
def test_help_and_usage_errors_do_not_import_torch(module: str) -> None:
    assert not imported_of(HELP_AND_ERROR.format(module=module), "torch")


@pytest.mark.parametrize("module", ["train", "compare.__main__", "audit.__main__"])
def test_a_command_uses_one_thread_unless_omp_num_threads_is_set(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads that busy-wait beside other processes take three times as long as one."""
    main = importlib.import_module(f"privssl.{module}").main
    arguments = [str(tmp_path)] if "audit" in module else [str(CONFIG), "--dry-run"]

    def threads_after() -> int:
        torch.set_num_threads(2)
        try:
            main(arguments)
            return torch.get_num_threads()
        finally:
            torch.set_num_threads(1)

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_after() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads_after() == 2


LOOKED_FOR = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
seen = []
sys.addaudithook(lambda event, told: event == "import" and seen.append(told[0]))
{code}
said = "tensorflow" in seen
"""


def test_an_installed_tensorflow_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise ImportError")
    events = str(tmp_path / "events")

    ours = f"from privssl.reporting.trackers import *; TensorBoardTracker(Path({events!r})).close()"
    torchs = f"from torch.utils.tensorboard import *; SummaryWriter({events!r}).close()"

    def tensorflow_is_searched(code: str) -> str:
        code = LOOKED_FOR.format(folder=str(tmp_path), code=code)
        return run_afresh(code, also=["tensorboard", "tensorflow", "torch.utils.tensorboard"])

    assert tensorflow_is_searched(ours) == "False"
    assert (
        tensorflow_is_searched(torchs) == "True"
    )  # the control: torch's SummaryWriter searches for it


COLLECTED = """
import gc
from privssl.runtime.process import gc_paused
seen = []
gc.callbacks.append(lambda when, what: seen.append(when))
with gc_paused():
    import torch
    during = len(seen)
print("collected", during, gc.get_freeze_count(), gc.isenabled())
"""
HELD = """
import os, sys
from privssl.runtime import process
if not os.path.exists("/proc/self/statm"):
    sys.exit()
held = lambda: int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
def growth():
    before = held()
    large = torch.ones(2**24)  # 64 MiB
    del large
    return held() - before
given_back = growth()
process.tune_malloc()
print("held", growth(), given_back)
"""


@functools.cache
def memory_report() -> dict[str, list[str]]:
    """The output of a new process that runs both programs and imports torch once."""
    said = subprocess.check_output([sys.executable, "-c", COLLECTED + HELD], text=True)
    return {line.split()[0]: line.split()[1:] for line in said.splitlines()}


def test_garbage_collection_is_paused_during_imports_and_their_objects_are_frozen() -> None:
    during, frozen, enabled = memory_report()["collected"]
    assert (during, enabled) == ("0", "True")
    assert int(frozen) > 50_000
    # Nothing is frozen if torch was imported earlier: garbage would be frozen too.
    before = gc.get_freeze_count()
    with gc_paused():
        assert not gc.isenabled()
    assert (gc.get_freeze_count(), gc.isenabled()) == (before, True)


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (
            lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
        ),
        (
            lambda p: optim.Adam(p, lr=0.1, betas=(0.5, 0.9), fused=True),
            lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.5, 0.9), fused=True),
        ),
    ],
    ids=["SGD", "Adam"],
)
def test_our_optimisers_have_the_bits_of_torch_optimisers(ours: Make, torchs: Make) -> None:
    first = nn.Linear(3, 4)
    network = nn.Sequential(first, nn.Tanh(), nn.Linear(4, 1))
    x = torch.linspace(-1, 1, 15).view(5, 3)

    def train_with(make: Make) -> list[Tensor]:
        mine = copy.deepcopy(network)
        optimiser = make(list(mine.parameters()))
        for _ in range(4):
            optimiser.zero_grad()
            mine(x).square().sum().backward()
            optimiser.step()
        return [p.detach() for p in mine.parameters()]

    mine, theirs = train_with(ours), train_with(torchs)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert not torch.equal(mine[0], first.weight)


def test_our_optimisers_open_no_profiler_record() -> None:
    def records(kind: type[torch.optim.Optimizer]) -> list[str]:
        w = torch.ones(2, requires_grad=True)
        optimiser = kind([w], lr=0.5)  # type: ignore[call-arg]
        w.sum().backward()  # type: ignore[no-untyped-call]
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            optimiser.step()
        return [entry.key for entry in seen.key_averages() if "Optimizer" in entry.key]

    for ours, torchs in ((optim.SGD, torch.optim.SGD), (optim.Adam, torch.optim.Adam)):
        assert records(ours) == []
        assert len(records(torchs)) == 1  # the negative control


def test_an_optimiser_step_is_not_recorded_by_autograd() -> None:
    w = torch.ones(2, requires_grad=True)
    optimiser = optim.SGD([w], lr=0.5)
    w.sum().backward()  # type: ignore[no-untyped-call]
    optimiser.step()
    assert w.is_leaf
    torch.testing.assert_close(w.detach(), torch.tensor([0.5, 0.5]))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="others have rules of their own")
def test_freed_memory_is_kept_for_the_next_tensor() -> None:
    held, given_back = map(int, memory_report()["held"])
    # Half of the tensor: Linux counts pages roughly, and the first tensor also loads code.
    assert held > 2**25
    assert given_back < 2**25  # the negative control: the default of the C library
