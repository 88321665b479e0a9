"""Networks that multiply in bfloat16 and speak float32.

Convolutions and linear layers of a narrow network read their rows and weights rounded to
bfloat16 (8 bits of fraction) and add up in float32 (torch.autocast); weights, gradients of
weights, optimisers, averages and everything outside of ``forward`` stay float32. On a CPU with
AVX-512 BF16 or AMX a training step takes from half the time to a little more than all of it:
kernels of our own, which some networks have, are as fast in float32 (docs/performance.md). On a
processor without, it takes several times as long.

Runs under DP-SGD refuse it: their per-row gradients are clipped and noised in float32. A label
census takes it: what it releases are counts.
"""

import platform
from functools import cache
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from privssl.ops import dispatch

Precision = Literal["float32", "bfloat16"]
Network = TypeVar("Network", bound=nn.Module)


#: Their training steps take less time where batches are large, and never much more
#: (docs/performance.md); those of LeNet and of FedTriNet's CNN take as long, or longer.
WIDE = ("small_cnn", "resnet9", "wresnet28x2")
POOLED = ("small_cnn",)  # not so, where kernels of our own do their layers


def fastest_precision(classifier: str, device: str) -> Precision:
    """The precision in which this machine trains a classifier faster, as far as it was measured:
    bfloat16 on a CPU that has instructions for it.

    Args:
        classifier: as ``model.name``.
        device: as ``run.device``.
    """
    gains = classifier in WIDE and not (classifier in POOLED and dispatch.instruction_set())
    narrow = _on_cpu(device) and has_instructions() and gains
    return "bfloat16" if narrow else "float32"


def is_emulated(precision: Precision | Literal["auto"], device: str) -> bool:
    """Whether this machine multiplies so by way of other instructions, and takes longer.

    Args:
        precision, device: as in section ``run``.
    """
    x86 = platform.machine() in ("x86_64", "AMD64")  # of others it is not known
    return precision == "bfloat16" and _on_cpu(device) and x86 and not has_instructions()


def has_instructions() -> bool:
    """Whether the processor, of x86, has instructions for bfloat16."""
    found: bool = torch.cpu._is_avx512_bf16_supported()
    return found


def _on_cpu(device: str) -> bool:
    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())


def in_precision(kind: type[Network], precision: Precision) -> type[Network]:
    """A class of networks, with its forward pass in that precision; its output is float32.

    Parameters, their names and their initial values are those of ``kind``.
    """
    narrow: type[Network] = _narrow(kind)  # type: ignore[arg-type]  # a type has a hash
    return kind if precision == "float32" else narrow


def precision_of(network: nn.Module) -> Precision:
    """In which a network multiplies."""
    found: Precision = getattr(network, "precision", "float32")
    return found


@cache
def _narrow(kind: type[nn.Module]) -> type:
    class Narrow(kind):  # type: ignore[misc, valid-type]
        precision: Precision = "bfloat16"

        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            for module in self.modules():
                if isinstance(module, nn.GroupNorm):
                    module.register_forward_pre_hook(upcast)

        def forward(self, x: Tensor, *others: Tensor) -> Tensor:
            with torch.autocast(x.device.type, torch.bfloat16):
                out: Tensor = super().forward(x, *others)
            return out.float()

    Narrow.__name__ = Narrow.__qualname__ = f"Narrow{kind.__name__}"
    return Narrow


def upcast(_: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
    """Group norm reads float32: in bfloat16 it takes ten times as long on a CPU."""
    return (given[0].float(),)
