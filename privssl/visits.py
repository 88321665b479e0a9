"""One visit: a step at an agent, with what it may touch and what it may let go of.

Engines for one machine and sites do every step through here, so a step that somebody else wrote
keeps the promises of the framework or ends the run:

* labelled rows under an account are out of reach until the visit was charged (``PaidRows``);
* of a visit that was charged leaves what the account's plan names, and nothing beside it: no other
  field, no weight, no note, no silence, nothing remembered for a later visit that costs nothing;
* what an agent remembers is replaced as a whole: a step that writes into it would have other
  results in a worker process, or after a run was gone on with.

What the named fields hold is for the step to have protected (``private_rows``, ``census_plan``).
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from accounting.plan import AccountPlan
from privssl.agents import Agent, LabelledRows, Memory
from privssl.algorithms.base import Context
from privssl.errors import PrivacyError
from privssl.messages import Message, Silence

Step = Callable[[Any, Any, Context], Message]


class PaidRows(LabelledRows):
    """Labelled rows under an account: out of reach until the visit at hand was charged."""

    def __init__(self, rows: LabelledRows, paid: Callable[[], bool]) -> None:
        for name, value in (("_rows", rows), ("_paid", paid)):
            object.__setattr__(self, name, value)

    def __getattribute__(self, name: str) -> Any:
        if name not in ("x", "y", "ids"):
            return super().__getattribute__(name)
        if not self._paid():
            raise PrivacyError(
                "labelled rows were asked for before their account was charged. A step reads them "
                "in account.spend alone, their number as well"
            )
        return getattr(self._rows, name)


def carried_out(agent: Agent, step: Step, message: Message, ctx: Context) -> Message:
    """Do a step; the agent has its new memory afterwards.

    Returns:
        What the step returned.

    Raises:
        PrivacyError: labelled rows were read, or something was to leave, that no charge covers.
        TypeError: the step returned something else than a message.
        RuntimeError: it wrote into a tensor that the agent remembers.
    """
    account, before = agent.account, agent.memory
    visits = 0 if account is None else account.visits()

    def paid() -> bool:
        return account is not None and account.visits() > visits

    labelled = agent.held_labelled
    if account is not None and labelled is not None:
        labelled = PaidRows(labelled, paid)
    lent: Memory = MappingProxyType(before)
    seen = Agent(
        id=agent.id, seat=agent.seat, held_labelled=labelled,
        held_unlabelled=agent.held_unlabelled, account=account, memory=lent,
    )  # fmt: skip
    written = _versions(before)
    content = step(seen, message, ctx)
    who = f"{getattr(step, '__name__', 'a step')} of {agent.id}"
    if not isinstance(content, Message):
        raise TypeError(f"{who} returned {type(content).__name__}. Return a Message, or Silence")
    if changed := [name for name, version in _versions(before).items() if version != written[name]]:
        raise RuntimeError(
            f"{who} wrote into what the agent remembers ({', '.join(changed)}). Give agent.memory "
            "a new mapping of new tensors"
        )
    remembers = seen.memory is not lent
    if account is not None and paid():
        _refuse_unnamed(who, account.plan, content, ctx, remembers)
    if remembers:
        agent.memory = seen.memory
    return content


def _versions(memory: Memory) -> dict[str, int]:
    """How often each tensor was written into; none of tensors in a file, where nobody can."""
    if not isinstance(memory, dict):
        return {}
    return {name: tensor._version for name, tensor in memory.items()}


def _refuse_unnamed(
    who: str, plan: AccountPlan, content: Message, ctx: Context, remembers: bool
) -> None:
    """Raises PrivacyError where a charged visit lets go of more than its plan names."""
    sent = [name for name, value in vars(content).items() if value is not None]
    found = [
        what
        for what, wrong in (
            ("it is silent", isinstance(content, Silence)),
            (f"it sends {', '.join(sent)}", not set(sent) <= set(plan.update)),
            (f"its weight is {ctx.weight:g}", ctx.weight != 1.0),
            (f"it notes {', '.join(ctx.notes)}", bool(ctx.notes)),
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
