"""One visit: a step at an agent, with what it may touch and what it may let go of.

Engines for one machine and sites do every step through here, so a step that somebody else wrote
keeps the promises of the framework or ends the run:

* labelled rows under an account are in reach from the visit's charge to its end (``ChargedRows``);
* a visit is charged once, by the event of the account's plan, and what the plan names leaves, and
  nothing beside it: no other field, no weight, no note, no silence, nothing remembered for a later
  visit that costs nothing;
* what an agent remembers is replaced as a whole: a step that writes into it would have other
  results in a worker process, or after a run was gone on with.

This guards against mistakes, not against an author who means harm: a step runs in the same process
and could reach past it.

What the named fields hold is for the step to have protected (``local_dp_sgd``,
``label_histogram``).
"""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from accounting.account_plan import AccountPlan
from accounting.events import Event
from privssl.core.agents import Agent, LabelledRows, Memory
from privssl.core.messages import Declined, Message
from privssl.core.task import Context
from privssl.errors import PrivacyError

Step = Callable[[Any, Any, Context], Message]


class ChargedRows(LabelledRows):
    """Labelled rows under an account: in reach once the visit at hand was charged, to its end."""

    def __init__(self, rows: LabelledRows, paid: Callable[[], bool]) -> None:
        for name, value in (("_rows", rows), ("_paid", paid)):
            object.__setattr__(self, name, value)

    def __getattribute__(self, name: str) -> Any:
        if name not in ("x", "y", "ids"):
            return super().__getattribute__(name)
        if not self._paid():
            raise PrivacyError(
                "labelled rows were asked for before their account was charged, or after the "
                "visit. A step reads them in account.spend alone, their number as well"
            )
        return getattr(self._rows, name)


def run_step(agent: Agent, step: Step, message: Message, ctx: Context) -> Message:
    """Do a step; the agent has its new memory afterwards.

    Returns:
        What the step returned.

    Raises:
        PrivacyError: labelled rows were read, or something was to leave, that no charge covers.
        TypeError: the step returned something else than a message, or remembers something else
            than tensors.
        RuntimeError: it wrote into a tensor that the agent remembers.
    """
    account, before, here = agent.account, agent.memory, True
    visits = 0 if account is None else account.visits()

    def paid() -> bool:
        return here and account is not None and account.visits() > visits

    labelled = agent.held_labelled
    if account is not None and labelled is not None:
        labelled = ChargedRows(labelled, paid)
    lent: Memory = MappingProxyType(before)
    seen = Agent(
        id=agent.id, location=agent.location, held_labelled=labelled,
        held_unlabelled=agent.held_unlabelled, account=account, memory=lent,
    )  # fmt: skip
    written = _versions(before)
    try:
        content = step(seen, message, ctx)
        charged = () if account is None else account.events[visits:]
    finally:
        here = False
    who = f"{getattr(step, '__name__', 'a step')} of {agent.id}"
    if not isinstance(content, Message):
        raise TypeError(f"{who} returned {type(content).__name__}. Return a Message, or Declined")
    if changed := [name for name, version in _versions(before).items() if version != written[name]]:
        raise RuntimeError(
            f"{who} wrote into what the agent remembers ({', '.join(changed)}). Give agent.memory "
            "a new mapping of new tensors"
        )
    remembers = seen.memory is not lent
    if account is not None and charged:
        _refuse_unplanned_release(who, account.plan, charged, content, ctx, remembers)
    if remembers:
        held = seen.memory if isinstance(seen.memory, dict) else {}  # none is read from a file
        if strange := [name for name, value in held.items() if not isinstance(value, Tensor)]:
            raise TypeError(f"{who} remembers {', '.join(strange)}, no tensor. Make it one")
        agent.memory = seen.memory
    return content


def _versions(memory: Memory) -> dict[str, int]:
    """How often each tensor was written into; none of tensors in a file, where nobody can."""
    if not isinstance(memory, dict):
        return {}
    return {name: tensor._version for name, tensor in memory.items()}


def _refuse_unplanned_release(
    who: str, plan: AccountPlan, charged: Sequence[Event], content: Message, ctx: Context,
    remembers: bool,
) -> None:  # fmt: skip
    """Raises PrivacyError where a charged visit lets go of more than its plan names."""
    sent = [name for name, value in vars(content).items() if value is not None]
    found = [
        what
        for what, wrong in (
            ("it is silent", isinstance(content, Declined)),
            (f"it sends {', '.join(sent)}", not set(sent) <= set(plan.update)),
            ("its weight is not 1", ctx.weight != 1.0),
            ("it was charged otherwise than planned", tuple(charged) != (plan.event,)),
            (f"it notes {', '.join(ctx.metrics)}", bool(ctx.metrics)),
            ("it remembers something", remembers and plan.scope == "sound"),
        )
        if wrong
    ]
    if found:
        raise PrivacyError(
            f"{who} read rows under an account, and {' and '.join(found)}. What may leave is "
            f"{', '.join(plan.update)}, with weight 1: the claim covers nothing else. Nothing was "
            "sent; the visit stays charged"
        )
