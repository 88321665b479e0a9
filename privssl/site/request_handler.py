"""What a site does with one letter.

    1  is it a letter of this version, to this agent, under this very config?       else a word
    2  was this visit done?                                    then the stored reply, as it was
    3  is it in time, a step with a message that the algorithm has, and, where rows are under an
       account, of weights that training comes to?                                  else a word
    4  was it charged, and there is no reply?                  then ``lost``, and never done again
    5  the step: it pays into the agent's ledger before labelled rows can be read
    6  memory and reply go to the disk, then the reply may leave

Steps 2 to 6 are under a lock, so that a process that was thought dead cannot work beside another
one. Where rows are under an account they are in reach only once this visit was charged: a step
that forgot to pay would find none (``core/step_runner.py``). The id of a visit is part of the name
under which it is charged, so another message under the same round and step is another visit, with a
charge and noise of its own, as long as the budget lasts.

Whatever goes wrong, what leaves is one word of ``protocol.ERROR_CODES``. Why is in the site's own
log.
"""

import logging
import math
import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from accounting.errors import AccountingError
from accounting.ledger import Account
from privssl.algorithms.base import Algorithm
from privssl.core.agents import Agent
from privssl.core.engine import Step, visit_key
from privssl.core.messages import Message, MessageError, deserialize, serialize, to_parts
from privssl.core.step_runner import run_step
from privssl.core.task import Context
from privssl.errors import DataError, RoleError
from privssl.remote import protocol
from privssl.remote.protocol import (
    EndOfRun,
    IdentifyRequest,
    Identity,
    StepRequest,
    StepResponse,
    WireError,
)
from privssl.remote.step_lookup import StepError, find_step, input_type
from privssl.runtime.randomness import seeded
from privssl.site.storage import Store, StoreLockedError

log = logging.getLogger("privssl")

#: Of a weight, where rows are under an account. Those of a trained network are below 100; what is
#: beyond was picked, and makes nothing but rounding (``privacy/row_bits.py``) and numbers that
#: overflow.
LARGEST_WEIGHT = 1e6


@dataclass(frozen=True, kw_only=True)
class SiteRequestHandler:
    """A site that can answer.

    Args:
        agent: the one whose rows are here; its account is opened for each visit.
        algorithm: made from the site's own config.
        seed: ``run.seed`` of that config.
        agreement: ``config.agreement`` of it.
        open_account: opens the account of labelled rows for a run; None: they have none.
        journal: the bytes of the ledger, for a coordinator; None: its operator keeps it.
        share_notes: whether losses of a visit may leave; never where there is an account.
        clock: Unix time in seconds.
    """

    agent: Agent
    algorithm: Algorithm[Any]
    seed: int
    agreement: str
    store: Store
    device: torch.device
    open_account: Callable[[str], Account] | None
    journal: Callable[[], bytes] | None = None
    share_notes: bool = False
    clock: Callable[[], float] = time.time

    def handle(self, data: bytes) -> bytes:
        """The answer to a letter; never an exception."""
        visit = ""
        try:
            frame = protocol.from_bytes(data, IdentifyRequest, StepRequest, EndOfRun)
            match frame:
                case IdentifyRequest():
                    return protocol.to_bytes(self._identity())
                case EndOfRun():
                    return protocol.to_bytes(self._end_run(frame))
                case StepRequest():
                    visit = frame.id
            return self._answer_step(frame)
        except Exception as error:
            word = error_code_for(error)
            log.error("Answers %s: %s", word, error, exc_info=word == "failed")
            return protocol.to_bytes(StepResponse(visit, error=word))

    def _identity(self) -> Identity:
        return Identity(
            self.agent.id, self.agent.role, self.agreement,
            shows_ledger=self.journal is not None,
        )  # fmt: skip

    def _end_run(self, frame: EndOfRun) -> protocol.LedgerResponse:
        self._check_agreement(frame)
        if frame.over:
            with self.store.lock():
                self.store.forget(frame.run)
        shown = b"" if self.journal is None else self.journal()
        return protocol.LedgerResponse(self.agent.id, shown)

    def _check_agreement(self, frame: StepRequest | EndOfRun) -> None:
        if frame.agreement != self.agreement:
            raise WireError("config", "the coordinator has another config, or another task")

    # One visit ------------------------------------------------------------------------------

    def _answer_step(self, visit: StepRequest) -> bytes:
        if visit.agent != self.agent.id:
            raise WireError("refused", f"a visit to {visit.agent}, and this is {self.agent.id}")
        self._check_agreement(visit)
        with self.store.lock(), ExitStack() as stack:
            stored = self._stored_answer(visit)
            if stored is not None:
                log.info("Visit %s again: the stored reply", _key(visit))
                return stored
            if self.clock() > visit.deadline:
                raise WireError("late", f"visit {_key(visit)} came after its deadline")
            work = self._parse_request(visit)
            account = None
            if self.open_account is not None:
                self.store.check_room(len(visit.body))
                account = stack.enter_context(closing(self._open_agent_account(visit)))
                if account.is_charged(_charge_id(visit)):
                    raise WireError("lost", f"visit {_key(visit)} was charged and has no reply")
            return self._run_and_store(visit, work, account)

    def _stored_answer(self, visit: StepRequest) -> bytes | None:
        """The reply that was stored; None also where the disk has damaged it."""
        answer = self.store.answer(visit.run, visit.id)
        try:
            known = answer is not None and protocol.from_bytes(answer, StepResponse).id == visit.id
        except WireError as error:
            log.error("The stored reply to %s cannot be read: %s", _key(visit), error)
            return None
        return answer if known else None

    def _open_agent_account(self, visit: StepRequest) -> Account:
        assert self.open_account is not None
        account = self.open_account(visit.run)
        try:
            self.store.mark = account.seq, account.head
        except BaseException:
            account.close()
            raise
        return account

    def _parse_request(self, visit: StepRequest) -> "_ParsedRequest":
        """What is to be done, before anything is opened, charged or written."""
        step = find_step(self.algorithm, visit.step)
        message = deserialize(input_type(step, visit.message), visit.body)
        if self.open_account is not None:
            _check_weights(message)
        return _ParsedRequest(step, message, self._memory(visit))

    def _run_and_store(
        self, visit: StepRequest, work: "_ParsedRequest", account: Account | None
    ) -> bytes:
        """Do the step, store what came of it, and give the answer."""
        agent = self._agent(account, work.memory)
        ctx = Context(
            seed=self.seed, round=visit.round, agent=agent.id, visit_key=_key(visit),
            session_id=visit.charge_id, device=self.device,
            telemetry=account is None and self.share_notes,
        )  # fmt: skip
        try:
            with seeded(ctx.rng("torch")):
                content = run_step(agent, work.step, work.message, ctx)
            body = _body(content)
        finally:  # the charge counts whatever became of the visit
            if account is not None:
                self.store.mark = account.seq, account.head
        charged = account is not None and account.is_charged(_charge_id(visit))
        if ctx.weight > protocol.MOST_SHARE:
            raise WireError(
                "refused", f"{_key(visit)} has the share {ctx.weight:g} in a mean, and the most "
                f"that a site may name is {protocol.MOST_SHARE:g}"
            )  # fmt: skip
        token = self._remember(visit, work.memory, agent.memory)
        answer = protocol.to_bytes(
            StepResponse(
                visit.id, message=type(content).__name__, weight=ctx.weight,
                notes=_sendable(ctx.metrics), memory=token, charged=charged, body=body,
            )
        )  # fmt: skip
        self.store.put_answer(visit.run, visit.id, answer)
        log.info("Visit %s done", _key(visit))
        return answer

    def _agent(self, account: Account | None, memory: Mapping[str, torch.Tensor]) -> Agent:
        """The agent for one visit."""
        return Agent(
            id=self.agent.id, held_labelled=self.agent.held_labelled,
            held_unlabelled=self.agent.held_unlabelled, account=account, memory=memory,
        )  # fmt: skip

    def _memory(self, visit: StepRequest) -> Mapping[str, torch.Tensor]:
        if not visit.memory:
            return {}
        found = self.store.memory(visit.run, visit.memory)
        if found is None:
            raise WireError("forgotten", f"no memory of the visit {visit.memory[:12]}")
        return found

    def _remember(
        self, visit: StepRequest, before: object, after: Mapping[str, torch.Tensor]
    ) -> str:
        """Store the memory; the token under which it is known from now on."""
        if after is not before:
            self.store.put_memory(visit.run, visit.id, after)
        elif visit.memory:
            self.store.keep_memory(visit.run, visit.id, visit.memory)
        else:
            return ""
        return visit.id


