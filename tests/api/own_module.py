"""A user's module, whose networks configs name as ``tests.api.own_module:Name``."""

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tests.api.digits import Net

__all__ = ["Net"]

NO_NETWORK = 3


class _Linear(nn.Module):
    """Base of the networks below: one linear layer over all pixels."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(torch.Size(shape).numel(), classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x.flatten(1))
        return logits


class Lazy(nn.Module):
    """Lazy layers, which infer their sizes from the first rows."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


class NormAct(nn.BatchNorm2d):
    """Batch norm with an activation, as in timm."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.Hardtanh(0.0, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.drop(super().forward(x)))
        return out


class Doubling(nn.BatchNorm2d):
    """Batch norm with a further operation that no library has."""

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
    """Accepts only images with three channels."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__((3, *shape[1:]), classes)


class Uneven(_Linear):
    """Has another architecture each time it is built."""

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
    """Has a dropout layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__(shape, classes)
        self.drop = nn.Dropout(0.5)


class Noisy(_Linear):
    """Draws random numbers in ``forward``."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand_like(x) * self.training)


class Centred(_Linear):
    """Subtracts the mean of the batch, so every row affects the others."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(dim=0))


class Remembering(_Linear):
    """Subtracts values of the previous call, so rows affect later batches."""

    last: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x) - self.last
        self.last = out.detach().mean()
        return out


class Tallying(_Linear):
    """Adds to a tensor in place that is no buffer; outputs do not change yet."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__(shape, classes)
        self.sums = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.sums[len(x) % 2] += 1
        return super().forward(x)


class Training(_Linear):
    """Stores state only while gradients are recorded."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.last = x.detach()
        return super().forward(x)


class Queueing(_Linear):
    """Stores previous inputs in a deque."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__(shape, classes)
        self.queue = deque[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.queue.append(x.detach())
        return super().forward(x)


class _Mean:
    """A running mean that is no buffer of a layer."""

    value = torch.zeros(())

    def update(self, x: Tensor) -> None:
        self.value = 0.5 * self.value + 0.5 * x.detach().mean()


class Centring(_Linear):
    """Centres each row by itself in training, and by a running mean in evaluation."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__(shape, classes)
        self.mean = _Mean()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x - self.mean.value)
        self.mean.update(x)
        return super().forward(x - x.mean(dim=(1, 2, 3), keepdim=True))


class Halving(_Linear):
    """Returns half of its parameters from ``parameters``."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter([*super().parameters(recurse)][:1])


class Counting(_Linear):
    """Stores a number that changes no output yet."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Branching(_Linear):
    """Branches on a row's values, which vmap does not support."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if bool((x.sum() > 0).item()) else 1.0)


class Buffered(_Linear):
    """Has a buffer, which would be sent without noise."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__(shape, classes)
        self.register_buffer("scale", torch.ones(1))


class InPlace(_Linear):
    """Modifies a layer's output in place."""

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
    """Functional dropout, which stays active in evaluation by default."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5))


class Mixing(_Linear):
    """A softmax over the rows of a batch, not over classes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(dim=0)


class Squeezing(_Linear):
    """Drops the batch dimension of a batch of one row."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze()


MODULE = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 7))


class Listed(_Linear):
    """A layer in a list, which torch does not know."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__(shape, classes)
        self.first = [nn.Linear(64, 64)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first[0](x.flatten(1)).relu())


class Projecting(_Linear):
    """A random projection that is no buffer."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__(shape, classes)
        self.by = torch.randn(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1) @ self.by)


class ProjectingByBuffer(Projecting):
    """The same with a buffer, which a state dict has."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__(shape, classes)
        by = self.by
        del self.by
        self.register_buffer("by", by)
