"""A module of a user's, whose networks configs name as ``tests.api.own_module:Name``."""

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tests.api.digits import Net

__all__ = ["Net"]

NO_NETWORK = 3


class _Linear(nn.Module):
    """What the networks below have in common: one linear layer over all pixels."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(torch.Size(shape).numel(), classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x.flatten(1))
        return logits


class Lazy(nn.Module):
    """Its layers learn their sizes from the first rows."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


class NormAct(nn.BatchNorm2d):
    """Batch norm and more, as timm has it."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.Hardtanh(0.0, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.drop(super().forward(x)))
        return out


class Doubling(nn.BatchNorm2d):
    """Batch norm and more, which nobody can know."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def with_norm_act(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return nn.Sequential(NormAct(shape[0]), Lazy(shape, classes))


def with_doubling(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return nn.Sequential(Doubling(shape[0]), Lazy(shape, classes))


class Wide(_Linear):
    """Has one output too many."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__(shape, classes + 1)


class Coloured(_Linear):
    """Takes images of three channels alone."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__((3, *shape[1:]), classes)


class Uneven(_Linear):
    """Is built otherwise each time."""

    built = 0

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__(shape, classes)
        Uneven.built += 1
        nn.init.constant_(self.head.bias, Uneven.built)


class Broken(_Linear):
    """Cannot be built."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        raise ValueError("I need a GPU")


class Dropping(_Linear):
    """Draws chance as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__(shape, classes)
        self.drop = nn.Dropout(0.5)


class Noisy(_Linear):
    """Draws chance by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand_like(x) * self.training)


class Centred(_Linear):
    """Takes the mean of the batch away: every row reaches the others."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(dim=0))


class Remembering(_Linear):
    """Takes away what it saw in the last call: rows reach those of later batches."""

    last: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x) - self.last
        self.last = out.detach().mean()
        return out


class Tallying(_Linear):
    """Adds to a tensor in place, which is no buffer, and changes no output yet."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__(shape, classes)
        self.sums = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.sums[len(x) % 2] += 1
        return super().forward(x)


class Training(_Linear):
    """Remembers where there are gradients, and not where one looks."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.last = x.detach()
        return super().forward(x)


class Queueing(_Linear):
    """Keeps what it saw in a queue that is no list."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__(shape, classes)
        self.queue = deque[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.queue.append(x.detach())
        return super().forward(x)


class _Mean:
    """A running mean, as other projects have it: no tensor of a layer."""

    value = torch.zeros(())

    def update(self, x: Tensor) -> None:
        self.value = 0.5 * self.value + 0.5 * x.detach().mean()


class Centring(_Linear):
    """Centres each row in training, and by a running mean in evaluation."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__(shape, classes)
        self.mean = _Mean()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x - self.mean.value)
        self.mean.update(x)
        return super().forward(x - x.mean(dim=(1, 2, 3), keepdim=True))


class Halving(_Linear):
    """Lists half of its parameters to optimisers."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter([*super().parameters(recurse)][:1])


class Counting(_Linear):
    """Keeps a number that changes no output yet."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Branching(_Linear):
    """Decides by a row's numbers, which vmap cannot."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if bool((x.sum() > 0).item()) else 1.0)


class Buffered(_Linear):
    """Has a buffer, which would be sent as it is."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__(shape, classes)
        self.register_buffer("scale", torch.ones(1))


class InPlace(_Linear):
    """Changes a layer's output in place."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        out += 1.0
        return out


class Detached(_Linear):
    """A network whose outputs have no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


class Frozen(_Linear):
    """A network with a trained bias and frozen weights."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__(shape, classes)
        self.head.weight.requires_grad_(False)


class DroppingAlways(_Linear):
    """Dropout that is not switched off in evaluation: its default as a function."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5))


class Mixing(_Linear):
    """A softmax over the rows of a batch, not over classes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(dim=0)


class Squeezing(_Linear):
    """A network that drops the batch's dimension where it has one row."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze()


MODULE = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 7))
