"""Handling of one request by a site.

    1  check version, agent and config
    2  if this request was run before, return the stored reply
    3  check deadline, step, message and, for rows with an account, the size of its weights
    4  if it was charged and has no reply, answer ``lost``; it is never run again
    5  run the step, which charges the agent's ledger before labelled rows can be read
    6  store memory and reply, then return the reply

Steps 2 to 6 hold a lock, which excludes other processes. Rows with an account are readable only
after the charge (``core/step_runner.py``). The request's id is part of the charge's id, so another
message for the same round and step is another charge with new noise, within the budget.

On any error only one of ``protocol.ERROR_CODES`` leaves; the reason is in the site's own log.
"""

import logging
import math
import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from accounting.errors import AccountingError
from accounting.ledger import Account
from privssl.algorithms.base import Algorithm
from privssl.core.agents import Agent, Memory
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
from privssl.runtime.code_version import python_fingerprint
from privssl.runtime.randomness import seeded
from privssl.site.storage import Store, StoreLockedError

log = logging.getLogger("privssl")

#: Largest weight accepted for rows with an account. Trained networks stay below 100; larger weights
#: can only cause rounding errors (``privacy/row_bits.py``) and overflows.
LARGEST_WEIGHT = 1e6


@dataclass(frozen=True, kw_only=True)
class SiteRequestHandler:
    """The request handler of a site.

    Args:
        agent: the agent whose rows are here; its account is opened for each step.
        algorithm: created from the site's own config.
        seed: ``run.seed`` of that config.
        agreement: its ``compatibility_hash``.
        open_account: opens the account of labelled rows for a run; None: they have none.
        journal: returns the ledger's bytes for a coordinator; None: it is not shared.
        share_notes: send the metrics of steps without an account.
        task: classes and shape of a row, for the site's own operator.
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
    task: str = ""
    clock: Callable[[], float] = time.time

    def handle(self, data: bytes) -> bytes:
        """Return the reply to a request; never raises."""
        request_id = ""
        try:
            frame = protocol.from_bytes(data, IdentifyRequest, StepRequest, EndOfRun)
            match frame:
                case IdentifyRequest():
                    shows_ledger, agent = self.journal is not None, self.agent
                    return protocol.to_bytes(
                        Identity(
                            agent.id, agent.role, self.agreement, shows_ledger=shows_ledger,
                            code=python_fingerprint(),
                        )
                    )  # fmt: skip
                case EndOfRun():
                    return protocol.to_bytes(self._end_run(frame))
                case StepRequest():
                    request_id = frame.id
            return self._handle_step(frame)
        except Exception as error:
            code = error_code_for(error)
            log.error("Replying %s: %s", code, error, exc_info=code == "failed")
            return protocol.to_bytes(StepResponse(request_id, error=code))

    def _end_run(self, frame: EndOfRun) -> protocol.LedgerResponse:
        self._check_agreement(frame)
        if frame.over:
            with self.store.lock():
                self.store.forget(frame.run)
        journal = b"" if self.journal is None else self.journal()
        return protocol.LedgerResponse(self.agent.id, journal)

    def _check_agreement(self, frame: StepRequest | EndOfRun) -> None:
        if frame.agreement != self.agreement:
            raise WireError("config", "the coordinator has another config or task")

    # One step -------------------------------------------------------------------------------

    def _handle_step(self, request: StepRequest) -> bytes:
        if request.agent != self.agent.id:
            raise WireError("refused", f"a step of {request.agent}, and this is {self.agent.id}")
        self._check_agreement(request)
        with self.store.lock(), ExitStack() as stack:
            stored = self._read_stored_answer(request)
            if stored is not None:
                log.info("Step %s again: the stored reply", _key_of(request))
                return stored
            if self.clock() > request.deadline:
                raise WireError("late", f"step {_key_of(request)} came after its deadline")
            # Before any file is opened or written, and before any charge.
            step = find_step(self.algorithm, request.step)
            message = deserialize(input_type(step, request.message), request.body)
            memory, account = self._read_memory(request), None
            if self.open_account is not None:
                _check_weights(message)
                self.store.check_room(len(request.body))
                account = stack.enter_context(closing(self._open_agent_account(request)))
                if account.is_charged(_charge_id_of(request)):
                    raise WireError("lost", f"step {_key_of(request)} was charged and has no reply")
            return self._run_and_store(request, step, message, memory, account)

    def _read_stored_answer(self, request: StepRequest) -> bytes | None:
        """Return the stored reply; None if there is none or it is damaged."""
        answer = self.store.answer(request.run, request.id)
        try:
            valid = (
                answer is not None and protocol.from_bytes(answer, StepResponse).id == request.id
            )
        except WireError as error:
            log.error("The stored reply to %s cannot be read: %s", _key_of(request), error)
            return None
        return answer if valid else None

    def _open_agent_account(self, request: StepRequest) -> Account:
        assert self.open_account is not None
        account = self.open_account(request.run)
        try:
            self.store.mark = account.seq, account.head
        except BaseException:
            account.close()
            raise
        return account

    def _run_and_store(
        self, request: StepRequest, step: Step[Message], message: Message, memory: Memory,
        account: Account | None,
    ) -> bytes:  # fmt: skip
        """Run the step, store its memory and reply, and return the reply."""
        agent = replace(self.agent, account=account, memory=memory)
        ctx = Context(
            seed=self.seed, round=request.round, agent=agent.id, visit_key=_key_of(request),
            session_id=request.charge_id, device=self.device,
            telemetry=account is None and self.share_notes,
        )  # fmt: skip
        try:
            with seeded(ctx.rng("torch")):
                content = run_step(agent, step, message, ctx)
            body = _serialize_reply(content)
        finally:  # the charge counts even if the step failed
            if account is not None:
                self.store.mark = account.seq, account.head
        charged = account is not None and account.is_charged(_charge_id_of(request))
        if ctx.weight > protocol.MOST_SHARE:
            raise WireError(
                "refused", f"{_key_of(request)} has the weight {ctx.weight:g}, and the largest "
                f"that a site may send is {protocol.MOST_SHARE:g}"
            )  # fmt: skip
        version = self._store_memory(request, memory, agent.memory)
        response = protocol.to_bytes(
            StepResponse(
                request.id, message=type(content).__name__, weight=ctx.weight,
                notes=_filter_notes(ctx.metrics), memory=version, charged=charged, body=body,
            )
        )  # fmt: skip
        self.store.put_answer(request.run, request.id, response)
        log.info("Step %s done", _key_of(request))
        return response

    def _read_memory(self, request: StepRequest) -> Memory:
        if not request.memory:
            return {}
        memory = self.store.memory(request.run, request.memory)
        if memory is None:
            raise WireError("forgotten", f"no memory of the step {request.memory[:12]}")
        return memory

    def _store_memory(self, request: StepRequest, old: object, new: Memory) -> str:
        """Store the memory; return its version."""
        if new is not old:
            self.store.put_memory(request.run, request.id, new)
        elif request.memory:
            self.store.keep_memory(request.run, request.id, request.memory)
        else:
            return ""
        return request.id


def error_code_for(error: BaseException) -> str:
    """Return the error code that is sent for an error."""
    codes: tuple[tuple[type[BaseException], str], ...] = (
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
    return next((code for kind, code in codes if isinstance(error, kind)), "failed")


class DivergedError(MessageError):
    """A reply contains numbers that are not finite."""


def _check_weights(message: Message) -> None:
    """Raise MessageError if a weight is larger than training produces."""
    for name, tensor in to_parts(message)[1].items():
        if tensor.numel():  # integers too: networks accept tensors of every type
            largest = float(tensor.double().abs().max())
            if largest > LARGEST_WEIGHT:
                raise MessageError(
                    f"{name} has a weight of {largest:.3g}: with an account at most "
                    f"{LARGEST_WEIGHT:g} is accepted. The coordinator's training diverged, or it "
                    "probes for rows"
                )


def _serialize_reply(content: Message) -> bytes:
    """Serialise a reply, and check that the coordinator will accept it."""
    data = serialize(content)
    try:
        deserialize(type(content), data)
    except MessageError as error:
        raise DivergedError(str(error)) from error
    return data


def _filter_notes(notes: Mapping[str, float]) -> dict[str, float]:
    """Return the finite metrics with names that an agent may use."""
    return {
        name: float(value) for name, value in notes.items()
        if re.fullmatch(protocol.NOTE, name) and math.isfinite(value)
    }  # fmt: skip


def _key_of(request: StepRequest) -> str:
    """Return ``Call.key``, which seeds the step's randomness."""
    return visit_key(request.round, request.agent, request.step, request.visit)


def _charge_id_of(request: StepRequest) -> str:
    """Return ``Context.charge_id``, which the ledger records."""
    return f"{_key_of(request)}@{request.charge_id}"
