"""Write config_networks.md: python docs/generate_networks.py.

The size of every network of ``model.name`` beside what SemiFL's paper prints. FLOPs are counted by
torch on tensors without values.
"""

from pathlib import Path

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from privssl.models import CLASSIFIERS
from privssl.storage import atomic_files

DOCS = Path(__file__).resolve().parent
PAGE = "config_networks.md"
CLASSES = 10
#: Rows on which a network is counted; text_cnn and gru: 40 words of 384 numbers.
GREY, COLOUR, WORDS, VECTOR = (1, 28, 28), (3, 32, 32), (40, 384), (384,)
ROWS: dict[str, tuple[tuple[int, ...], ...]] = {
    "lenet": (GREY,), "lenet32": (COLOUR,), "trinet_cnn": (GREY,), "trinet_svhn": (COLOUR,),
    "linear": (VECTOR,), "mlp": (VECTOR,), "text_cnn": (WORDS,), "gru": (WORDS,),
}  # fmt: skip
#: Network -> parameters, FLOPs and MB of SemiFL's Table 3.
PAPER = {
    "wresnet28x2": "1.5 M, 433 M, 5.6", "fedavg_cnn": "2.2 M, 71 M, 8.2",
    "resnet18_3x3": "11.2 M, 1.1 G, 42.6", "alexnet": "6.5 M, 91 M, 24.9",
    "resnet9": "4.9 M, 509 M, 18.7",
}  # fmt: skip
TEXT = """\
# Networks

Look up the size of a network here. `docs/generate_networks.py` writes this page from the code, and
a test compares both, so do not edit it by hand.

Weights, and FLOPs of matrix products and convolutions in one row's forward pass (a multiply-add is
two), with ten classes, `model.width: 16` and `model.norm: group`. A training step takes about three
times a forward pass. MB are 2^20 bytes of float32 weights. Half of `model.width` is about a quarter
of the FLOPs.

The last column is what SemiFL's Table 3 prints: parameters, FLOPs, MB. It does not say how it
counts them.

| `model.name` | row | weights | FLOPs | MB | SemiFL's Table 3 |
|---|---|---|---|---|---|
{rows}
"""


def count(network: nn.Module, shape: tuple[int, ...]) -> tuple[int, int]:
    """Weights, and FLOPs for a row of this shape, of a network on the meta device."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network.eval()(torch.empty(1, *shape, device="meta"))
    weights = sum(weight.numel() for weight in network.parameters())
    return weights, int(counter.get_total_flops())


def page() -> str:
    """The page."""
    lines = []
    for name, kind in CLASSIFIERS.items():
        for shape in ROWS.get(name, (GREY, COLOUR)):
            with torch.device("meta"):
                built = kind(shape, CLASSES, norm="group")
            weights, work = count(built, shape)
            printed = PAPER.get(name, "") if shape == COLOUR else ""
            row = "x".join(map(str, shape))
            size = f"{4 * weights / 2**20:.1f}"
            lines.append(f"| `{name}` | {row} | {weights:,} | {work:,} | {size} | {printed} |")
    return TEXT.format(rows="\n".join(lines))


def main() -> None:
    """Write the page."""
    atomic_files.write(DOCS / PAGE, page().encode())


if __name__ == "__main__":
    main()
