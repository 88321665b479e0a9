"""G-MixUp and G-Reg: FedSSL's losses of each row.

Fan, Hu, Huang (IJCAI 2022), section 3.4. G mixes a row with any class of the global label space. F
and G minimise the cross-entropy of mixes (Eq. 4, 5). D and G are adversaries (Eq. 6). At lambda 1 G
reconstructs its row (Eq. 7). Support agents use labels, query agents pseudo-labels.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, one_hot, softplus

from generators import networks_for
from generators.objectives import discriminator_loss, realistic_loss, reconstruction_loss
from privssl.algorithms.base import CanaryLoss
from privssl.algorithms.fedssl.settings import GMixupSettings
from privssl.core.agents import LabelledRows
from privssl.core.task import Context, Task
from privssl.privacy import local_dp_sgd
from privssl.privacy.independence import check_rows_independent, refuse_coupling_layers
from privssl.privacy.per_example_gradients import Parameters
from privssl.privacy.plan import PrivatePlan
from privssl.runtime import randomness
from privssl.training import local_training
from privssl.training.batched.deferred import FunctionalModule, run_unbatched
from privssl.training.losses import soft_cross_entropy
from privssl.training.mixup import mix, sample_mix

NETWORKS = ("F", "G", "D")


@dataclass(frozen=True)
class MixupBatch:
    """B rows with everything drawn for them; a private row has its K views as B."""

    strong: Tensor  # (B, *shape) what F learns from
    mild: Tensor  # (B, *shape) what G mixes and rebuilds
    p1: Tensor  # (B, C) labels or pseudo-labels
    p2: Tensor  # (B, C) the class to mix in, one-hot
    z: Tensor  # (B, noise_size) in [0, 1)
    lam: Tensor  # (B,) in [0, 1]
    p_strong: Tensor | None = None  # (B, C) labels of ``strong`` where some of it is synthetic

    @property
    def targets(self) -> Tensor:
        """The labels of ``strong`` (B, C)."""
        return self.p1 if self.p_strong is None else self.p_strong

    def fields(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def batches(self, size: int) -> Iterator["MixupBatch"]:
        """Split into batches of ``size`` rows, in order."""
        return (MixupBatch(**fields) for fields in local_training.batches(self.fields(), size))


@dataclass(frozen=True)
class NetworkFunctions:
    """The networks as functions; a frozen one passes gradients on but gets none."""

    F: Callable[..., Tensor]
    G: Callable[..., Any]  # images, or images and the costs of codes
    D: Callable[..., Tensor]
    F_frozen: Callable[..., Tensor]
    D_frozen: Callable[..., Tensor]

    @classmethod
    def with_parameters(
        cls, nets: Mapping[str, nn.Module], parameters: Parameters
    ) -> "NetworkFunctions":
        """The networks with given parameters; a network without any is frozen."""
        modules = {name: FunctionalModule(nets[name], parameters.get(name)) for name in NETWORKS}
        frozen = {name: module.frozen() for name, module in modules.items()}
        functions = {name: (modules if name in parameters else frozen)[name] for name in NETWORKS}
        return cls(functions["F"], functions["G"], functions["D"], frozen["F"], frozen["D"])


@dataclass(frozen=True)
class SyntheticRows:
    """Rows that G made of noise and a class, without a row."""

    rows: Tensor  # (N, *shape) in [-1, 1]
    labels: Tensor  # (N, C) what F is to learn


def draw_mixup_batch(
    cfg: GMixupSettings, x: Tensor, p1: Tensor, ctx: Context, synthetic: SyntheticRows | None = None
) -> MixupBatch:
    """Draw everything for the rows of one step.

    Args:
        x: rows (N, *shape) as stored.
        p1: their labels or pseudo-labels (N, C).
        synthetic: rows that F learns instead of real ones, for the first rows of each
            batch (``select_synthetic_rows``).
    """
    rows, classes = p1.shape
    real = local_training.network_input(x, ctx.device)
    p1 = p1.to(ctx.device)
    x_strong, p_strong = real, None
    if synthetic is not None:
        indices = select_synthetic_rows(cfg, rows).to(ctx.device)
        x_strong, p_strong = real.clone(), p1.clone()
        x_strong[indices], p_strong[indices] = synthetic.rows, synthetic.labels
    target_classes = torch.randint(classes, (rows,), generator=ctx.rng("classes"))
    mild_view = cfg.mild_view("none" if cfg.augment == "none" else "mid")
    return MixupBatch(
        strong=cfg.augmentation()(x_strong, ctx.rng("augment F")),
        mild=mild_view(real, ctx.rng("augment G")),
        p1=p1,
        p2=one_hot(target_classes, classes).float().to(ctx.device),
        z=torch.rand(rows, cfg.noise_size, generator=ctx.rng("z")).to(ctx.device),
        lam=sample_mix(rows, cfg.mix_alpha, ctx.rng("lambda")).to(ctx.device),
        p_strong=p_strong,
    )


def select_synthetic_rows(cfg: GMixupSettings, rows: int) -> Tensor:
    """Which of the rows of a visit, N in batches, are synthetic for F: numbers, in order."""
    count = round(cfg.synthetic_share * cfg.batch_size)
    return torch.tensor([i for i in range(rows) if i % cfg.batch_size < count], dtype=torch.int64)


def mixing_losses(
    cfg: GMixupSettings, nets: NetworkFunctions, b: MixupBatch, to_train: Sequence[str],
    train_on_mixes: bool,
) -> tuple[dict[str, Tensor], Tensor]:  # fmt: skip
    """The loss of every row, by the network that minimises it.

    Args:
        b: a batch of B rows.
        to_train: networks to train; the losses of the others are 0.
        train_on_mixes: whether F learns from mixes.

    Returns:
        {"F", "G", "D"} -> (B,). Each has gradient to its own network alone, except the
        cross-entropy of mixes, which is under F and reaches F and G (Eq. 4, "min over F, G").
        And whether F predicts the likeliest class of p' for each mix (B,).
    """
    on_real = "F" in to_train and cfg.real_rows
    on_mixes = "F" in to_train and train_on_mixes and cfg.weight_mix > 0
    loss = {name: torch.zeros_like(b.lam) for name in NETWORKS}
    if not on_mixes and "G" not in to_train and "D" not in to_train:  # G is not called
        if on_real:
            loss["F"] = soft_cross_entropy(nets.F(b.strong), b.targets)
        return loss, torch.zeros_like(b.lam, dtype=torch.bool)

    judged = cfg.weight_real > 0 and ("G" in to_train or "D" in to_train)
    guided = "G" in to_train and cfg.weight_guidance > 0
    # G makes no mixes where no loss uses them: it reconstructs rows (lambda 1) alone.
    has_mixes = judged or on_mixes or guided or not cfg.synthetic_share
    x_hat, x_rec, code_cost = _generate(cfg, nets, b, has_mixes)
    p_mix = mix(b.lam, b.p1, b.p2)  # (B, C) p' of Eq. 4

    # G-Reg, Alg. 1 l. 4 and 7
    judged_label = p_mix if cfg.judge == "mixed" else b.p2
    if "D" in to_train and cfg.weight_real:  # Eq. 6, max over D
        d_logits = nets.D(torch.cat([b.mild, x_hat.detach()]), torch.cat([b.p1, judged_label]))
        real, fake = d_logits.chunk(2)
        loss["D"] = discriminator_loss(real, fake, b.lam)
    if "G" in to_train:
        if cfg.weight_real:  # Eq. 6, min over G
            loss["G"] = cfg.weight_real * realistic_loss(nets.D_frozen(x_hat, judged_label), b.lam)
        rebuilt = reconstruction_loss(x_rec, b.mild)  # Eq. 7
        loss["G"] = loss["G"] + cfg.weight_reconstruction * rebuilt
        if code_cost is not None:
            loss["G"] = loss["G"] + cfg.weight_code * code_cost

    # G-MixUp, Alg. 1 l. 5 and 8
    if on_mixes:  # Eq. 4, 5: F and G together
        x_hat_scaled = scale_gradient(x_hat, cfg.weight_guidance / cfg.weight_mix)
        if on_real:
            logits, logits_hat = nets.F(torch.cat([b.strong, x_hat_scaled])).chunk(2)
        else:
            logits_hat = nets.F(x_hat_scaled)
        loss["F"] = cfg.weight_mix * soft_cross_entropy(logits_hat, p_mix)
    else:  # Eq. 4, 5 for G alone, while mixes would mislead F
        logits_hat = nets.F_frozen(x_hat) if has_mixes else p_mix
        if "G" in to_train and has_mixes:
            loss["G"] = loss["G"] + cfg.weight_guidance * soft_cross_entropy(logits_hat, p_mix)
        if on_real:
            logits = nets.F(b.strong)
    if on_real:
        loss["F"] = loss["F"] + soft_cross_entropy(logits, b.targets)
    return loss, logits_hat.argmax(dim=1) == p_mix.argmax(dim=1)


def gradient_similarity(
    cfg: GMixupSettings, nets: Mapping[str, nn.Module], rows: MixupBatch
) -> float:
    """Compare F's gradient on mixes of one half of a batch with that on real rows of the other.

    Above 0 a step on mixes also lowers the loss on real rows. Du et al. 2018, "Adapting auxiliary
    losses using gradient similarity", section 3.

    Args:
        rows: at least two rows a batch; the first batch is used.

    Returns:
        The cosine similarity, in [-1, 1].
    """
    batch = next(rows.batches(cfg.batch_size))
    to_mix, real = batch.batches(len(batch.lam) - len(batch.lam) // 2)
    F = nets["F"].eval()  # without a trace in a batch norm's statistics

    def compute_gradient(x: Tensor, p: Tensor) -> Tensor:
        loss = soft_cross_entropy(F(x), p).mean()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(F.parameters()))])

    with run_unbatched():
        with torch.no_grad():
            x_hat, _, _ = _generate(cfg, NetworkFunctions.with_parameters(nets, {}), to_mix, True)
        of_mixes = compute_gradient(x_hat, mix(to_mix.lam, to_mix.p1, to_mix.p2))
        of_real = compute_gradient(real.strong, real.targets)
    F.train()
    return float(cosine_similarity(of_mixes, of_real, dim=0))


def _generate(
    cfg: GMixupSettings, nets: NetworkFunctions, b: MixupBatch, has_mixes: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Mixes (B, *shape), reconstructions (B, *shape), and the costs of codes (B,) of a variational
    G. Without mixes the first are the reconstructions."""
    ones = torch.ones_like(b.lam)
    lams = torch.stack([b.lam, ones] if has_mixes else [ones], dim=1)  # (B, 2 or 1)
    if cfg.generator != "variational":
        images = nets.G(b.mild, b.p1, b.p2, b.z, lams)
        return images[:, 0], images[:, -1], None
    images, code_cost = nets.G(b.mild, b.p1, b.p2, b.z, lams, True)
    return images[:, 0], images[:, -1], code_cost


