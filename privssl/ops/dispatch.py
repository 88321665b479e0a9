"""Kernels of our own, compiled when privssl is installed, where there is a C++ compiler.

                                                                     asked for by
    pooled       a convolution with what surrounds it                ops/fused_conv.py
    correlation  gradients of a convolution's weights, of each row   privacy/layer_gradients.py
    clipping     norms and sums of rows' gradients                   privacy/clipping.py
    noise        normal numbers from random words, sums with them    privacy/dp_sgd.py,
    privacy/noisy_optimizer.py
    views        RandAugment and crops                               data/

Each, a .py and a .cpp, is made for several generations of x86-64 processors (``setup.py``), and the
latest that this one understands is loaded. Without a compiler, or on other processors, there is
none, and torch's kernels do all work: results are the same but for rounding, and views to the bit.
``PRIVSSL_KERNELS=torch`` in the environment asks for that. Those that clip rows, draw noise and add
it are held against plain arithmetic in each process that trains with noise (``ops/self_test.py``).
"""

import ctypes
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("privssl")

#: What setup.py compiles, and the version of what is called there, as its source has it.
INSTRUCTION_SETS = {
    "pooled": 2,
    "views": 1,
    "noise": 3,
    "correlation": 1,
    "clipping": 2,
}
#: Names of what it is compiled for, the latest first, and whether this processor understands it.
GENERATIONS: dict[str, Callable[[], bool]] = {
    "avx512": lambda: torch.cpu._is_avx512_supported(),
    "avx2": lambda: torch.cpu._is_avx2_supported(),
}


def instruction_set() -> str | None:
    """Which of ``GENERATIONS`` does the work; None: torch's kernels do all of it."""
    return None if _disabled.get() else _latest()


def available_for(numbers: torch.Tensor) -> bool:
    """Whether kernels are there for such numbers, and torch does not use several threads."""
    return (
        numbers.is_cpu
        and numbers.dtype == torch.float32
        and torch.get_num_threads() == 1
        and instruction_set() is not None
    )


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers without gaps, channels last in memory; copied if need be."""
    if tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.contiguous()


@contextmanager
def disabled() -> Iterator[None]:
    """Inside, on this thread, torch's kernels do all work."""
    before = _disabled.set(True)
    try:
        yield
    finally:
        _disabled.reset(before)


_asked = os.environ.get("PRIVSSL_KERNELS", "")
_disabled = ContextVar("torch_alone", default=_asked == "torch")
if _asked not in ("", "torch"):
    log.warning(
        "PRIVSSL_KERNELS is %r in the environment, and torch is all that it can be. Nothing "
        "follows from it.", _asked,
    )  # fmt: skip


@cache
def _latest() -> str | None:
    """The latest generation that was compiled from this source and that this processor knows."""
    for name in (name for name, known in GENERATIONS.items() if known()):
        found = versions(name)
        if found == INSTRUCTION_SETS:
            return name
        if found:
            log.warning(
                "privssl/csrc was compiled from another version, and torch's kernels do its "
                "work. To compile it anew: pip install --editable ."
            )
            return None
    return None


def versions(instruction_set: str) -> dict[str, int]:
    """Of what was compiled for it."""
    there = {kernel: library(kernel, instruction_set) for kernel in INSTRUCTION_SETS}
    return {k: getattr(held, f"{k}_version")() for k, held in there.items() if held is not None}


@cache
def library(kernel: str, instruction_set: str) -> ctypes.CDLL | None:
    """One of ``INSTRUCTION_SETS`` as it was compiled for a generation; None: it was not."""
    file = next(Path(__file__).parent.glob(f"_{kernel}_{instruction_set}.*"), None)
    return None if file is None else ctypes.CDLL(str(file))


def function(name: str, *arguments: Any, result: Any = None) -> Callable[[str | None], Any]:
    """A function of a kernel, which its name begins with: of each generation, as ctypes calls it.

    Args:
        arguments, result: types of ctypes.
    """

    @cache
    def of(instruction_set: str | None) -> Any:
        held = library(name.partition("_")[0], instruction_set or "")
        assert held is not None, "who calls has asked for generation()"
        found = getattr(held, name)
        found.argtypes, found.restype = arguments, result
        return found

    return of


INT64_PTR = ctypes.POINTER(ctypes.c_int64)  # of structures whose fields are all so wide


def int64_array(numbers: Sequence[int]) -> "ctypes.Array[ctypes.c_int64]":
    """Fields of structures, one behind the other."""
    return _count_type(len(numbers))(*numbers)


@cache  # ctypes would make a class anew at each call
def _count_type(count: int) -> "type[ctypes.Array[ctypes.c_int64]]":
    return ctypes.c_int64 * count
