"""Section ``algorithm`` for (FL)^2."""

from typing import Literal

import pydantic.dataclasses

from privssl.algorithms.baselines.local_settings import LocalTrainingSettings
from privssl.algorithms.local_ssl import Amount, Share
from privssl.data.augmentations import StrongName, StrongViews
from privssl.settings.schema import Positive, Rate, strict


@pydantic.dataclasses.dataclass(frozen=True, config=strict)
class FL2Config(LocalTrainingSettings, StrongViews):
    """Section ``algorithm`` for (FL)^2. Numbers are the paper's (CIFAR-10) unless marked."""

    name: Literal["fl2"] = "fl2"
    rounds: Positive = 800
    query_per_round: Positive | None = 10  # of 100
    server_batch_size: Positive = 10  # of labelled rows
    learning_rate: Rate = 0.03  # in round 1
    schedule: Literal["factor", "cosine"] = "cosine"  # of the rate: half a cosine over the rounds
    nesterov: bool = True  # momentum of agents and server
    weight_decay: Share = 5e-4
    global_momentum: Share = 0.5  # beta_g
    weak: Literal["none", "crop", "weak", "mid", "fedtrinet"] = "crop"
    strong: StrongName = "fixmatch"
    adaptive: bool = True  # false: the threshold of all classes and agents is tau_f (Table 2)
    sure_above: Share = 0.95  # tau_f
    learned_weight: Amount = 1.0  # w_a
    consistency_weight: Amount = 1.0  # w_cs; 0: no perturbation (Table 2)
    radius: Rate = 0.1  # rho; section 5.1. Appendix C: 0.5; CIFAR-100: 1
    perturbation: Literal["asam", "sam"] = "asam"  # of weights by their size, or of all alike
    moving_target: bool = True  # false: Q* of Eq. 13 is a constant
    aggregation: Literal["status", "equal"] = "status"  # Eq. 15, or the plain mean (Table 2)
