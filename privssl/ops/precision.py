"""Networks that multiply in bfloat16.

Convolutions and linear layers round rows and weights to bfloat16 and add in float32
(torch.autocast); weights, their gradients, optimisers and averages stay float32.
docs/performance.md has step times; a processor without bfloat16 instructions is several times
slower.

DP-SGD refuses it: per-example gradients are clipped and noised in float32. A label census may use
it, because it releases counts.
"""

import platform
from functools import cache
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from privssl.ops import dispatch

Precision = Literal["float32", "bfloat16"]
Network = TypeVar("Network", bound=nn.Module)


#: Faster in bfloat16 with large batches (docs/performance.md); the others are not.
WIDE = ("small_cnn", "resnet9", "wresnet28x2")
POOLED = ("small_cnn",)  # except with the fused kernels


def fastest_precision(classifier: str, device: str) -> Precision:
    """Return the faster precision of a classifier on this machine, as far as measured.

    Args:
        classifier: as ``model.name``.
        device: as ``run.device``.
    """
    is_faster = classifier in WIDE and not (classifier in POOLED and dispatch.instruction_set())
    use_bfloat16 = _is_on_cpu(device) and has_instructions() and is_faster
    return "bfloat16" if use_bfloat16 else "float32"


def is_emulated(precision: Precision | Literal["auto"], device: str) -> bool:
    """Return whether this processor lacks bfloat16 instructions; arguments as in ``run``."""
    x86 = platform.machine() in ("x86_64", "AMD64")  # unknown for others
    return precision == "bfloat16" and _is_on_cpu(device) and x86 and not has_instructions()


def has_instructions() -> bool:
    """Return whether this x86 processor has bfloat16 instructions."""
    supported: bool = torch.cpu._is_avx512_bf16_supported()
    return supported


def _is_on_cpu(device: str) -> bool:
    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())


def in_precision(kind: type[Network], precision: Precision) -> type[Network]:
    """Return a subclass with that precision in its forward pass, and float32 output.

    Parameters, their names and initial values are those of ``kind``.
    """
    narrow: type[Network] = _make_narrow_class(kind)  # type: ignore[arg-type]  # a type has a hash
    return kind if precision == "float32" else narrow


def precision_of(network: nn.Module) -> Precision:
    """Return the precision of a network's multiplications."""
    precision: Precision = getattr(network, "precision", "float32")
    return precision


@cache
def _make_narrow_class(kind: type[nn.Module]) -> type:
    class Narrow(kind):  # type: ignore[misc, valid-type]
        precision: Precision = "bfloat16"

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for module in self.modules():
                if isinstance(module, nn.GroupNorm):
                    module.register_forward_pre_hook(upcast)

        def forward(self, x: Tensor, *others: Any) -> Tensor | tuple[Tensor, ...]:
            with torch.autocast(x.device.type, torch.bfloat16):
                out = super().forward(x, *others)
            if isinstance(out, tuple):  # images of a variational generator, and KL divergences
                return tuple(part.float() for part in out)
            converted: Tensor = out.float()
            return converted

    Narrow.__name__ = Narrow.__qualname__ = f"Narrow{kind.__name__}"
    return Narrow


def upcast(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Convert group norm's input to float32: in bfloat16 it is ten times slower on a CPU."""
    return (inputs[0].float(),)
