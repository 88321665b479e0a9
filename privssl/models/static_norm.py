"""Static batch norm: batch statistics in training, statistics of whole data sets in evaluation.

Diao, Ding, Tarokh (HeteroFL, ICLR 2021; SemiFL, NeurIPS 2022). A running average in training would
mix agents whose data differ, so training writes no statistics. Afterwards :func:`collect` passes
all batches of some rows through the network once and stores for each layer

    running_mean  the plain mean over batches of the batch means
    running_var   the plain mean over batches of the unbiased batch variances

as the authors' code does. While collecting, each layer normalises by its own batch. So statistics
of several agents, averaged by number of batches, equal one collection over all of them. A last
batch of one row would count as much as one of 250, and batches of one class vary too little: SemiFL
shuffles an agent's rows, cuts them into batches of nearly one size and averages by number of rows.

The statistics are buffers in the state dict. If ``num_batches_tracked`` is 0, evaluation uses batch
statistics too, as the authors' code does.

Rows of a batch are coupled: private runs refuse the layer as a batch norm
(``privacy.independence.refuse_coupling_layers``).
"""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from privssl.errors import UserError


class StaticNorm(nn.BatchNorm2d):
    """Batch norm over (B, channels, H, W) whose statistics come only from ``collect``."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-5, momentum=None)
        self.collecting = False

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the batch and its pixels; by the collected statistics in evaluation."""
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        if self.collecting:
            self._add_batch(x)
        by_batch = self.training or self.collecting or not int(self.num_batches_tracked)
        # nn.functional would refuse a batch with one value per channel.
        return torch.batch_norm(
            x,
            self.weight,
            self.bias,
            None if by_batch else self.running_mean,
            None if by_batch else self.running_var,
            by_batch,
            0.0,
            self.eps,
            torch.backends.cudnn.enabled,
        )

    def _add_batch(self, x: Tensor) -> None:
        """Add one batch to the averages. The variance of a single value is 0."""
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        single = x.numel() == self.num_features
        # Statistics are float32 in every precision. (channels,) each
        var, mean = torch.var_mean(x.float(), dim=(0, 2, 3), correction=0 if single else 1)
        self.num_batches_tracked += 1
        share = 1 / int(self.num_batches_tracked)
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(var, share)


def as_batch_norms(model: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode with batch norms of the collected statistics.

    So an exported graph has no branch on the existence of statistics. Raises UserError if nothing
    was collected.
    """
    converted = copy.deepcopy(model).eval()
    for parent in list(converted.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, StaticNorm):
                assert layer.num_batches_tracked is not None
                if not int(layer.num_batches_tracked):
                    raise UserError("Its static norms have no statistics. Train it first")
                norm = nn.BatchNorm2d(layer.num_features, layer.eps)
                norm.load_state_dict(layer.state_dict())
                setattr(parent, name, norm.eval())
    return converted


@torch.no_grad()
def collect(model: nn.Module, batches: Iterable[Tensor]) -> nn.Module:
    """Set the statistics of all static norms in a network from batches of rows, in one pass.

    Old statistics are dropped; weights and mode stay. Other layers are in evaluation mode meanwhile
    (no dropout). Without static norms no batch is read.

    Args:
        model: its buffers are written.
        batches: (B, *shape) in [-1, 1], B >= 1, on the network's device. Each counts the same,
            whatever its size (the authors take 250 rows, not augmented, in a fixed order).

    >>> network = nn.Sequential(StaticNorm(1))
    >>> halves = [torch.tensor([0.0, 2.0]), torch.tensor([4.0, 8.0])]
    >>> layer = collect(network, [half.view(2, 1, 1, 1) for half in halves])[0]
    >>> layer.running_mean.item(), layer.running_var.item()  # (1 + 6) / 2, (2 + 8) / 2
    (3.5, 5.0)
    """
    layers = [layer for layer in model.modules() if isinstance(layer, StaticNorm)]
    if not layers:
        return model
    for layer in layers:
        layer.reset_running_stats()
        layer.collecting = True
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        for batch in batches:
            model(batch)
    finally:
        for layer in layers:
            layer.collecting = False
        for module, training in modes:
            module.training = training
    return model


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """Return statistics of all static norms by their names in the state dict, as CPU tensors."""
    return {
        f"{name}.{key}": value.detach().to("cpu", copy=True)
        for name, layer in model.named_modules()
        if isinstance(layer, StaticNorm)
        for key, value in layer.named_buffers()
    }
