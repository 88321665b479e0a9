"""Disjoint learning of theta = sigma + psi: FedMatch trains one while the other is fixed.

Jeong et al. (ICLR 2021), section 3.2 and Eq. 1 to 5, with losses as in the authors' code. The
gradients by sigma and by psi are both the gradient by theta; a step moves one of them.

The penalties on psi are sums over all weights, not means: at the published numbers they dominate
psi's loss. Means of the other losses are over the rows that are kept, not over the batch.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from privssl.algorithms.fedmatch.helper_agents import vote_agreement
from privssl.algorithms.fedmatch.settings import DisjointTraining, LabelLocation, LogForm
from privssl.algorithms.fedmatch.sparse_updates import DecomposedWeights
from privssl.core.agents import LabelledRows, QueryAgent, SupportAgent, UnlabelledRows
from privssl.core.messages import StateDict
from privssl.core.task import Context
from privssl.runtime import randomness
from privssl.training import device_transfer, local_training, optim
from privssl.training.batched.deferred import batched_call
from privssl.training.losses import divergence

Component: TypeAlias = Literal["sigma", "psi"]
TINY = 1e-7  # Keras' epsilon
RATE_CUT = 3.0  # what a learning rate is divided by


# Training -----------------------------------------------------------------------------------


class DisjointTrainer:
    """Trains sigma on labelled rows and psi on unlabelled ones, by SGD of one rate."""

    def __init__(
        self, cfg: DisjointTraining, labels_at: LabelLocation, F: nn.Module,
        start: DecomposedWeights, agent: SupportAgent | QueryAgent, ctx: Context,
        rate: float | None = None,
    ) -> None:  # fmt: skip
        """``F``: the network, whose weights are not used; ``start`` is copied.

        Args:
            rate: the learning rate; None: it continues from the agent's memory.
        """
        self._cfg, self._hparams = cfg, cfg.hyperparameters(labels_at)
        self._F, self._agent, self._ctx = F.train(), agent, ctx
        self._own_rate = rate is None
        plateau = make_plateau(rate or cfg.learning_rate, self._hparams.patience)
        self._plateau = agent.memory.get("pace", plateau) if self._own_rate else plateau
        self._labelled_component: Component = "sigma" if cfg.decomposition else "psi"
        self._weights: dict[Component, dict[str, Tensor]] = {
            "sigma": _make_leaves(start.sigma, ctx.device),
            "psi": _make_leaves(start.psi, ctx.device),
        }
        # Helpers are frozen at the sigma that was sent: authors' code.
        self._sent_sigma = {n: s.detach().clone() for n, s in self._weights["sigma"].items()}
        self._sgd = {
            name: optim.SGD(list(weights.values()), lr=float(self._plateau[0]))
            for name, weights in self._weights.items()
            if weights  # without decomposition there is no sigma
        }
        self._losses: dict[Component, list[Tensor]] = {name: [] for name in self._weights}
        self._accuracies: list[float] = []
        self._views, self._dropout = ctx.rng("strong view"), ctx.rng("dropout")

    def learn_sigma(self, rows: LabelledRows, indices: Tensor) -> None:
        """One step on L_s: Eq. 4."""
        weights = self._theta()
        x = local_training.network_input(rows.x[indices], self._ctx.device)
        y = rows.y[indices].to(self._ctx.device)
        loss = label_loss(self._compute_logits(weights, x), y, self._hparams.probabilities)
        self._losses["sigma"].append(loss.detach())
        loss = self._cfg.labelled_weight * loss
        if self._hparams.weight_decay:
            loss = loss + batched_call(
                _compute_weight_decay, {"theta": weights}, self._hparams.weight_decay
            )
        self._step(self._labelled_component, loss)

    def learn_psi(
        self, rows: UnlabelledRows, indices: Tensor, helpers: Sequence[StateDict] = ()
    ) -> None:
        """One step on L_u: Eq. 5. Without a row that counts it is on the penalties alone; without
        decomposition there are none."""
        cfg, hparams, weights = self._cfg, self._hparams, self._theta()
        if cfg.decomposition:
            factors = cfg.l2_weight, hparams.l1_weight, hparams.weight_decay
            loss = batched_call(_compute_penalties, {**self._weights, "theta": weights}, *factors)
        else:
            loss = batched_call(_compute_weight_decay, {"theta": weights}, hparams.weight_decay)
        if len(indices):
            loss = loss + self._compute_consistency_loss(weights, rows, indices, helpers)
        self._losses["psi"].append(loss.detach())
        self._step("psi", loss)

    def copy_weights(self, name: Component) -> dict[str, Tensor]:
        """A copy of sigma or psi on the CPU."""
        contiguous = {n: weight.contiguous() for n, weight in self._weights[name].items()}
        return device_transfer.copy_tensors(contiguous)

    def measure_accuracy(self, rows: LabelledRows) -> None:
        """Note the accuracy on labelled rows: Fig. 6c, after each step."""
        if self._cfg.measure_labelled:
            x = local_training.network_input(rows.x, self._ctx.device)
            predicted = predict(self._F, self._theta(), x).argmax(dim=1).cpu()
            self._accuracies.append(float((predicted == rows.y).float().mean()))

    def finish(self) -> None:
        """Log what was measured, and remember the learning rate where labels set it."""
        for name, losses in self._losses.items():
            if losses:
                self._ctx.log_metric(f"train/loss_{name}", local_training.mean_of(losses))
        if accuracies := self._accuracies:
            self._ctx.log_metric("train/labelled_accuracy", sum(accuracies) / len(accuracies))
        if self._losses["sigma"] and self._own_rate:
            loss = local_training.mean_of(self._losses["sigma"])
            plateau = step_plateau(self._plateau, loss, self._hparams.patience)
            self._agent.memory = {**self._agent.memory, "pace": plateau}

    def _compute_consistency_loss(
        self,
        weights: StateDict,
        rows: UnlabelledRows,
        indices: Tensor,
        helpers: Sequence[StateDict],
    ) -> Tensor:
        """lambda_ICCS Phi of Eq. 2: pseudo-labels are a mean over the confident rows, and Eq. 1 is
        one over these or all (``inter_client_rows``); 0 without any."""
        cfg, hparams = self._cfg, self._hparams
        x = local_training.network_input(rows.x[indices], self._ctx.device)  # (B, *shape)
        with torch.set_grad_enabled(bool(helpers)):  # Eq. 1 alone learns from clean rows
            logits = self._compute_logits(weights, x)  # (B, C)
        p = logits.detach().softmax(dim=1)
        confident = p.max(dim=1).values >= hparams.threshold  # (B,)
        uses_all = bool(helpers) and hparams.inter_client_rows == "all"
        used = torch.ones_like(confident) if uses_all else confident  # (B,), rows of Eq. 1
        if not used.any():
            self._ctx.pseudo_labels(rows.ids[indices], p, confident.cpu())
            return p.new_zeros(())
        h = [self._predict_helper(psi, x[used]) for psi in helpers]  # (S, C) each
        loss = p.new_zeros(())
        if confident.any():
            min_confidence = hparams.threshold if hparams.helpers_vote == "sure" else 0.0
            h_confident = [prediction[confident[used]] for prediction in h]
            votes = vote_agreement(p[confident], h_confident, min_confidence)
            y = votes.argmax(dim=1)  # Eq. 3
            p[confident] = votes.to(p.dtype)  # the metric is of the labels that are learned
            strong_logits = self._compute_logits(
                weights, cfg.strong_view(x[confident], self._views)
            )
            loss = cfg.agreement_weight * label_loss(strong_logits, y, hparams.probabilities)
        self._ctx.pseudo_labels(rows.ids[indices], p, confident.cpu())
        if h:
            kl = inter_client_loss(logits[used], h, hparams.probabilities)
            loss = loss + cfg.inter_client_weight * kl
        return loss

    def _theta(self) -> dict[str, Tensor]:
        """sigma + psi, with a gradient to both."""
        weights: dict[str, Tensor] = batched_call(_sum_components, self._weights)
        return weights

    def _predict_helper(self, psi: StateDict, x: Tensor) -> Tensor:
        """Probabilities of the sigma that was sent with a helper's psi."""
        helper_psi = {name: weight.to(x.device) for name, weight in psi.items()}
        return predict(self._F, theta(self._sent_sigma, helper_psi), x)

    def _compute_logits(self, weights: StateDict, x: Tensor) -> Tensor:
        """(B, C) in training mode; dropout, where there is any, draws from the visit's stream."""
        with randomness.seeded(self._dropout):
            logits: Tensor = functional_call(self._F, dict(weights), (x,))
        return logits

    def _step(self, name: Component, loss: Tensor) -> None:
        """A step on sigma or psi, unless the loss does not depend on it."""
        if loss.requires_grad:
            local_training.minimise(self._sgd[name], loss)


