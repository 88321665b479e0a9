"""Spectral normalisation (Miyato et al. 2018) that works under ``vmap``: torch's writes its vectors
through ``out=``, which no transform can follow. Bits, names in the state dict and draws are
torch's."""

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _SpectralNorm


class SpectralNorm(_SpectralNorm):
    """A weight divided by its largest singular value, estimated by power iteration."""

    @torch.no_grad()
    def _power_method(self, weight_mat: Tensor, n_power_iterations: int) -> None:
        for _ in range(n_power_iterations):
            for vector, other_vector, matrix in (
                (self._u, self._v, weight_mat), (self._v, self._u, weight_mat.mT),
            ):  # fmt: skip
                vector.copy_(normalize(torch.mv(matrix, other_vector), dim=0, eps=self.eps))


def spectral_norm(layer: nn.Module) -> nn.Module:
    """``torch.nn.utils.parametrizations.spectral_norm`` of a layer's weight, in place."""
    normalised = SpectralNorm(layer.get_parameter("weight"))
    return parametrize.register_parametrization(layer, "weight", normalised)