class _ParsedRequest(NamedTuple):
    """A visit, understood."""

    step: Step[Message]
    message: Message
    memory: Mapping[str, torch.Tensor]


def error_code_for(error: BaseException) -> str:
    """The one word for an error that may leave a site."""
    words: tuple[tuple[type[BaseException], str], ...] = (
        (StoreLockedError, "busy"),
        (AccountingError, "ledger"),
        (DivergedError, "diverged"),
        (MessageError, "refused"),
        (StepError, "refused"),
        (RoleError, "refused"),
        (DataError, "data"),
        (OSError, "disk"),
    )
    if isinstance(error, WireError):
        return error.error_code
    return next((word for kind, word in words if isinstance(error, kind)), "failed")


class DivergedError(MessageError):
    """A reply has numbers that are not finite."""


def _check_weights(message: Message) -> None:
    """Raises MessageError where a tensor holds a number that no training comes to."""
    for name, tensor in to_parts(message)[1].items():
        if tensor.is_floating_point() and tensor.numel():
            largest = float(tensor.abs().max())
            if largest > LARGEST_WEIGHT:
                raise MessageError(
                    f"{name} has a weight of {largest:.3g}: at most {LARGEST_WEIGHT:g} is taken "
                    "where rows are under an account. The coordinator's training diverged, or it "
                    "picks weights to learn of rows"
                )


def _body(content: Message) -> bytes:
    """A reply as bytes that the coordinator's border will let in."""
    data = serialize(content)
    try:
        deserialize(type(content), data)
    except MessageError as error:
        raise DivergedError(str(error)) from error
    return data


def _sendable(notes: Mapping[str, float]) -> dict[str, float]:
    """Notes as a letter carries them: finite, and by names that are an agent's to give."""
    named = {
        name: float(value) for name, value in notes.items() if re.fullmatch(protocol.NOTE, name)
    }
    return {name: value for name, value in named.items() if math.isfinite(value)}


def _key(visit: StepRequest) -> str:
    """The key under which engines know the visit; it seeds the visit's randomness."""
    return visit_key(visit.round, visit.agent, visit.step, visit.visit)


def _charge_id(visit: StepRequest) -> str:
    """The name under which the ledger knows the visit: ``Context.receipt``."""
    return f"{_key(visit)}@{visit.charge_id}"
