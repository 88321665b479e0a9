"""Run one agent step under its contract.

Engines and sites run every step through this module, so a user's step satisfies the framework's
guarantees or ends the run:

* labelled rows with an account are readable only from the step's charge to its end, and by the
  private mechanism alone: clipping cannot bound a number that depends on several rows, and a census
  counts single rows. The same holds for their number if it is private;
* a step is charged once, with the event of the account's plan, and sends the fields that the plan
  names, all of them, and nothing else: no other field, weight, metric, refusal or memory;
* a charged step in which a mechanism fails on its rows sends nothing. Errors of charged steps from
  outside have no text;
* these fields have the bits that a private mechanism released, once, under that event;
* memory is replaced, never mutated, and rows stay as they are, so results do not depend on the
  worker process or on resuming.

This prevents mistakes. It does not stop a malicious author, whose step runs in the same process.
The mechanisms are ``local_dp_sgd`` and ``label_histogram``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from torch import Tensor

from accounting.account_plan import AccountPlan
from accounting.errors import AccountingError
from accounting.events import Event
from privssl.core.agents import Agent, LabelledRows, Memory
from privssl.core.messages import Declined, Message
from privssl.core.private_release import (
    Made,
    error_without_rows,
    is_release,
    mechanism_is_reading,
    watch_mechanisms,
)
from privssl.core.task import Context
from privssl.errors import PrivacyError
from privssl.runtime.randomness import others_seeded

Step = Callable[[Any, Any, Context], Message]


class ChargedRows(LabelledRows):
    """Labelled rows with an account: readable from the current step's charge to its end."""

    def __init__(
        self, rows: LabelledRows, is_paid: Callable[[], bool], reader: str, *, sealed: bool,
        counted: bool,
    ) -> None:  # fmt: skip
        """Wrap the rows.

        ``reader``: its name, for errors; ``sealed``: whether only the private mechanism may read
        rows and labels; ``counted``: whether their number is public.
        """
        attributes = {
            "_rows": rows, "_is_paid": is_paid, "_reader": reader, "_sealed": sealed,
            "_counted": counted,
        }  # fmt: skip
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def __getattribute__(self, name: str) -> Any:
        if name not in ("x", "y", "ids", "persons"):
            return super().__getattribute__(name)
        if not self._is_paid():
            raise PrivacyError(
                f"{self._reader}: labelled rows were read before their account was charged, or "
                "after the step. Read them and their number within account.spend only"
            )
        if name == "ids" and self._sealed and not (self._counted or mechanism_is_reading()):
            raise PrivacyError(
                f"{self._reader}: the number of labelled rows is private (privacy.record_counts), "
                "and was read outside of private training: in a loss or a rate it would move the "
                "gradients of all rows. Use the declared number, data.labelled"
            )
        if name != "ids" and self._sealed and not mechanism_is_reading():
            raise PrivacyError(
                f"{self._reader}: labelled rows were read outside of private training, so one row "
                "could reach the gradients of others (by a class's share, a mean), which clipping "
                "does not bound, or their counts. Give agent.labelled to train_classifier, "
                "train_rows_privately or count_rows, where draws, losses and clusters get single "
                "rows"
            )
        return getattr(self._rows, name)


def run_step(agent: Agent, step: Step, message: Message, ctx: Context) -> Message:
    """Run a step, update the agent's memory, and return the step's message.

    Raises:
        PrivacyError: labelled rows were read, or data was sent, without a charge.
        TypeError: the step returned no message, set an attribute of the agent, or its memory
            contains a value that is not a tensor.
        RuntimeError: it wrote into a tensor of the agent's memory or rows.
    """
    account, memory, running = agent.account, agent.memory, True
    visit = f"{getattr(step, '__name__', 'a step')} of {agent.id}"
    visits_before = 0 if account is None else account.visits()
    paid_before = 0 if account is None else account.paid_visits()

    def is_paid() -> bool:
        return running and account is not None and account.paid_visits() > paid_before

    labelled = agent.held_labelled
    _check_unit(agent)
    sealed = account is not None and account.plan.scope == "sound"
    if account is not None and labelled is not None:
        labelled = ChargedRows(
            labelled, is_paid, visit, sealed=sealed,
            counted=account.plan.record_counts == "public",
        )  # fmt: skip
    view: Memory = MappingProxyType(memory)
    copy = Agent(
        id=agent.id, location=agent.location, held_labelled=labelled,
        held_unlabelled=agent.held_unlabelled, account=account, memory=view,
    )  # fmt: skip
    memory_versions, row_versions = _read_versions(memory), _read_versions(_list_row_tensors(agent))
    try:
        with (
            watch_mechanisms(sealed=sealed) as made,
            _seed_libraries(step, ctx),
            _withhold_error_texts(step, visit, is_paid),
        ):
            content = step(copy, message, ctx)
        charged = () if account is None else account.events[visits_before:]
    finally:
        running = False
    if not isinstance(content, Message):
        raise TypeError(f"{visit} returned {type(content).__name__}. Return a Message, or Declined")
    if changed := [
        name
        for name, number in _read_versions(_list_row_tensors(agent)).items()
        if number != row_versions[name]
    ]:
        raise RuntimeError(
            f"{visit} wrote into its rows ({', '.join(changed)}), which later rounds read. Work on "
            "a copy: x.clone()"
        )
    if added := sorted(vars(copy).keys() - vars(agent).keys()):
        raise TypeError(
            f"{visit} set agent.{', agent.'.join(added)}, which its next visit does not have. "
            "Assign agent.memory, a mapping of tensors"
        )
    if changed := [
        name for name, version in _read_versions(memory).items() if version != memory_versions[name]
    ]:
        raise RuntimeError(
            f"{visit} wrote into the agent's memory ({', '.join(changed)}). Assign agent.memory "
            "a new mapping of new tensors"
        )
    memory_changed = copy.memory is not view
    if account is not None and charged:
        _refuse_unplanned_release(visit, account.plan, charged, content, ctx, memory_changed, made)
    if memory_changed:
        if not isinstance(copy.memory, Mapping):
            kind = type(copy.memory).__name__
            raise TypeError(f"{visit}: agent.memory is a {kind}. Assign a mapping of tensors")
        # Tensors in files are not read.
        entries = copy.memory if isinstance(copy.memory, dict) else {}
        if invalid := [name for name, value in entries.items() if not isinstance(value, Tensor)]:
            raise TypeError(f"{visit}: agent.memory has {', '.join(invalid)}, which is no tensor")
        agent.memory = copy.memory
    return content