def step_losses(
    fields: Mapping[str, Tensor], cfg: GMixupSettings, to_train: tuple[str, ...],
    train_on_mixes: bool, *, F: FunctionalModule, G: FunctionalModule, D: FunctionalModule,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Mean loss of each network (3,), their sum (), and the share of mixes that F classifies as p'
    ()."""
    functions = NetworkFunctions(F, G, D, F.frozen(leaves_no_trace=True), D.frozen())
    by_network, agrees = mixing_losses(
        cfg, functions, MixupBatch(**fields), to_train, train_on_mixes
    )
    means = torch.stack([by_network[name].mean() for name in NETWORKS])
    return means, means.sum(), agrees.float().mean()


def train_networks_privately(
    plan: PrivatePlan, cfg: GMixupSettings, nets: Mapping[str, nn.Module], rows: LabelledRows,
    ctx: Context, *, classes: int, train_on_mixes: bool, counts_public: bool,
) -> None:  # fmt: skip
    """Train the protected networks in place by DP-SGD: Alg. 2 l. 6.

    Args:
        nets: "F", "G" and "D"; those that the plan protects are trained.
        rows: the labelled rows of one agent, N >= 0.
        counts_public: whether neighbours have as many rows.
    """
    cfg = dataclasses.replace(cfg, augment=plan.augment)
    for name, network in nets.items():
        # eval: a spectral norm must not update its buffer from private rows
        protected = name in plan.protect
        network.requires_grad_(protected).train(protected)

    def draw(x: Tensor, y: Tensor, row_ctx: Context) -> Mapping[str, Tensor]:
        return draw_mixup_batch(cfg, x, torch.eye(classes)[y], row_ctx).fields()

    def row_loss(parameters: Parameters, fields: Mapping[str, Tensor]) -> Tensor:
        functions = NetworkFunctions.with_parameters(nets, parameters)
        losses, _ = mixing_losses(
            cfg, functions, MixupBatch(**fields), plan.protect, train_on_mixes
        )
        return torch.stack([loss.mean() for loss in losses.values()]).sum()

    local_dp_sgd.train_rows_privately(
        plan, {name: nets[name] for name in plan.protect}, rows, ctx, draw, row_loss,
        counts_public=counts_public,
    )  # fmt: skip


def dry_run_private_step(
    plan: PrivatePlan, cfg: GMixupSettings, nets: Mapping[str, nn.Module], task: Task,
    device: torch.device, *, gated: bool,
) -> None:  # fmt: skip
    """A dry run of ``train_networks_privately`` without its steps; raises the same PrivacyError.

    Args:
        gated: whether mixes train F only after the gate opens.
    """
    dry_plan, rows, ctx = local_dp_sgd.make_dry_run(plan, task.shape, device)
    for train_on_mixes in {True, not gated}:
        train_networks_privately(
            dry_plan, cfg, nets, rows, ctx, classes=task.classes, train_on_mixes=train_on_mixes,
            counts_public=plan.record_counts == "public",
        )  # fmt: skip


def canary_losses(cfg: GMixupSettings, task: Task) -> Mapping[str, CanaryLoss]:
    """Losses on a row: G's distance from it (z at 0.5), D's for a real row."""
    lam = networks_for(task.shape)[0].audit_lambda

    def encode_label(y: Tensor) -> Tensor:  # as one_hot_labels, without reading the tensor's values
        return (y[:, None] == torch.arange(task.classes, device=y.device)).float()

    def reconstruction(G: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
        label = encode_label(y)
        z, factor = x.new_full((1, cfg.noise_size), 0.5), x.new_full((1, 1), lam)
        return (G(x, label, label, z, factor)[:, 0] - x).square().mean()

    def realism(D: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
        return softplus(-D(x, encode_label(y))).mean()

    return {"G": reconstruction, "D": realism}


def check_private_rows(cfg: GMixupSettings, nets: Mapping[str, nn.Module], task: Task) -> None:
    """Check on random rows that no row changes another row's loss.

    Raises:
        PrivacyError: names the layers, or the rows.
    """
    refuse_coupling_layers(nets)
    rng, rows = randomness.stream(0, 0, "world", "check rows"), 3
    fields = {
        "strong": torch.rand(rows, *task.shape, generator=rng) * 2 - 1,
        "mild": torch.rand(rows, *task.shape, generator=rng) * 2 - 1,
        "p1": torch.rand(rows, task.classes, generator=rng).softmax(dim=1),
        "p2": torch.rand(rows, task.classes, generator=rng).softmax(dim=1),
        "z": torch.rand(rows, cfg.noise_size, generator=rng),
        "lam": torch.rand(rows, generator=rng),
    }
    for network in nets.values():
        network.eval()  # in training a spectral norm updates its buffer

    def losses(batch: Mapping[str, Tensor]) -> Tensor:
        by_network, _ = mixing_losses(
            cfg,
            NetworkFunctions.with_parameters(nets, {}),
            MixupBatch(**batch),
            ("F", "G", "D"),
            train_on_mixes=True,
        )
        return torch.stack(list(by_network.values())).sum(dim=0)

    check_rows_independent(losses, fields)


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """x, with its gradient multiplied by ``factor``."""
    return x.detach() + factor * (x - x.detach())
