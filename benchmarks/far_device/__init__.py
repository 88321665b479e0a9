"""A torch device apart from the CPU, for machines without a GPU.

``begin()`` compiles ``far.cpp`` (with a C++ compiler and ninja, once, half a minute) and registers
the device ``far`` with torch. As with a GPU, operations that mix its tensors with CPU tensors or
numpy fail. Its kernels are the CPU's, so a correct run has the CPU's bits. It cannot show a GPU's
arithmetic, speed, memory or asynchronous execution.

It counts its operations (``Asked``). The time of a small network's step on a GPU is the time to
launch them.

torch accepts one such device per process, for the life of the process: begin it in a separate
process. Runs on it refuse worker processes, as on a GPU.
"""

import hashlib
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.backend_registration import rename_privateuse1_backend

from privssl.errors import UserError
from privssl.storage import atomic_files

NAME = "far"
OLDEST = 2, 14  # torch
#: Operations that launch no kernel.
FREE = ("is_set_to", "resize_", "set_", "record_stream", "unfold", "_local_scalar_dense")
#: Operations that make the program wait: it continues by a number that they return.
ANSWERED = ("_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "_unique2",
            "unique_dim", "allclose")  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """Counts of the device's operations."""

    kernels: int  # operations; a few of them are more than one kernel on a GPU
    to: int  # copies of tensors to the device
    back: int  # copies from it: the program waits for each
    answers: int  # numbers that the program waited for
    by_name: Mapping[str, int]  # all operations, by torch's names

    @property
    def waits(self) -> int:
        """Return how often the program waited for the device."""
        return self.back + self.answers


def why_not() -> str | None:
    """Return why it cannot begin here, as half a sentence; None if it can."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
        return "it is written for the C++ interface of torch 2.14"
    missing = [tool for tool in ("c++", "ninja") if shutil.which(tool, path=_search_path()) is None]
    if missing:
        return f"there is no {' and no '.join(missing)} to compile it with"
    if torch.accelerator.is_available():
        return f"torch has a device here, {torch.accelerator.current_accelerator()}"
    return None


def begin() -> torch.device:
    """Register the device with torch and return it.

    Raises:
        UserError: it is not available here (``why_not``).
        RuntimeError: it did not compile.
    """
    if reason := why_not():
        raise UserError(f"Nothing can be counted here: {reason}")
    from torch.utils.cpp_extension import get_default_build_root, load  # it searches compilers

    os.environ["PATH"] = _search_path()
    code = (Path(__file__).parent / "far.cpp").read_bytes()
    # By content, so that clones with one environment share the compiled file.
    digest = hashlib.sha256(code + f"{torch.__version__} {sys.version}".encode()).hexdigest()[:16]
    name = f"privssl_far_device_{digest}"
    folder = Path(get_default_build_root(), name)
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "far.cpp"
    if not source.exists():
        atomic_files.replace(source, code)
    load(
        name, [str(source)], extra_cflags=["-O1"], is_python_module=False,
        build_directory=str(folder),
    )  # fmt: skip
    rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _DeviceModule(NAME))
    return torch.device(NAME)


def asked() -> Asked:
    """Return the counts since the previous call."""
    counts: dict[str, int] = torch.ops.far_device.take_counts()
    names = {name: name.removeprefix("aten::").partition(".")[0] for name in counts}
    answers = sum(counts[name] for name, short in names.items() if short in ANSWERED)
    copies = {"to": counts.get("to", 0), "from": counts.get("from", 0)}
    kernels = sum(n for name, n in counts.items() if names[name] not in (*FREE, *copies))
    return Asked(kernels, copies["to"], copies["from"], answers, counts)


def _search_path() -> str:
    """Return the PATH to search: pip puts ninja beside Python."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])


class _DeviceModule(ModuleType):
    """The device module that torch expects. Random numbers come from the CPU's generator."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: the CPU's generator is seeded already."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)