def _check_unit(agent: Agent) -> None:
    """Raise PrivacyError unless the rows name persons exactly where the account is for persons."""
    if agent.account is None or agent.held_labelled is None:
        return
    persons, unit = agent.held_labelled.persons, agent.account.plan.unit
    if (persons is not None) != (unit == "person"):
        raise PrivacyError(
            f"{agent.id}: the unit of its account is a {unit}, and its labelled rows "
            f"{'name no' if persons is None else 'name'} persons, so the guarantee would be for "
            "another unit. Set privacy.unit to what the rows have"
        )


def _list_row_tensors(agent: Agent) -> dict[str, Tensor]:
    """Return an agent's rows by their attribute names, without charged rows before their charge."""
    labelled = agent.held_labelled if agent.account is None else None
    return {
        f"{kind}.{name}": tensor
        for kind, rows in (("labelled", labelled), ("unlabelled", agent.held_unlabelled))
        for name in ("x", "y", "ids")
        if isinstance(tensor := getattr(rows, name, None), Tensor) and not tensor.is_inference()
    }


@contextmanager
def _seed_libraries(step: Step, ctx: Context) -> Iterator[None]:
    """Seed the generators of libraries for plug-in steps; engines seed torch."""
    module = type(getattr(step, "__self__", None)).__module__
    if module.partition(".")[0] in ("privssl", "builtins"):
        yield
        return
    with others_seeded(ctx.rng("numpy")):
        yield


@contextmanager
def _withhold_error_texts(step: Step, visit: str, is_paid: Callable[[], bool]) -> Iterator[None]:
    """Withhold the text of an error of a charged step from outside: it may show exact counts."""
    modules = str(getattr(step, "__module__", "")), type(getattr(step, "__self__", None)).__module__
    try:
        yield
    except (PrivacyError, AccountingError):
        raise
    except Exception as error:
        if not is_paid() or {name.partition(".")[0] for name in modules} <= {"privssl", "builtins"}:
            raise
        raise error_without_rows(visit, error) from None


def _read_versions(memory: Memory) -> dict[str, int]:
    """Return version counters of the tensors; none for tensors in files, which are read-only."""
    if not isinstance(memory, dict):
        return {}
    return {name: tensor._version for name, tensor in memory.items()}


def _refuse_unplanned_release(
    visit: str, plan: AccountPlan, charged: Sequence[Event], content: Message, ctx: Context,
    memory_changed: bool, made: Made,
) -> None:  # fmt: skip
    """Raise PrivacyError if a charged step sends more than its plan names."""
    sent = [name for name, value in vars(content).items() if value is not None]
    protected = [name for name in sent if name in plan.protect]
    unprotected = [n for n in protected if not is_release(made, plan.event, n, vars(content)[n])]
    missing = [name for name in plan.update if name not in sent and plan.scope == "sound"]
    problems = [
        problem
        for problem, applies in (
            ("it declines", isinstance(content, Declined)),
            (f"it sends {', '.join(sent)}", not set(sent) <= set(plan.update)),
            (f"it sends no {', '.join(missing)}", bool(missing)),
            ("a private mechanism failed in it", made.failed),
            (f"no private mechanism made its {', '.join(unprotected)}", bool(unprotected)),
            ("its weight is not 1", ctx.weight != 1.0),
            ("its charge is not the planned one", tuple(charged) != (plan.event,)),
            (f"it logs {', '.join(ctx.metrics)}", bool(ctx.metrics)),
            ("it changes its memory", memory_changed and plan.scope == "sound"),
        )
        if applies
    ]
    if problems:
        raise PrivacyError(
            f"{visit} read rows with an account, and {' and '.join(problems)}. The claim covers "
            f"only {', '.join(plan.update)}, as private training or a census made it, with weight "
            "1. Nothing was sent; the step stays charged"
        )