def _sum_components(weights: Mapping[str, StateDict]) -> dict[str, Tensor]:
    return theta(weights["sigma"], weights["psi"])


def _compute_weight_decay(weights: Mapping[str, StateDict], share: float) -> Tensor:
    return weight_decay(weights["theta"], share)


def _compute_penalties(
    weights: Mapping[str, StateDict], l2: float, l1: float, decay: float
) -> Tensor:
    loss = penalties(weights["sigma"], weights["psi"], l2=l2, l1=l1)
    return loss + weight_decay(weights["theta"], decay) if decay else loss


def _make_leaves(weights: StateDict, device: torch.device) -> dict[str, Tensor]:
    # Channels last, as the images: convolutions are faster.
    return {
        name: weight.clone(
            memory_format=torch.channels_last if weight.dim() == 4 else torch.preserve_format
        ).requires_grad_()
        for name, weight in device_transfer.move_to(weights, device).items()
    }


# Batches and learning rate ------------------------------------------------------------------


def recall_order(
    kind: str, row_count: int, agent: SupportAgent | QueryAgent, ctx: Context
) -> Tensor:
    """The agent's own order of its rows (row_count,): drawn at the first visit, then remembered.

    Authors' code: rows are shuffled once for all epochs and rounds.
    """
    key = f"order/{kind}"
    order = agent.memory.get(key)
    if order is None or len(order) != row_count:
        order = torch.randperm(row_count, generator=ctx.rng(key))
        agent.memory = {**agent.memory, key: order}
    return order


