"""A device for torch that is not the CPU, on a machine that has nothing else.

``begin()`` compiles ``far.cpp`` (by a C++ compiler and ninja, once: half a minute) and makes the
device ``far`` known to torch. The CPU and numpy refuse its tensors and it refuses theirs, as a
GPU's; its kernels are the CPU's, so that a run there gives the CPU's bits, or something is not
computed where it seems to be. It cannot show a GPU's own arithmetic, its speed and memory, or what
comes of its doing things later than they are asked for.

It counts what it is asked for (``Asked``). A step of a small network takes a GPU as long as it
takes to ask.

torch knows one such device in a process, and for all of the process' life: begin it in one of its
own. Runs there refuse worker processes, as beside a GPU.
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
#: What starts no kernel.
FREE = ("is_set_to", "resize_", "set_", "record_stream", "unfold", "_local_scalar_dense")
#: What a program has to wait for: how many numbers there are, or what a number is, decides how it
#: goes on.
ANSWERED = ("_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "_unique2",
            "unique_dim", "allclose")  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What the device was asked for."""

    kernels: int  # operations; a few of them are more than one kernel on a GPU
    to: int  # copies of tensors to the device
    back: int  # copies from it: the program waits for each
    answers: int  # numbers that the program waited for
    by_name: Mapping[str, int]  # all of it, as torch calls it

    @property
    def waits(self) -> int:
        """How often the program could not go on before the device was done with everything."""
        return self.back + self.answers


def why_not() -> str | None:
    """Why it cannot be begun here, as half a sentence; None: it can."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
        return "it is written for the C++ interface of torch 2.14"
    missing = [tool for tool in ("c++", "ninja") if shutil.which(tool, path=_path()) is None]
    if missing:
        return f"there is no {' and no '.join(missing)} to compile it with"
    if torch.accelerator.is_available():
        return f"torch has a device here, {torch.accelerator.current_accelerator()}"
    return None


def begin() -> torch.device:
    """The device, made known to torch.

    Raises:
        UserError: there can be none here (``why_not``).
        RuntimeError: it did not compile.
    """
    if reason := why_not():
        raise UserError(f"Nothing can be counted here: {reason}")
    from torch.utils.cpp_extension import get_default_build_root, load  # it looks for compilers

    os.environ["PATH"] = _path()
    code = (Path(__file__).parent / "far.cpp").read_bytes()
    # By content, so that clones with one environment share what one of them has compiled.
    known = hashlib.sha256(code + f"{torch.__version__} {sys.version}".encode()).hexdigest()[:16]
    name = f"privssl_far_device_{known}"
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
    torch._register_device_module(NAME, _Module(NAME))
    return torch.device(NAME)


def asked() -> Asked:
    """What the device was asked for since this was called before."""
    found: dict[str, int] = torch.ops.far_device.take_counts()
    names = {name: name.removeprefix("aten::").partition(".")[0] for name in found}
    answers = sum(found[name] for name, short in names.items() if short in ANSWERED)
    copies = {"to": found.get("to", 0), "from": found.get("from", 0)}
    kernels = sum(n for name, n in found.items() if names[name] not in (*FREE, *copies))
    return Asked(kernels, copies["to"], copies["from"], answers, found)


def _path() -> str:
    """Where programs are looked for: pip puts ninja beside Python."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])


class _Module(ModuleType):
    """What torch asks about a device. Random numbers are drawn from the CPU's generator."""

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
        """The CPU's generator has been given it already."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)
