"""Losses for classifiers: one number per row, so that any of them can be clipped row by row."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from privssl.row_gradients import Parameters
from privssl.together import with_parameters


def soft_cross_entropy(logits: Tensor, p: Tensor) -> Tensor:
    """-sum_c p_c log softmax(logits)_c. Fan et al., Eq. 4 and 5.

    Args:
        logits: (B, C).
        p: target distributions (B, C).

    Returns:
        (B,).
    """
    return -(p * logits.log_softmax(dim=1)).sum(dim=1)


def classifier_loss(
    nets: Mapping[str, nn.Module], parameters: Parameters, fields: Mapping[str, Tensor]
) -> Tensor:
    """Mean of it over rows ``x`` that the classifier "F" sees, with targets ``p``, for
    ``compute``."""
    logits = with_parameters(nets["F"], parameters["F"])(fields["x"])
    return soft_cross_entropy(logits, fields["p"]).mean()


def label_loss(
    nets: Mapping[str, nn.Module], parameters: Parameters, fields: Mapping[str, Tensor]
) -> Tensor:
    """The same with classes ``y`` (B,) for targets."""
    return cross_entropy(with_parameters(nets["F"], parameters["F"])(fields["x"]), fields["y"])