def pair_batches(labelled: Tensor, unlabelled: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """One epoch at an agent with both kinds of rows: equally many batches of each.

    There are round(N / size) of them, halves to even, at least one, so up to half a batch of
    labelled rows is left out. The unlabelled rows are divided among the steps.

    Args:
        labelled, unlabelled: row numbers (N,) and (M,) in the order of the epoch. With few
            unlabelled rows the last batches have none of them.
        size: labelled rows of a batch.
    """
    steps = max(1, round(len(labelled) / size))
    width = -(-len(unlabelled) // steps)
    return [
        (labelled[i * size : (i + 1) * size], unlabelled[i * width : (i + 1) * width])
        for i in range(steps)
    ]


def split_batches(order: Tensor, size: int) -> list[Tensor]:
    """One epoch at an agent with unlabelled rows: round(M / size) batches, halves to even, at
    least one. The last may be short, or up to half a batch is left out."""
    return [order[i * size : (i + 1) * size] for i in range(max(1, round(len(order) / size)))]


def make_plateau(learning_rate: float, patience: int) -> Tensor:
    """Learning rate, patience left, lowest loss so far: (3,) float64."""
    return torch.tensor([learning_rate, patience, torch.inf], dtype=torch.float64)


def step_plateau(plateau: Tensor, loss: float, patience: int) -> Tensor:
    """After a visit with this loss: a lower loss resets patience; without patience the rate falls.

    The rule of HAT (Serra et al. 2018), as in the paper's A.3.
    """
    rate, patience_left, lowest = plateau.tolist()
    if loss < lowest:
        patience_left, lowest = patience, loss
    else:
        patience_left -= 1
    if patience_left <= 0:
        rate, patience_left = rate / RATE_CUT, patience
    return torch.tensor([rate, patience_left, lowest], dtype=torch.float64)


# Losses -------------------------------------------------------------------------------------


def theta(sigma: StateDict, psi: StateDict) -> dict[str, Tensor]:
    """sigma + psi by name: the weights of the network. sigma is empty without decomposition."""
    return {name: sigma[name] + weight if sigma else weight for name, weight in psi.items()}


@torch.no_grad()
def predict(F: nn.Module, weights: StateDict, x: Tensor) -> Tensor:
    """Probabilities (B, C) of a network with the given weights, in evaluation mode."""
    was_training = F.training
    logits: Tensor = functional_call(F.eval(), dict(weights), (x,))
    F.train(was_training)
    return logits.softmax(dim=1)


def label_loss(logits: Tensor, y: Tensor, log_form: LogForm) -> Tensor:
    """Cross-entropy, mean over the given rows.

    Args:
        logits: (B, C), B >= 1.
        y: classes (B,).
        log_form: clamped: -log of the probability cut to [1e-7, 1 - 1e-7], as Keras does. A row
            beyond either end has no gradient. exact: by log softmax.
    """
    if log_form == "exact":
        return cross_entropy(logits, y)
    p = logits.softmax(dim=1).gather(1, y[:, None])  # (B, 1)
    return -p.clamp(TINY, 1 - TINY).log().mean()


def inter_client_loss(logits: Tensor, helpers: Sequence[Tensor], log_form: LogForm) -> Tensor:
    """1/H sum_j KL[h_j || p], mean over the given rows: Eq. 1.

    Args:
        logits: of the agent that learns (B, C), B >= 1.
        helpers: probabilities h_j, each (B, C); at least one.
        log_form: clamped: probabilities cut to [1e-7, 1], as Keras does; exact: by log softmax.
    """
    if log_form == "exact":
        divergences = [divergence(h, logits).mean() for h in helpers]
    else:
        p = logits.softmax(dim=1).clamp(TINY, 1)  # (B, C)
        clamped = [h.clamp(TINY, 1) for h in helpers]
        divergences = [(h * (h / p).log()).sum(dim=1).mean() for h in clamped]
    return torch.stack(divergences).mean()


def penalties(sigma: StateDict, psi: StateDict, *, l2: float, l1: float) -> Tensor:
    """l2 sum (sigma - psi)^2 + l1 sum |psi| over all weights: Eq. 5. sigma gets no gradient."""
    pairs = [(psi[name], weight.detach()) for name, weight in sigma.items()]
    terms = [l2 * (p - s).square().sum() + l1 * p.abs().sum() for p, s in pairs]
    return torch.stack(terms).sum()


def weight_decay(weights: StateDict, share: float) -> Tensor:
    """share sum w^2, a scalar."""
    return share * torch.stack([w.square().sum() for w in weights.values()]).sum()
