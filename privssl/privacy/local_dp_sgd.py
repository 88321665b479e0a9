"""DP-SGD on an agent's labelled rows: randomness of each row, and the size of a pass.

A row's draws (its view, a class to mix in) depend only on the row and the step, never on the rest
of the batch. Otherwise one row's presence would change all gradients, without amplification by
sampling. Draws are made for fixed blocks of row numbers. When record counts are private, adding a
row would shift the index of every later row, so a block is one row, keyed by a hash of its
contents.

If the rows name persons, a person takes the place of a row: it is sampled and clipped as one, and
its views are of random rows of its own (``privacy/persons.py``).
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from privssl.core.agents import LabelledRows, rows_by_person
from privssl.core.private_release import errors_without_rows, mechanism_reads
from privssl.core.rows import Shape
from privssl.core.task import Context
from privssl.errors import PrivacyError
from privssl.privacy.dp_sgd import PrivateTraining, choose_max_microbatch_size
from privssl.privacy.per_example_gradients import RowLoss
from privssl.privacy.persons import choose_rows
from privssl.privacy.plan import PrivatePlan
from privssl.privacy.row_bits import gradient_bits, is_ours, refuse_batch_dependent_rounding

BLOCK = 64  # rows per block of draws, if record counts are public

#: (stored rows (N, *shape), classes (N,), context) -> fields of a loss (N, ...)
Draw = Callable[[Tensor, Tensor, Context], Mapping[str, Tensor]]


def train_rows_privately(
    plan: PrivatePlan,
    networks: Mapping[str, nn.Module],
    rows: LabelledRows,
    ctx: Context,
    draw: Draw,
    row_loss: RowLoss,
    *,
    counts_public: bool,
) -> None:
    """Run one visit of DP-SGD in place. The caller has charged the plan's event.

    ``draw`` and ``row_loss`` are checked on synthetic rows before the visit, and again after it if
    any code is not privssl's.

    Args:
        networks: the protected ones.
        rows: the labelled rows of one agent, N >= 0.
        draw: called for each view of each row; the loss gets all views of a row, or of a person.
        row_loss: the loss of one row, of fields (views, ...).
        counts_public: whether neighbouring data sets have the same number of rows.

    Raises:
        PrivacyError: one row affects another's fields, or its gradient by rounding; something keeps
            state of the rows; the plan has other record counts; networks or fields are not on the
            CPU; or a draw or loss raised an error, whose text is withheld.
    """
    if counts_public != (plan.record_counts == "public"):
        raise PrivacyError(
            "the plan and the account differ in record_counts. Use one setting for both"
        )
    refuse_other_devices(networks, {})
    with mechanism_reads():
        rows = LabelledRows(rows.x, rows.y, rows.ids, persons=rows.persons)
    _check_draws_per_row(draw, rows.x.dtype, rows.x.shape[1:], ctx)
    row_fields = _RowFields(rows, plan.views, ctx, draw, counts_public)
    max_size = choose_max_microbatch_size(networks, plan.views * rows.x.shape[1:].numel())
    count = len(row_fields) or plan.declared  # no rows: a dry run, which checks the declared sizes
    _, size = plan.plan_microbatches(count, max_size)
    synthetic = row_fields.synthetic_fields(size)
    refuse_other_devices({}, synthetic)
    refuse_batch_dependent_rounding(
        networks, row_loss, synthetic, by_position=not plan.fixes_positions(count)
    )
    probe = (
        None
        if is_ours(networks, row_loss, draw)
        else _StateProbe(networks, row_loss, row_fields, size)
    )
    # The probe has gradients before training, and compares them with those after it.
    training = PrivateTraining(plan, networks)
    with errors_without_rows("a draw, loss or network of private training"):
        training.run(len(row_fields), row_fields.fields, row_loss, max_microbatch_size=max_size)
        if probe is not None:
            probe.check_unchanged()


class _StateProbe:
    """Gradients of synthetic rows at the weights before a visit.

    State that networks, loss or draw keep of labelled rows would change them.
    """

    def __init__(
        self,
        networks: Mapping[str, nn.Module],
        row_loss: RowLoss,
        row_fields: "_RowFields",
        rows: int,
    ) -> None:
        self._row_loss, self._row_fields, self._rows = row_loss, row_fields, rows
        self._parameters = {
            net: {n: p.detach().clone().requires_grad_() for n, p in network.named_parameters()}
            for net, network in networks.items()
        }
        self._before = self._compute_bits()

    def _compute_bits(self) -> list[Tensor]:
        fields = self._row_fields.synthetic_fields(self._rows)
        return [*fields.values(), *gradient_bits(self._parameters, self._row_loss, fields)]

    def check_unchanged(self) -> None:
        """Raise PrivacyError if the gradients have changed."""
        after = self._compute_bits()
        if len(after) != len(self._before) or not all(map(torch.equal, after, self._before)):
            raise PrivacyError(
                "a network, loss or draw keeps something of the rows that it is trained on (a "
                "running mean, a memory bank, a cache?): rows would reach other rows' gradients, "
                "which clipping does not bound. The visit stays charged, and nothing was sent. "
                "Use what depends on its weights and its input alone"
            )


def make_dry_run(
    plan: PrivatePlan, shape: Shape, device: torch.device
) -> tuple[PrivatePlan, LabelledRows, Context]:
    """Return plan, rows and context of a visit that only checks.

    It has no steps and no rows, so it can precede the charge.
    """
    empty = torch.zeros(0, dtype=torch.long)
    rows = LabelledRows(torch.zeros(0, *shape, dtype=torch.uint8), empty, empty)
    ctx = Context(
        seed=0, round=0, agent="nobody", visit_key="tried out", session_id="", device=device
    )
    return dataclasses.replace(plan, steps=0), rows, ctx


def refuse_other_devices(networks: Mapping[str, nn.Module], fields: Mapping[str, Tensor]) -> None:
    """Refuse networks and fields that are not on the CPU, whatever the run's device. On a GPU the
    rounding of a row's gradient may depend on the other rows (docs/performance.md, A GPU)."""
    parameters = ((name, p) for name, net in networks.items() for p in net.parameters())
    for name, tensor in chain(parameters, fields.items()):
        if tensor.device.type != "cpu":
            raise PrivacyError(
                f"{name} is on the device {tensor.device}, but private steps need the CPU: a GPU "
                "rounds a row's gradient by the rows beside it, so no guarantee would hold. Move "
                "nothing to another device than ctx.device"
            )


