"""torch's SGD and Adam, without torch's compiler and profiler.

The first step of any optimiser of torch imports torch.compile's machinery, to tell a compiler that
nobody uses here not to look: more than a second, and a hundred megabytes in each worker process.
And every step opens and closes a record for a profiler, which takes longer than many a small
tensor's arithmetic. These are the same classes with the functions that those wrappers wrap; every
bit is the same. Hooks (``register_step_pre_hook``) are not called.
"""

from collections.abc import Iterable
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor


class SGD(torch.optim.SGD):
    """``torch.optim.SGD``, which hands all parameters to torch at once: the same arithmetic, up to
    half of a step's time where they are small. It may write into gradients."""

    def __init__(self, parameters: Iterable[Tensor], **settings: Any) -> None:
        super().__init__(parameters, foreach=True, **settings)

    add_param_group = unwrap(torch.optim.SGD.add_param_group)
    zero_grad = unwrap(torch.optim.SGD.zero_grad)
    step = torch.no_grad()(unwrap(torch.optim.SGD.step))
    step.hooked = True  # torch wraps a step that does not say so


class Adam(torch.optim.Adam):
    """``torch.optim.Adam``."""

    add_param_group = unwrap(torch.optim.Adam.add_param_group)
    zero_grad = unwrap(torch.optim.Adam.zero_grad)
    step = torch.no_grad()(unwrap(torch.optim.Adam.step))
    step.hooked = True
