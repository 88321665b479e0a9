"""RandAugment (Cubuk et al. 2020) in three variants, on batches: ``RANDAUGMENTS``.

A view applies a few operations sampled for each image. The variants are those of SemiFL
("fixmatch"), FedMatch ("fedmatch") and FedSEAL ("fedseal"). The mirroring and cropping that SemiFL
and FedSEAL do first are in ``augmentations.view``.

The operations are PIL's (``image_operations.py``). On a CPU a compiled kernel applies them image by
image; elsewhere images with the same operation are batched. The bits of a view are the same.

Images that are not 8-bit are rounded to integer levels. On images without three channels ``color``
has no effect, but counts as one of the operations.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from privssl.data import image_operations as ops
from privssl.data.image_operations import BLACK, TOP, Change, Rotate, Shear, Translate
from privssl.ops import image_transforms

COLUMNS = 6  # random numbers per operation: which, whether, strength, sign, from top, from left


@dataclass(frozen=True)
class Operation:
    """One operation, and its amounts at strength 0 and 1."""

    change: Change
    weakest: float = 0.0
    strongest: float = 0.0
    either_way: bool = False  # mirror the amount at ``weakest`` with probability 1/2


@dataclass(frozen=True)
class RandAugment:
    """A variant; call it with images to get one view of each.

    Args:
        operations: drawn uniformly, with replacement.
        count: operations per image.
        chance: probability that a drawn operation is applied. In (0, 1].
        strength: "full": 1 always; "uniform": from [0, 1) for each operation; "steps": k / 9 with
            k below a bound that is one of 2 to 5 for each image (FedMatch).
    """

    operations: tuple[Operation, ...]
    count: int
    chance: float
    strength: Literal["full", "uniform", "steps"]

    def __call__(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """Return one view of each row.

        Args:
            x: images (B, Ch, H, W), float32 in [-1, 1]; not written to.
            rng: a generator on the CPU. Row i of one draw (B, 1 + 6 count) is the only randomness
                of view i, so views are independent of other rows.

        Returns:
            (B, Ch, H, W) in [-1, 1], in x's memory format: 256 levels as in
                ``local_training.network_input``.
        """
        chance = torch.rand(len(x), 1 + COLUMNS * self.count, generator=rng).to(x.device)
        sampled = self._draw_changes(chance)
        if self._kernel_kinds is not None and image_transforms.available(x):
            return image_transforms.apply_change(x, self._kernel_kinds, *sampled)
        levels = ((x + 1) * 127.5).round_().clamp_(BLACK, TOP).contiguous()
        for change in zip(*(values.unbind(dim=1) for values in sampled), strict=True):
            self._apply_changes(levels, *change)
        channels_last = x.is_contiguous(memory_format=torch.channels_last)
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        return levels.div_(127.5).sub_(1).contiguous(memory_format=memory_format)

    def _draw_changes(self, chance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sample the operations of each image from random numbers (B, 1 + 6 count).

        Returns:
            which: (B, count) index in ``operations``, or -1: none.
            amount: (B, count).
            place: (B, count, 2) in [0, 1).
        """
        uniform = chance[:, 1:].view(len(chance), self.count, COLUMNS)
        which = (len(self.operations) * uniform[..., 0]).long()
        weakest, span, mirrored = self._amounts.to(chance.device)[:, which]
        sign = torch.where((mirrored > 0) & (uniform[..., 3] < 0.5), -1.0, 1.0)
        strength = self._compute_strengths(chance[:, :1], uniform[..., 2])
        amount = weakest + strength * span * sign
        return which.masked_fill_(uniform[..., 1] >= self.chance, -1), amount, uniform[..., 4:]

    @cached_property
    def _amounts(self) -> Tensor:
        """Return weakest, strongest - weakest, and either_way of each operation (3, operations)."""
        return torch.tensor(
            [(o.weakest, o.strongest - o.weakest, o.either_way) for o in self.operations]
        ).T

    @cached_property
    def _kernel_kinds(self) -> list[image_transforms.Kind] | None:
        """Return the kernel's names of the operations; None if it lacks one."""
        kinds = [ops.kind(operation.change) for operation in self.operations]
        return [k for k in kinds if k is not None] if None not in kinds else None

    def _compute_strengths(self, of_image: Tensor, of_operation: Tensor) -> Tensor:
        """Return strengths (B, count) in [0, 1] from random numbers (B, 1) and (B, count)."""
        if self.strength == "full":
            return torch.ones_like(of_operation)
        if self.strength == "uniform":
            return of_operation
        bound = 2 + (4 * of_image).floor()  # M of FedMatch: 2, 3, 4 or 5
        return (bound * of_operation).floor() / 9

    def _apply_changes(self, levels: Tensor, which: Tensor, amount: Tensor, place: Tensor) -> None:
        """Apply one operation to each image, in place. which, amount (B,), place (B, 2)."""
        order = which.argsort(stable=True)
        sizes = torch.bincount(which + 1, minlength=1 + len(self.operations)).tolist()
        # images of each operation; those without an operation come first
        _, *groups = torch.split(order, sizes)
        for operation, rows in zip(self.operations, groups, strict=True):
            if operation.change is ops.identity or not len(rows):
                continue
            changed = operation.change(levels[rows], amount[rows], place[rows])
            levels.index_copy_(0, rows, changed.clamp_(BLACK, TOP).round_())


