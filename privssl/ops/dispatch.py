"""The native kernels, compiled at installation if there is a C++ compiler.

                                                                       used by
    pooled       convolution, pooling, group norm and ReLU as one     ops/fused_conv.py
    correlation  per-example gradients of a convolution               privacy/layer_gradients.py
    clipping     norms and clipped sums of rows' gradients            privacy/clipping.py
    noise        Gaussian noise, and sums with noise                  privacy/secure_noise.py,
                                                                      privacy/noisy_optimizer.py
    views        RandAugment and crops                                data/

Each has a binding here and a source in ``csrc``, compiled for several x86-64 instruction sets
(``setup.py``); the latest that the processor supports is loaded. Without a compiler, on other
processors, or with ``PRIVSSL_KERNELS=torch`` in the environment, torch computes everything: results
are the same up to rounding, and views to the bit. Each process that trains under DP tests the
kernels for clipping and noise first (``ops/self_test.py``).
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

#: Kernels that setup.py compiles, and the version of each one's interface.
KERNEL_VERSIONS = {"pooled": 2, "views": 1, "noise": 3, "correlation": 1, "clipping": 2}
#: Instruction sets, the latest first, with a test whether this processor has them.
INSTRUCTION_SETS: dict[str, Callable[[], bool]] = {
    "avx512": lambda: torch.cpu._is_avx512_supported(),
    "avx2": lambda: torch.cpu._is_avx2_supported(),
}


def instruction_set() -> str | None:
    """Return the instruction set in use, of ``INSTRUCTION_SETS``; None: torch computes all."""
    return None if _disabled.get() else _find_latest()


def available_for(numbers: torch.Tensor) -> bool:
    """Return whether kernels apply: float32 on the CPU, one thread, and kernels are loaded."""
    return (
        numbers.is_cpu
        and numbers.dtype == torch.float32
        and torch.get_num_threads() == 1
        and instruction_set() is not None
    )


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without gaps in memory, channels last; copy if needed."""
    if tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.contiguous()


@contextmanager
def disabled() -> Iterator[None]:
    """Let torch compute everything on this thread."""
    token = _disabled.set(True)
    try:
        yield
    finally:
        _disabled.reset(token)


_requested = os.environ.get("PRIVSSL_KERNELS", "")
_disabled = ContextVar("disabled", default=_requested == "torch")
if _requested not in ("", "torch"):
    log.warning(
        "PRIVSSL_KERNELS is %r in the environment and is ignored. Its only value is torch.",
        _requested,
    )


@cache
def _find_latest() -> str | None:
    """Return the latest instruction set that is compiled from this source and supported here."""
    for name in (name for name, is_supported in INSTRUCTION_SETS.items() if is_supported()):
        compiled = versions(name)
        if compiled == KERNEL_VERSIONS:
            return name
        if compiled:
            log.warning(
                "privssl/csrc was compiled from another version, so torch computes instead. "
                "Compile it again: pip install --editable ."
            )
            return None
    return None


def versions(instruction_set: str) -> dict[str, int]:
    """Return the version of each kernel compiled for an instruction set."""
    libraries = {kernel: library(kernel, instruction_set) for kernel in KERNEL_VERSIONS}
    return {k: getattr(lib, f"{k}_version")() for k, lib in libraries.items() if lib is not None}


@cache
def library(kernel: str, instruction_set: str) -> ctypes.CDLL | None:
    """Return a compiled kernel; None if it was not compiled for this instruction set."""
    file = next(Path(__file__).parent.glob(f"_{kernel}_{instruction_set}.*"), None)
    return None if file is None else ctypes.CDLL(str(file))


def function(name: str, *arguments: Any, result: Any = None) -> Callable[[str | None], Any]:
    """Return a kernel's function by instruction set; the kernel is the name's first word.

    Args:
        arguments, result: types of ctypes.
    """

    @cache
    def load(instruction_set: str | None) -> Any:
        kernel = library(name.partition("_")[0], instruction_set or "")
        assert kernel is not None, "callers check instruction_set() first"
        c_function = getattr(kernel, name)
        c_function.argtypes, c_function.restype = arguments, result
        return c_function

    return load


INT64_PTR = ctypes.POINTER(ctypes.c_int64)


def int64_array(numbers: Sequence[int]) -> "ctypes.Array[ctypes.c_int64]":
    """Return a C array of the numbers."""
    return _make_array_type(len(numbers))(*numbers)


@cache  # without the cache ctypes creates a new class at each call
def _make_array_type(count: int) -> "type[ctypes.Array[ctypes.c_int64]]":
    return ctypes.c_int64 * count