def _check_draws_per_row(draw: Draw, dtype: torch.dtype, shape: torch.Size, ctx: Context) -> None:
    """Replace each row in turn; raise unless draws for the others keep their bits."""
    rows = 5
    x = torch.linspace(0, 1, rows * shape.numel()).view(rows, *shape)
    x = x if dtype.is_floating_point else x.mul(255).to(dtype)
    y = torch.arange(rows) % 2
    trial_ctx = dataclasses.replace(ctx, visit_key=f"{ctx.visit_key}#tried")
    before, mixed = draw(x, y, trial_ctx), set[str]()
    for row in range(rows):
        other_x, other_y = x.clone(), y.clone()
        other_x[row], other_y[row] = x[row - 2].flip(-1), 1 - y[row]
        after, rest = draw(other_x, other_y, trial_ctx), torch.arange(rows) != row
        mixed |= {name for name in before if not torch.equal(before[name][rest], after[name][rest])}
    if mixed:
        raise PrivacyError(
            f"{', '.join(sorted(mixed))} of a row depend on other rows of its block, or on other "
            "random numbers than ctx.rng's, so clipping bounds nothing. Draw for each row from it "
            "and ctx.rng alone"
        )


class _RowFields:
    """Fields of rows, or of persons, step by step. ``len``: how many.

    Drawn for whole blocks, so that a row's draws do not depend on the rest of its microbatch. Those
    of one step are kept, because its microbatches share blocks.
    """

    def __init__(
        self, rows: LabelledRows, views: int, ctx: Context, draw: Draw, counts_public: bool
    ) -> None:
        self._rows, self._views, self._ctx, self._draw = rows, views, ctx, draw
        self._groups = (
            None
            if rows.persons is None
            else [torch.tensor(own) for own in rows_by_person(rows.persons).values()]
        )
        self._counts_public, self._size = counts_public, BLOCK if counts_public else 1
        self._blocks: dict[int, Mapping[str, Tensor]] = {}  # blocks of this step, by number
        self._step = -1

    def __len__(self) -> int:
        return len(self._rows) if self._groups is None else len(self._groups)

    def fields(self, rows: Tensor, step: int) -> Mapping[str, Tensor]:
        """Return fields of rows by number (B,): (B, views, ...)."""
        if step != self._step:
            self._blocks, self._step = {}, step
        blocks, positions = (rows // self._size).tolist(), (rows % self._size).tolist()
        for number in set(blocks) - self._blocks.keys():
            self._blocks[number] = self._draw_block(number)
        return {
            name: torch.stack(
                [self._blocks[n][name][p] for n, p in zip(blocks, positions, strict=True)]
            )
            for name in self._blocks[blocks[0]]
        }

    def synthetic_fields(self, rows: int) -> Mapping[str, Tensor]:
        """Return fields of synthetic rows: (rows, views, ...)."""
        shape, count = self._rows.x.shape[1:], rows * self._views
        x = torch.rand(count, *shape, generator=torch.Generator().manual_seed(0))
        dtype = self._rows.x.dtype
        x = x if dtype.is_floating_point else x.mul(255).to(dtype)
        y = (torch.arange(rows) % 2).repeat_interleave(self._views)
        trial_ctx = dataclasses.replace(self._ctx, visit_key=f"{self._ctx.visit_key}#made up")
        fields = self._draw(x, y, trial_ctx)
        return {name: torch.unflatten(v, 0, (rows, self._views)) for name, v in fields.items()}

    def _draw_block(self, number: int) -> Mapping[str, Tensor]:
        """Return all rows of a block with their draws: (rows, views, ...)."""
        first, rows = number * self._size, self._rows
        indices = torch.arange(first, min(first + self._size, len(self)))
        name = number if self._counts_public else _hash_rows(rows, self._rows_of(number))
        block_ctx = dataclasses.replace(
            self._ctx, visit_key=f"{self._ctx.visit_key}#{self._step}/{name}"
        )
        chosen = indices.repeat_interleave(self._views)
        if self._groups is not None:
            rng = block_ctx.rng("rows of persons")
            chosen = torch.cat(
                [choose_rows(self._rows_of(i), self._views, rng) for i in indices.tolist()]
            )
        fields = self._draw(rows.x[chosen], rows.y[chosen], block_ctx)
        shape = (len(indices), self._views)
        return {name: torch.unflatten(value, 0, shape) for name, value in fields.items()}

    def _rows_of(self, number: int) -> Tensor:
        """Return the row with this number, or the rows of the person with this number."""
        return torch.tensor([number]) if self._groups is None else self._groups[number]


def _hash_rows(rows: LabelledRows, numbers: Tensor) -> str:
    """Return a hash of some rows; equal rows have equal hashes."""
    digest = hashlib.sha256()
    for number in numbers.tolist():
        digest.update(rows.x[number].cpu().contiguous().numpy().tobytes())
        digest.update(b"%d" % int(rows.y[number]))
    return digest.hexdigest()