# Variants -----------------------------------------------------------------------------------

#: SemiFL's code: two of 15 operations per image, each with probability 0.5 (there: from U(0.2,
#: 0.8), which is equivalent) at full strength. Its constants are for larger images: a shift by 100
#: pixels blanks an image of 32, so 15.5% of the views are blank, as in SemiFL's results.
FIXMATCH = RandAugment(
    operations=(
        Operation(ops.autocontrast),
        Operation(ops.equalize),
        Operation(ops.invert),
        Operation(ops.posterize, 4, 4),
        Operation(ops.brightness, 1, 1.9),
        Operation(ops.color, 1, 1.9),
        Operation(ops.contrast, 1, 1.9),
        Operation(ops.sharpness, 1, 1.9),
        Operation(ops.solarize, 0, 0),
        Operation(Rotate(BLACK), 0, 30, either_way=True),
        Operation(Shear("x", 2), 0, 0.3, either_way=True),
        Operation(Shear("y", 2), 0, 0.3, either_way=True),
        Operation(Translate("x", "pixel"), 0, 100, either_way=True),
        Operation(Translate("y", "pixel"), 0, 100, either_way=True),
        Operation(ops.cutout, 40, 40),
    ),
    count=2,
    chance=0.5,
    strength="full",
)

#: FedMatch's code: six of 13 operations per image at small strengths. Its "equalize" has no effect;
#: rotation is by 0, 40, 80, 120 or 160 degrees counter-clockwise.
FEDMATCH = RandAugment(
    operations=(
        Operation(Shear("x", 4), 0, 0.3, either_way=True),
        Operation(Shear("y", 4), 0, 0.3, either_way=True),
        Operation(Translate("x", "side"), 0, 0.2, either_way=True),
        Operation(Translate("y", "side"), 0, 0.2, either_way=True),
        Operation(Rotate(128.0), 0, 360),
        Operation(ops.solarize, 256, 231),
        Operation(ops.color, 1, 1.9, either_way=True),
        Operation(ops.sharpness, 1, 1.9, either_way=True),
        Operation(ops.contrast, 1, 1.5, either_way=True),
        Operation(ops.brightness, 1, 1.3, either_way=True),
        Operation(ops.posterize, 8, 4),
        Operation(ops.autocontrast),
        Operation(ops.identity),  # named equalize
    ),
    count=6,
    chance=1.0,
    strength="steps",
)

#: FedSEAL (the paper says RandAugment only; ours): two of FixMatch's 14 operations per image, each
#: with probability 0.5, at a random strength.
FEDSEAL = RandAugment(
    operations=(
        Operation(ops.autocontrast),
        Operation(ops.equalize),
        Operation(ops.identity),
        Operation(ops.brightness, 0.05, 0.95),
        Operation(ops.color, 0.05, 0.95),
        Operation(ops.contrast, 0.05, 0.95),
        Operation(ops.sharpness, 0.05, 0.95),
        Operation(ops.posterize, 3.5, 8.5),  # rounded: 4 to 8 bits, equally likely
        Operation(ops.solarize, 0, 256),
        Operation(Rotate(BLACK), 0, 30, either_way=True),
        Operation(Shear("x", 1), 0, 0.3, either_way=True),
        Operation(Shear("y", 1), 0, 0.3, either_way=True),
        Operation(Translate("x", "side"), 0, 0.3, either_way=True),
        Operation(Translate("y", "side"), 0, 0.3, either_way=True),
    ),
    count=2,
    chance=0.5,
    strength="uniform",
)

RANDAUGMENTS = {"fixmatch": FIXMATCH, "fedmatch": FEDMATCH, "fedseal": FEDSEAL}
