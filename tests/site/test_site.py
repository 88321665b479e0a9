"""A site runs each visit once, charges before it reads rows, and survives malicious requests.

The site is opened from a SITE.yaml: FedSSL-DP on toy rows. Tests kill its process at each moment of
a visit; reads of rows are recorded in a file before anything can be sent. A table lists malicious
requests, each with the error code that it gets.
"""

import contextlib
import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accounting import journal as journals
from accounting.errors import AccountingError
from accounting.journal_reader import replay
from accounting.ledger import Account, read_journal
from privssl import data
from privssl.algorithms.fedssl.algorithm import FedSSL, FedSSLRequest
from privssl.core import step_runner
from privssl.core.federation import Federation, Round
from privssl.core.messages import Ack, Declined, deserialize, serialize
from privssl.encoders import Encoder, caches, encode
from privssl.engines.local import LocalEngine
from privssl.errors import ConfigError, PrivacyError, UserError
from privssl.experiment import config as configs
from privssl.experiment.prepare import prepare
from privssl.privacy import dp_sgd, secure_noise
from privssl.privacy.noisy_optimizer import SecureNoiseOptimizer
from privssl.remote import framing, protocol
from privssl.remote.protocol import EndOfRun, IdentifyRequest, Identity, StepRequest, StepResponse
from privssl.runtime.code_version import python_fingerprint
from privssl.settings.schema import AgentSettings
from privssl.site import settings, socket_server, startup, supernode
from privssl.site.__main__ import main
from privssl.site.request_handler import SiteRequestHandler
from privssl.site.storage import Store
from privssl.storage import atomic_files
from tests.support import transports
from tests.support.damage import KINDS, ChargeRecord, damaged
from tests.support.site import send_request, serving
from tests.support.transports import call_replaced, in_a_fork

# Full batches: epsilon has a closed form, which is fast.
CONFIG = """
run: {seed: 0, device: cpu}
data: {name: toy, labelled: 24, unlabelled: 30}
agents: {support: 2, query: 1}
model: {name: small_cnn, width: 4}
algorithm:
  {name: fedssl, rounds: 8, local_steps: 1, batch_size: 8, generator_width: 4, gate: 0.0,
   warm_up: 0}
privacy: {epsilon: 5.0, delta: 1.0e-3, noise_multiplier: 2.0, sample_rate: 1.0, steps: 2}
"""
SITE = """
site: {agent: s0, role: support, config: c.yaml, folder: kept}
rows: {split: split.json}
budget: {epsilon: 5.0, delta: 1.0e-3}
"""


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The split.json of the toy rows."""
    folder = tmp_path_factory.mktemp("split")
    (folder / "c.yaml").write_text(CONFIG)
    prepared = prepare(configs.load_config(folder / "c.yaml"))
    prepared.federated_data.manifest.write(folder / "split.json")
    return folder / "split.json"


@pytest.fixture
def site_folder(tmp_path: Path, split: Path) -> Path:
    """A folder with the config, the split and a SITE.yaml."""
    shutil.copy(split, tmp_path)
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "site.yaml").write_text(SITE)
    return tmp_path


def open_handler(site_folder: Path, **changes: Any) -> SiteRequestHandler:
    handler = startup.open_site(settings.load_site_config(site_folder / "site.yaml"))
    return dataclasses.replace(handler, **changes) if changes else handler


def edit(path: Path, *pairs: tuple[str, str]) -> None:
    text = path.read_text()
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)


def make_request(handler: SiteRequestHandler) -> FedSSLRequest:
    """The first request of a coordinator."""
    home = LocalEngine([], seed=0, device=transports.CPU)
    federation = Federation(home, 0)
    federation.begin(Round(1))
    algorithm = handler.algorithm
    assert isinstance(algorithm, FedSSL)
    return algorithm._make_request(algorithm.start(federation), federation)


def step_request(
    handler: SiteRequestHandler, request: Any = None, /, **changes: Any
) -> StepRequest:
    request = request or make_request(handler)
    plain: dict[str, Any] = {
        "run": "r1", "agreement": handler.agreement, "agent": handler.agent.id, "round": 1,
        "step": "support_pass", "visit": 1, "memory": "", "message": type(request).__name__,
        "deadline": 10**11, "body": serialize(request),
    }  # fmt: skip
    return StepRequest(**(plain | changes))


def send_visit(handler: SiteRequestHandler, visit: StepRequest) -> StepResponse:
    answer: StepResponse = protocol.from_bytes(
        handler.handle(protocol.to_bytes(visit)), StepResponse
    )
    return answer


def charge_count(site_folder: Path) -> int:
    """The number of charges in the ledger."""
    return len(read_journal(site_folder / "kept/ledger/s0.jsonl").events)


@contextlib.contextmanager
def count_reads_and_noise() -> Iterator[dict[str, int]]:
    """Count how often labelled rows are trained on and how often noise is drawn."""
    seen = {"read": 0, "noise": 0}

    def counted(kind: str) -> Callable[..., Any]:
        def action(old: Any, *given: Any, **named: Any) -> Any:
            seen[kind] += 1
            return old(*given, **named)

        return action

    with (
        call_replaced(secure_noise, "secure_normal", counted("noise")),
        call_replaced(FedSSL, "_train_privately", counted("read")),
    ):
        yield seen


def test_a_site_refuses_a_split_drawn_with_rows_ordered_by_class(site_folder: Path) -> None:
    assert open_handler(site_folder).agent.id == "s0"  # the control: rows as they are stored
    spread = dataclasses.replace(configs.load_config(site_folder / "c.yaml").data, order="by-class")
    found = data.build(spread, AgentSettings(support=2, query=1), 0)
    found.manifest.write(site_folder / "split.json")
    with pytest.raises(PrivacyError, match=r"split\.json was drawn with data\.order"):
        open_handler(site_folder)


# Charges and repeated requests ----------------------------------------------------------------


def test_a_visit_is_charged_once_and_a_repeated_request_gets_the_stored_reply(
    site_folder: Path,
) -> None:
    handler = open_handler(site_folder)
    frame = protocol.to_bytes(step_request(handler))
    with count_reads_and_noise() as seen:
        first = handler.handle(frame)
        assert (charge_count(site_folder), seen["read"]) == (1, 1) and seen["noise"] > 0
        drawn = seen["noise"]
        assert handler.handle(frame) == first
        assert open_handler(site_folder).handle(frame) == first  # another process, later
        spend_after_reading = dataclasses.replace(step_request(handler), deadline=1)
        assert (
            handler.handle(protocol.to_bytes(spend_after_reading)) == first
        )  # a stored reply is sent even after the deadline
        assert (charge_count(site_folder), seen["read"], seen["noise"]) == (1, 1, drawn)
    answer = protocol.from_bytes(first, StepResponse)
    assert (answer.error, answer.message, answer.weight, answer.notes) == (
        "",
        "FedSSLUpdate",
        1.0,
        {},
    )


def test_another_message_run_or_visit_is_charged_again_and_gets_fresh_noise(
    site_folder: Path,
) -> None:
    handler = open_handler(site_folder)
    other = dataclasses.replace(make_request(handler), train_on_mixes=False)
    visits = [
        step_request(handler), step_request(handler, other), step_request(handler, run="r2"),
        step_request(handler, visit=2),
    ]  # fmt: skip
    answers = [send_visit(handler, visit) for visit in visits]
    assert [answer.error for answer in answers] == [""] * 4
    assert charge_count(site_folder) == 4
    assert len({answer.body for answer in answers}) == 4


def test_any_number_of_requests_spends_at_most_the_budget(site_folder: Path) -> None:
    handler = open_handler(site_folder)
    with count_reads_and_noise() as seen:
        answers = [
            send_visit(handler, step_request(handler, visit=n, run=f"r{n}")) for n in range(1, 13)
        ]
    journal = read_journal(site_folder / "kept/ledger/s0.jsonl")
    worked = [a for a in answers if a.message == "FedSSLUpdate"]
    assert 0 < len(worked) < len(answers) and journal.epsilon <= 5.0
    assert seen["read"] == len(worked) == len(journal.events)
    declined = answers[-1]
    assert deserialize(Declined, declined.body) == Declined("privacy budget is spent")


def test_the_operators_smaller_budget_limits_spending_and_cannot_be_raised(
    site_folder: Path,
) -> None:
    edit(site_folder / "site.yaml", ("epsilon: 5.0", "epsilon: 2.0"))
    handler = open_handler(site_folder)
    few = sum(
        send_visit(handler, step_request(handler, visit=n)).message == "FedSSLUpdate"
        for n in range(1, 9)
    )
    assert read_journal(site_folder / "kept/ledger/s0.jsonl").epsilon <= 2.0
    edit(site_folder / "site.yaml", ("epsilon: 2.0", "epsilon: 5.0"))
    with pytest.raises(AccountingError, match="the budget cannot rise from 2 to 5"):
        open_handler(site_folder)
    assert few == charge_count(site_folder)


def test_a_site_warns_its_operator_if_a_run_may_spend_more_than_the_budget_left(
    site_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handler = open_handler(site_folder)
    assert "is left" not in caplog.text  # the control: nothing of the budget is spent
    assert send_visit(handler, step_request(handler)).error == ""
    left = 5.0 - read_journal(site_folder / "kept/ledger/s0.jsonl").epsilon
    open_handler(site_folder)
    assert "may spend epsilon 5 of each labelled row, and of this site's" in caplog.text
    assert f"budget.epsilon 5 at most {left:.4f} is left" in caplog.text


# A malicious coordinator ------------------------------------------------------------------------


def _nan(handler: SiteRequestHandler) -> StepRequest:
    F = {name: torch.full_like(w, float("nan")) for name, w in make_request(handler).F.items()}
    return step_request(handler, body=serialize(dataclasses.replace(make_request(handler), F=F)))


MALICIOUS: dict[str, tuple[Callable[[SiteRequestHandler], StepRequest], str]] = {
    "another agent": (lambda d: step_request(d, agent="s1"), "refused"),
    "another config": (lambda d: step_request(d, agreement="0" * 64), "config"),
    "a step of another role": (lambda d: step_request(d, step="query_pass"), "refused"),
    "a method that is no step": (lambda d: step_request(d, step="check_private"), "refused"),
    "a step that does not exist": (lambda d: step_request(d, step="give_rows"), "refused"),
    "an attribute of the class": (lambda d: step_request(d, step="StateType"), "refused"),
    "a message of another step": (lambda d: step_request(d, Ack()), "refused"),
    "bytes that are no message": (lambda d: step_request(d, body=b"cos\nsystem\n"), "refused"),
    "a message without a field": (
        lambda d: step_request(d, Ack(), message="FedSSLRequest"),
        "refused",
    ),
    "weights that are no numbers": (_nan, "refused"),
    "a memory that the site does not have": (
        lambda d: step_request(d, memory="f" * 64),
        "forgotten",
    ),
    "a deadline that has passed": (lambda d: step_request(d, deadline=1), "late"),
}


@pytest.mark.parametrize("kind", MALICIOUS)
def test_a_malicious_request_gets_an_error_code_and_is_not_charged(
    site_folder: Path, kind: str
) -> None:
    make, error_code = MALICIOUS[kind]
    handler = open_handler(site_folder)
    with count_reads_and_noise() as seen:
        answer = send_visit(handler, make(handler))
    assert answer == StepResponse(answer.id, error=error_code)
    assert (charge_count(site_folder), seen) == (0, {"read": 0, "noise": 0})
    assert (
        send_visit(handler, step_request(handler)).error == ""
    )  # the control: an honest request succeeds


def test_weights_of_another_shape_are_charged_and_get_only_an_error_code(site_folder: Path) -> None:
    handler = open_handler(site_folder)
    malicious = dataclasses.replace(make_request(handler), F={"w": torch.zeros(3)})
    assert send_visit(handler, step_request(handler, malicious)).error == "failed"
    assert charge_count(site_folder) == 1  # charged before the weights are checked
    assert send_visit(handler, step_request(handler, malicious)).error == "lost"
    assert charge_count(site_folder) == 1


HARMFUL_NETWORK = """\
import os
os.mkdir(os.environ["MARK"])
from tests.api.digits import Net
"""


def test_a_site_imports_only_the_network_that_its_site_file_allows(
    site_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = site_folder / "mark"
    (site_folder / "harmful_site_network.py").write_text(HARMFUL_NETWORK)
    monkeypatch.syspath_prepend(site_folder)
    monkeypatch.setenv("MARK", str(mark))
    named = "harmful_site_network:Net"
    edit(site_folder / "c.yaml", ("{name: small_cnn, width: 4}", f"{{name: '{named}'}}"))
    for here in ("", f", network: '{named}2'"):  # not named, or another one
        text = SITE.replace("folder: kept", f"folder: kept{here}")
        (site_folder / "site.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"Read that code; then allow it with site\.network"):
            open_handler(site_folder)
        assert not mark.exists()
    (site_folder / "site.yaml").write_text(
        SITE.replace("folder: kept", f"folder: kept, network: '{named}'")
    )
    handler = open_handler(site_folder)  # the control: it is imported, and its visits are charged
    assert mark.exists()
    assert send_visit(handler, step_request(handler)).charged
    assert charge_count(site_folder) == 1


HARMFUL_METHOD = """\
import os
os.mkdir(os.environ["MARK"])
from tests.testing.own_method import Own
"""


def test_a_site_imports_only_the_plug_ins_that_its_site_file_allows(
    site_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, named = site_folder / "mark", "harmful_site_method:Own"
    (site_folder / "harmful_site_method.py").write_text(HARMFUL_METHOD)
    monkeypatch.syspath_prepend(site_folder)
    monkeypatch.setenv("MARK", str(mark))
    # A site refuses a coordinator with such a config, and imports nothing.
    handler, text = open_handler(site_folder), (site_folder / "c.yaml").read_text()
    theirs = text[: text.index("algorithm:")] + f"algorithm: {{name: '{named}', rounds: 8}}\n"
    for key in ("step", "message"):  # a request has no field for an import path
        with pytest.raises(ValueError, match="should match pattern"):
            step_request(handler, **{key: named})
    asked = [step_request(handler, agreement="b" * 64), step_request(handler, step="Own")]
    assert [send_visit(handler, request).error for request in asked] == ["config", "refused"]
    assert not mark.exists() and charge_count(site_folder) == 0
    # Trackers run at the coordinator; a site imports none.
    trackers = f"run: {{seed: 0, trackers: ['{named}'], "
    (site_folder / "c.yaml").write_text(text.replace("run: {seed: 0, ", trackers))
    open_handler(site_folder)
    assert not mark.exists()
    # The same config at the site, without permission of its operator.
    (site_folder / "c.yaml").write_text(theirs + text[text.index("privacy:") :])
    for here in ("", f", plugins: ['{named}2']", f", network: '{named}2'"):
        (site_folder / "site.yaml").write_text(SITE.replace("folder: kept", f"folder: kept{here}"))
        with pytest.raises(ConfigError, match=r"nobody allowed it(.|\n)*site\.plugins"):
            open_handler(site_folder)
        assert not mark.exists()
    allowed = SITE.replace("folder: kept", f"folder: kept, plugins: ['{named}']")
    (site_folder / "site.yaml").write_text(allowed)
    handler = open_handler(site_folder)  # the control
    assert mark.exists() and type(handler.algorithm).__name__ == "Own"


def test_a_coordinator_config_with_less_noise_is_refused(site_folder: Path) -> None:
    handler = open_handler(site_folder)
    edit(site_folder / "c.yaml", ("noise_multiplier: 2.0", "noise_multiplier: 0.5"))
    theirs = configs.compatibility_hash(
        configs.load_config(site_folder / "c.yaml"), tuple("0123456789"), (1, 8, 8), "[-1, 1]"
    )
    assert send_visit(handler, step_request(handler, agreement=theirs)).error == "config"
    assert charge_count(site_folder) == 0


def test_a_step_without_a_charge_cannot_read_labelled_rows(
    site_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def read_without_charge(self: FedSSL, agent: Any, msg: FedSSLRequest, ctx: Any) -> Declined:
        found.append(float(agent.labelled.x.float().mean()))
        return Declined("read them")

    monkeypatch.setattr(FedSSL, "_private_pass", read_without_charge)
    handler = open_handler(site_folder)
    assert send_visit(handler, step_request(handler)).error == "failed" and not found
    monkeypatch.setattr(step_runner, "ChargedRows", lambda rows, *_, **__: rows)
    assert send_visit(handler, step_request(handler, visit=2)).error == "" and found  # the control


def test_a_site_refuses_a_plan_that_names_an_unknown_network(
    site_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_handler(site_folder)  # the control
    monkeypatch.setattr(FedSSL, "networks", lambda self: {"G": self._networks["G"]})
    with pytest.raises(PrivacyError, match="fedssl has no network F"):
        open_handler(site_folder)


def test_an_error_sends_only_its_code_and_logs_its_message_at_the_site(
    site_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("row 7 is patient 4711")

    monkeypatch.setattr(FedSSL, "_train_privately", fail)
    handler = open_handler(site_folder)
    data = handler.handle(protocol.to_bytes(step_request(handler)))
    assert protocol.from_bytes(data, StepResponse).error == "failed" and b"4711" not in data
    assert "patient 4711" in caplog.text


def test_the_identity_of_a_site_contains_no_row_count(site_folder: Path) -> None:
    handler = open_handler(site_folder)
    found = protocol.from_bytes(handler.handle(protocol.to_bytes(IdentifyRequest())), Identity)
    assert found == Identity("s0", "support", handler.agreement, False, python_fingerprint())
    edit(site_folder / "c.yaml", ("labelled: 24", "labelled: 25"))  # only what is declared is in it
    assert open_handler(site_folder).agreement != handler.agreement


# Kills and full disks -------------------------------------------------------------------------


def kill_this_process(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_before(old: Any, *given: Any, **named: Any) -> None:
    kill_this_process()


def kill_after(old: Any, *given: Any, **named: Any) -> None:
    old(*given, **named)
    kill_this_process()


def at_journal_line(kind: str, action: Callable[..., Any]) -> Callable[..., Any]:
    def append(old: Any, self: Any, record: Any) -> Any:
        return (action if record["type"] == kind else lambda o, *g: o(*g))(old, self, record)

    return append


def write_half_a_line(old: Any, self: Any, record: Any) -> None:
    os.write(self._file, b'{"type": "res')
    kill_this_process()


def write_half_a_reply(old: Any, path: Path, data: Any) -> None:
    if path.name.endswith(".answer"):
        old(path, data[: len(data) // 2])
        kill_this_process()
    old(path, data)


FILE = journals.JournalFile
#: moment -> (owner, function, action, error code of the repeated request)
MOMENTS: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "before the reserve": (FILE, "append", at_journal_line("reserve", kill_before), ""),
    "within the reserve": (FILE, "append", at_journal_line("reserve", write_half_a_line), ""),
    "after the reserve": (FILE, "append", at_journal_line("reserve", kill_after), "lost"),
    "before the first gradient": (dp_sgd, "factored_gradients", kill_before, "lost"),
    "after the noise": (SecureNoiseOptimizer, "add_noise", kill_after, "lost"),
    "before the settle": (FILE, "append", at_journal_line("settle", kill_before), "lost"),
    "after the settle": (FILE, "append", at_journal_line("settle", kill_after), "lost"),
    "before the answer is stored": (Store, "put_answer", kill_before, "lost"),
    "within the answer": (atomic_files, "write_new", write_half_a_reply, "lost"),
    "before the answer leaves": (Store, "put_answer", kill_after, ""),
}


def reads_recorded(path: Path) -> Any:
    """Append to a file whenever rows are read, before anything can be sent."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def reads(old: Any, *given: Any) -> Any:
        os.write(log, b"r")
        return old(*given)

    return call_replaced(FedSSL, "_train_privately", reads)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_site_killed_at_any_moment_has_charged_for_the_rows_that_it_read(
    site_folder: Path, moment: str
) -> None:
    owner, name, action, error_code = MOMENTS[moment]
    frame, notes = protocol.to_bytes(step_request(open_handler(site_folder))), site_folder / "notes"

    def killed() -> bytes:
        with reads_recorded(notes), call_replaced(owner, name, action):
            return open_handler(site_folder).handle(frame)

    assert in_a_fork(killed) is None, "the control: the process died there"
    with reads_recorded(notes):
        handler = open_handler(site_folder)
        answers = [handler.handle(frame) for _ in range(2)]
    assert answers[0] == answers[1]
    assert protocol.from_bytes(answers[0], StepResponse).error == error_code
    assert read_journal(site_folder / "kept/ledger/s0.jsonl").problems == []
    assert (
        len(notes.read_bytes()) <= charge_count(site_folder) in (1, 2)
    )  # 2: half a line counts as a charge
    # The next visit succeeds.
    assert send_visit(handler, step_request(handler, visit=2)).error == ""


def test_control_a_site_that_charges_after_reading_fails_the_kill_test(site_folder: Path) -> None:
    real = Account.spend

    @contextlib.contextmanager
    def spend_after_reading(self: Account, event: Any, visit: str) -> Iterator[None]:
        yield
        with real(self, event, visit):
            pass

    frame, notes = protocol.to_bytes(step_request(open_handler(site_folder))), site_folder / "notes"

    def killed() -> bytes:
        Account.spend = spend_after_reading  # type: ignore[method-assign]
        vars(step_runner)["ChargedRows"] = lambda rows, *_, **__: rows
        with reads_recorded(notes), call_replaced(SecureNoiseOptimizer, "add_noise", kill_after):
            return open_handler(site_folder).handle(frame)

    assert in_a_fork(killed) is None
    assert len(notes.read_bytes()) == 1 > charge_count(site_folder) == 0


def raise_disk_full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_no_row_is_read_if_the_disk_is_full_at_the_charge(site_folder: Path) -> None:
    handler = open_handler(site_folder)
    visit = step_request(handler)

    def no_room(old: Any, self: Any, record: Any) -> Any:
        with call_replaced(journals, "_write_all", raise_disk_full):
            return old(self, record)

    with count_reads_and_noise() as seen:
        with call_replaced(FILE, "append", at_journal_line("reserve", no_room)):
            assert send_visit(handler, visit).error == "ledger"
        assert seen["read"] == 0 and charge_count(site_folder) == 0
        assert send_visit(handler, visit).error == "" and seen["read"] == 1  # the control


def test_nothing_is_charged_if_the_disk_has_no_space_for_the_reply(site_folder: Path) -> None:
    handler = open_handler(site_folder)
    visit = step_request(handler)

    def report_little_space(old: Any, folder: Path) -> Any:
        return old(folder)._replace(free=3 * len(visit.body))

    with call_replaced(shutil, "disk_usage", report_little_space):
        assert send_visit(handler, visit) == StepResponse(visit.id, error="disk")
    assert charge_count(site_folder) == 0
    assert send_visit(handler, visit).error == ""  # the control


def test_a_reply_that_cannot_be_stored_is_not_sent_and_the_visit_is_lost(site_folder: Path) -> None:
    handler = open_handler(site_folder)
    visit = step_request(handler)
    with call_replaced(Store, "put_answer", raise_disk_full):
        assert send_visit(handler, visit) == StepResponse(visit.id, error="disk")
    assert send_visit(handler, visit).error == "lost"
    assert charge_count(site_folder) == 1


def test_no_row_is_read_if_the_ledger_is_missing_truncated_or_locked(site_folder: Path) -> None:
    handler = open_handler(site_folder)
    assert send_visit(handler, step_request(handler)).error == ""
    ledger = site_folder / "kept/ledger/s0.jsonl"
    whole = ledger.read_bytes()
    with count_reads_and_noise() as seen:
        ledger.unlink()
        assert send_visit(handler, step_request(handler, visit=2)).error == "ledger"
        ledger.write_bytes(
            b"".join(whole.splitlines(keepends=True)[:1])
        )  # a valid hash chain, but shorter
        assert send_visit(handler, step_request(handler, visit=2)).error == "ledger"
        ledger.write_bytes(whole)
        assert handler.open_account is not None
        with contextlib.closing(handler.open_account("r7")):
            assert send_visit(handler, step_request(handler, visit=2)).error == "ledger"
        assert seen["read"] == 0
    assert send_visit(handler, step_request(handler, visit=2)).error == ""  # the control


def test_a_ledger_moved_without_its_row_registry_is_refused(site_folder: Path) -> None:
    """The registry lists rows used without protection; without it they would get a budget."""
    handler = open_handler(site_folder)
    assert send_visit(handler, step_request(handler, make_request(handler))).charged
    (site_folder / "kept/ledger").rename(site_folder / "moved")
    edit(site_folder / "site.yaml", ("folder: kept", "folder: new"),
         ("delta: 1.0e-3", "delta: 1.0e-3, ledger: moved"))  # fmt: skip
    open_handler(site_folder)  # the control: the whole folder, and its charge
    assert len(read_journal(site_folder / "moved/s0.jsonl").events) == 1
    (site_folder / "moved/registry").rename(site_folder / "left behind")
    with pytest.raises(AccountingError, match=r"registry/s0.rows: missing, .*the whole folder"):
        open_handler(site_folder)
    assert not (site_folder / "moved/registry").exists()


def test_a_serving_site_neither_starts_a_new_ledger_nor_accepts_an_older_one(
    site_folder: Path,
) -> None:
    handler = open_handler(site_folder)
    assert send_visit(handler, step_request(handler)).error == ""
    shutil.copytree(site_folder / "kept", site_folder / "backup")
    assert send_visit(handler, step_request(handler, visit=2)).error == ""
    for former in (
        None,
        site_folder / "backup",
    ):  # the folder is deleted, or replaced by a backup, each with the mark
        (site_folder / "kept").rename(site_folder / f"true {former is None}")
        if former is not None:
            former.rename(site_folder / "kept")
        with count_reads_and_noise() as seen:
            assert send_visit(handler, step_request(handler, visit=3)).error == "ledger"
        assert seen["read"] == 0
        shutil.rmtree(site_folder / "kept")
        (site_folder / f"true {former is None}").rename(site_folder / "kept")
    assert (
        send_visit(handler, step_request(handler, visit=3)).error == ""
        and charge_count(site_folder) == 3
    )  # the control


def test_a_visit_with_a_damaged_stored_reply_is_lost(site_folder: Path) -> None:
    handler = open_handler(site_folder)
    visit = step_request(handler)
    assert send_visit(handler, visit).error == ""
    [stored] = (site_folder / "kept/runs/r1").glob("*.answer")
    stored.write_bytes(b"privssl?")
    assert send_visit(handler, visit).error == "lost"
    assert charge_count(site_folder) == 1


def test_a_second_process_of_a_site_reports_busy_during_a_visit(site_folder: Path) -> None:
    handler, other, answers = open_handler(site_folder), open_handler(site_folder), []

    def meanwhile(old: Any, *given: Any) -> Any:
        answers.append(send_visit(other, step_request(other, visit=2)).error)
        return old(*given)

    with call_replaced(FedSSL, "_train_privately", meanwhile):
        assert send_visit(handler, step_request(handler)).error == ""
    assert answers == ["busy"] and charge_count(site_folder) == 1


# Stored replies and ledgers at the end of a run -----------------------------------------------


def test_a_site_keeps_the_replies_of_the_last_visits_of_a_run(site_folder: Path) -> None:
    handler = open_handler(site_folder)
    handler = dataclasses.replace(handler, store=Store(handler.store.folder, 2))
    visits = [step_request(handler, visit=n) for n in (1, 2, 3)]
    assert [send_visit(handler, visit).error for visit in visits] == ["", "", ""]
    assert [send_visit(handler, visit).error for visit in visits] == ["lost", "", ""]
    assert charge_count(site_folder) == 3


def test_stored_memories_are_found_by_visit_and_expire_with_their_visits(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path / "kept", keep=2)
    memory = {"z": torch.tensor(float("inf")), "a/b": torch.arange(3), "n": torch.zeros(0)}
    visits = [f"{n:064x}" for n in range(4)]
    store.put_memory("r1", visits[0], memory)
    store.put_answer("r1", visits[0], b"0")
    for former, now in pairwise(visits):
        store.keep_memory("r1", now, former)
        store.put_answer("r1", now, b"more")
    found = store.memory("r1", visits[3])
    assert found is not None and list(found) == ["z", "a/b", "n"]
    assert all(torch.equal(found[name], memory[name]) for name in memory)
    assert store.memory("r1", visits[2]) is not None
    assert store.memory("r1", visits[1]) is None  # older than the last two
    assert store.memory("r2", visits[3]) is None  # of another run


def test_a_site_keeps_the_replies_of_the_last_four_runs(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    for number in range(7):
        store.put_answer(f"r{number}", "a" * 64, b"x")
        os.utime(tmp_path / "runs" / f"r{number}", ns=(number, number))
    assert sorted(os.listdir(tmp_path / "runs")) == ["r3", "r4", "r5", "r6"]


def test_a_clock_set_back_deletes_no_replies_of_the_current_run(site_folder: Path) -> None:
    handler = open_handler(site_folder)
    for former in range(5):  # folders dated in the future
        folder = site_folder / "kept/runs" / f"former{former}"
        folder.mkdir(parents=True)
        os.utime(folder, (10**10, 10**10))
    frame = protocol.to_bytes(step_request(handler))
    first = handler.handle(frame)
    assert protocol.from_bytes(first, StepResponse).error == "" and handler.handle(frame) == first
    assert send_visit(handler, step_request(handler, visit=2)).error == ""
    assert len(os.listdir(site_folder / "kept/runs")) == 4 and charge_count(site_folder) == 2


def test_the_end_of_a_run_deletes_its_replies_and_sends_the_ledger_if_allowed(
    site_folder: Path,
) -> None:
    handler = open_handler(site_folder)
    send_visit(handler, step_request(handler))
    handler.handle(
        protocol.to_bytes(EndOfRun("r1", handler.agreement, False))
    )  # the run stops and may be resumed
    assert list((site_folder / "kept/runs/r1").glob("*.answer"))
    leave = protocol.to_bytes(EndOfRun("r1", handler.agreement, True))
    gone = protocol.from_bytes(handler.handle(leave), protocol.LedgerResponse)
    assert gone == protocol.LedgerResponse("s0", b"")
    assert not (site_folder / "kept/runs/r1").exists()
    assert (
        send_visit(handler, step_request(handler)).error == "lost"
    )  # charged, and never run again

    edit(site_folder / "site.yaml", ("folder: kept", "folder: kept, share_ledger: true"))
    shown = protocol.from_bytes(open_handler(site_folder).handle(leave), protocol.LedgerResponse)
    assert shown.body == (site_folder / "kept/ledger/s0.jsonl").read_bytes()


DAMAGES = [(kind, visit, when) for kind in KINDS for visit in (1, 2) for when in ("in", "after")]


def show_damaged_ledger(
    site_folder: Path, kind: str, visit: int, when: str
) -> tuple[ChargeRecord, Any]:
    """Damage a site's ledger at a visit; return what was charged, and the reply at the end."""
    edit(site_folder / "site.yaml", ("folder: kept", "folder: kept, share_ledger: true"))
    handler = open_handler(site_folder)
    with damaged(kind, visit, when, seed=DAMAGES.index((kind, visit, when))) as charges:
        for number in (1, 2, 3):
            assert send_visit(handler, step_request(handler, visit=number)).error in ("", "ledger")
        leave = protocol.to_bytes(EndOfRun("r1", handler.agreement, True))
        return charges, protocol.from_bytes(
            handler.handle(leave), protocol.LedgerResponse, StepResponse
        )


@pytest.mark.parametrize("kind, visit, when", DAMAGES)
def test_a_serving_site_with_a_damaged_ledger_never_sends_a_ledger_with_missing_charges(
    site_folder: Path, kind: str, visit: int, when: str
) -> None:
    charges, shown = show_damaged_ledger(site_folder, kind, visit, when)
    if (kind, when) == (
        "two writers",
        "in",
    ):  # a valid line of another writer: no charge is missing
        journal = replay(journals.split_lines(shown.body)[0])
        assert journal.problems == [] and len(charges.entered) == 3
        assert journal.epsilon >= charges.spent(1e-3) - 1e-9
    else:
        assert len(charges.entered) == visit  # no row is read under a damaged ledger
        assert shown == StepResponse("", error="ledger")


def test_control_a_site_without_the_ledger_mark_sends_a_ledger_with_missing_charges(
    site_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgetting_mark = property(lambda store: None, lambda store, mark: None)
    monkeypatch.setattr(Store, "mark", forgetting_mark)
    charges, shown = show_damaged_ledger(site_folder, "replace", 2, "after")
    journal = replay(journals.split_lines(shown.body)[0])
    assert journal.problems == [] and journal.epsilon < charges.spent(1e-3)


def test_a_coordinator_with_another_config_gets_no_ledger_and_deletes_nothing(
    site_folder: Path,
) -> None:
    edit(site_folder / "site.yaml", ("folder: kept", "folder: kept, share_ledger: true"))
    handler = open_handler(site_folder)
    send_visit(handler, step_request(handler))
    stranger = protocol.to_bytes(EndOfRun("r1", "0" * 64, True))
    assert protocol.from_bytes(
        handler.handle(stranger), protocol.LedgerResponse, StepResponse
    ) == StepResponse("", "config")
    assert list((site_folder / "kept/runs/r1").glob("*.answer"))


def test_a_site_with_a_budget_trains_on_the_cpu(
    site_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert open_handler(site_folder).device == torch.device("cpu")
    edit(site_folder / "site.yaml", ("folder: kept", "folder: kept, device: cuda"))
    with pytest.raises(ConfigError, match=r"site.device is 'cuda', but private steps need the CPU"):
        open_handler(site_folder)


def test_metrics_are_sent_only_if_the_operator_allows_it_and_never_with_a_budget(
    site_folder: Path,
) -> None:
    edit(site_folder / "site.yaml", ("agent: s0, role: support", "agent: q0, role: query"),
         ("budget: {epsilon: 5.0, delta: 1.0e-3}\n", ""))  # fmt: skip
    without_metrics = open_handler(site_folder)
    visit = step_request(without_metrics, step="query_pass")
    assert send_visit(without_metrics, visit).notes == {}
    edit(site_folder / "site.yaml", ("folder: kept", "folder: other, share_notes: true"))
    assert send_visit(open_handler(site_folder), visit).notes != {}
    edit(site_folder / "site.yaml", ("agent: q0, role: query", "agent: s0, role: support"))
    (site_folder / "site.yaml").write_text(
        (site_folder / "site.yaml").read_text() + SITE.splitlines()[-1]
    )
    private, reads_recorded = open_handler(site_folder), []

    def noting(old: Any, algorithm: FedSSL, agent: Any, request: Any, ctx: Any) -> Any:
        ctx.log_metric("loss", 1.0)  # the private pass itself logs no metric
        reads_recorded.append(dict(ctx.metrics))
        return old(algorithm, agent, request, ctx)

    with call_replaced(FedSSL, "_train_privately", noting):
        assert private.share_notes and send_visit(private, step_request(private)).notes == {}
    assert reads_recorded == [{}]


# SITE.yaml ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pair", "error", "text"),
    [
        (
            ("steps: 2}", "steps: 2, update_at_support: [F, G, D], protect: [G], "
             "acknowledge_unsound: true}"),
            PrivacyError, "guarantees nothing for any row",
        ),
        (
            (CONFIG.splitlines()[-1], "privacy: null"),
            ConfigError, "either under a budget on both sides or on neither",
        ),
        (("delta: 1.0e-3", "delta: 1.0e-4"), ConfigError, "Make them equal"),
    ],
    ids=["as published", "no privacy", "another delta"],
)  # fmt: skip
def test_a_config_that_contradicts_the_operators_budget_is_refused(
    site_folder: Path, pair: tuple[str, str], error: type[Exception], text: str
) -> None:
    edit(site_folder / "c.yaml", pair)
    with pytest.raises(error, match=text):
        open_handler(site_folder)


@pytest.mark.parametrize(
    ("pair", "text"),
    [
        (("agent: s0", "agent: s2"), "site.agent is s2, but .* has s0, s1, q0. Give one"),
        (("role: support", "role: mixed"), "site.role is mixed, but in .* s0 is support. Correct"),
        (("budget: {epsilon: 5.0, delta: 1.0e-3}", ""), "budget .*missing: give epsilon, or"),
        (("delta: 1.0e-3", "delta: 0.2"), "budget.delta is 0.2, but privacy.delta"),
        (("split: split.json", "split: c.yaml"), "is not a split.json"),
        (("split: split.json", "arrays: x.npz"), "rows.classes .*missing: arrays need how many"),
        (("split: split.json", "arrays: x.npz, classes: 10"), "x.npz: no such file"),
        (("split: split.json", ""), "rows.arrays .*missing: give arrays, or split, or root"),
        (("config: c.yaml", "config: d.yaml"), "d.yaml: no such file"),
        (("role: support", "role: suport"), r"line 2 +site.role .*Did you mean support\?"),
        (
            ("budget: {", "epsilon: 5.0\nbudget: {"),
            r"unknown section. Did you mean budget.epsilon\?",
        ),
        (  # the config of a run
            ("budget: {", "algorithm: {name: fedssl}\nbudget: {"),
            "algorithm +unknown section. Known: site, rows or budget",
        ),
    ],
)
def test_a_mistake_in_the_site_file_is_reported_with_its_key_and_a_fix(
    site_folder: Path, pair: tuple[str, str], text: str
) -> None:
    edit(site_folder / "site.yaml", pair)
    with pytest.raises(UserError, match=text):
        open_handler(site_folder)


def test_a_delta_of_one_over_the_row_count_or_more_is_refused(site_folder: Path) -> None:
    edit(
        site_folder / "c.yaml", ("labelled: 24", "labelled: 20")
    )  # the config declares 10 rows for an agent; s0 has 12
    for name in ("c.yaml", "site.yaml"):
        edit(site_folder / name, ("delta: 1.0e-3", "delta: 0.083"))
    open_handler(site_folder)  # the control: below 1 / 12
    for name in ("c.yaml", "site.yaml"):
        edit(site_folder / name, ("delta: 0.083", "delta: 0.084"))
    with pytest.raises(PrivacyError, match=r"budget.delta is 0.084.*Give less than 1 / 12"):
        open_handler(site_folder)


def test_with_private_counts_the_delta_is_not_compared_with_the_row_count(
    site_folder: Path,
) -> None:
    private = "sample_rate: 1.0, record_counts: private"
    edit(site_folder / "c.yaml", ("labelled: 24", "labelled: 20"), ("sample_rate: 1.0", private))
    for name in ("c.yaml", "site.yaml"):
        edit(site_folder / name, ("delta: 1.0e-3", "delta: 0.084"))
    open_handler(site_folder)  # 12 rows, 10 are declared


def test_a_site_with_a_budget_refuses_weights_above_one_million(site_folder: Path) -> None:
    handler = open_handler(site_folder)
    request = make_request(handler)
    key = next(iter(request.F))
    for size, error_code in ((2e6, "refused"), (-2e6, "refused"), (1e6, "")):
        F = {**request.F, key: torch.full_like(request.F[key], size)}
        assert (
            send_visit(handler, step_request(handler, dataclasses.replace(request, F=F))).error
            == error_code
        )


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.float64])
def test_weights_that_are_too_large_are_refused_for_every_dtype(
    site_folder: Path, kind: torch.dtype
) -> None:
    handler = open_handler(site_folder)
    request = make_request(handler)
    key = next(iter(request.F))
    lowest = torch.iinfo(kind).min if kind in (torch.int64, torch.int32) else -1e30
    for size, error_code in ((10**9, "refused"), (lowest, "refused"), (1, "")):
        F = {**request.F, key: torch.full_like(request.F[key], size, dtype=kind)}
        assert (
            send_visit(handler, step_request(handler, dataclasses.replace(request, F=F))).error
            == error_code
        )


def test_a_request_with_a_stated_size_above_the_limit_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(framing, "MAX_BYTES", 10)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        framing.send(ours, b"0123456789")
        assert framing.receive(theirs) == b"0123456789"
        framing.send(ours, b"0123456789+")
        with pytest.raises(OSError, match="a message of 11 bytes"):
            framing.receive(theirs)


def test_rows_from_arrays_equal_the_rows_from_the_split(site_folder: Path) -> None:
    by_split = open_handler(site_folder)
    rows = by_split.agent.labelled
    np.savez(site_folder / "own.npz", x_labelled=rows.x.numpy(), y_labelled=rows.y.numpy())
    edit(site_folder / "site.yaml", ("split: split.json", "arrays: own.npz, classes: 10"))
    (site_folder / "kept").rename(site_folder / "former")
    by_arrays = open_handler(site_folder)
    assert by_arrays.agreement == by_split.agreement
    assert torch.equal(by_arrays.agent.labelled.x, rows.x)
    assert torch.equal(by_arrays.agent.labelled.y, rows.y)


@pytest.mark.parametrize("kind", [np.uint64, np.int64])
def test_a_negative_label_is_refused_before_an_account_is_opened(
    site_folder: Path, kind: type
) -> None:
    rows = open_handler(site_folder).agent.labelled
    (site_folder / "kept").rename(site_folder / "former")
    edit(site_folder / "site.yaml", ("split: split.json", "arrays: own.npz, classes: 10"))
    y = rows.y.numpy().copy()
    np.savez(site_folder / "own.npz", x_labelled=rows.x.numpy(), y_labelled=y.astype(kind))
    open_handler(site_folder)  # the control
    (site_folder / "kept").rename(site_folder / "good")
    y[3] = -1
    np.savez(site_folder / "own.npz", x_labelled=rows.x.numpy(), y_labelled=y.astype(kind))
    with pytest.raises(UserError, match="y_labelled has the label"):
        open_handler(site_folder)
    assert not (site_folder / "kept/ledger").exists()


def test_rows_root_is_refused_for_a_built_in_data_set(site_folder: Path) -> None:
    edit(site_folder / "site.yaml", ("split: split.json", "split: split.json, root: somewhere"))
    with pytest.raises(ConfigError, match=r"rows\.root has no effect: .* is toy"):
        open_handler(site_folder)


def test_rows_that_are_also_used_without_protection_get_no_budget(site_folder: Path) -> None:
    rows = open_handler(site_folder).agent.labelled
    np.savez(site_folder / "own.npz", x_labelled=rows.x.numpy(), y_labelled=rows.y.numpy(),
             x_unlabelled=rows.x[:3].numpy())  # fmt: skip
    edit(site_folder / "c.yaml", ("unlabelled: 30", "unlabelled: 30, labels: labels-at-client"),
         ("support: 2, query: 1", "mixed: 2"))  # fmt: skip
    edit(site_folder / "site.yaml", ("agent: s0, role: support", "agent: m0, role: mixed"),
         ("split: split.json", "arrays: own.npz, classes: 10"),
         ("folder: kept", "folder: new"))  # fmt: skip
    with pytest.raises(AccountingError, match="without protection"):
        open_handler(site_folder)


def test_the_command_describes_a_site_and_reports_mistakes_without_a_traceback(
    site_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(site_folder / "site.yaml")]) == 0
    out = capsys.readouterr().out
    assert "s0, a support agent with 12 labelled rows." in out
    assert "Epsilon 0.0000 of 5 spent (delta 0.001) in 0 steps." in out
    edit(site_folder / "site.yaml", ("role: support", "role: query"))
    assert main([str(site_folder / "site.yaml")]) == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err and "a query agent has no labelled rows" in printed.err


@pytest.fixture
def parents_open_to_others(site_folder: Path) -> Iterator[None]:
    """Let other users traverse the folders above ``site_folder``, which pytest makes private."""
    modes = {folder: stat.S_IMODE(folder.stat().st_mode) for folder in site_folder.parents}
    closed = {folder: mode for folder, mode in modes.items() if mode & 0o011 != 0o011}
    for folder, mode in closed.items():
        folder.chmod(mode | 0o011)
    yield
    for folder, mode in closed.items():
        folder.chmod(mode)


@pytest.mark.slow
@pytest.mark.usefixtures("parents_open_to_others")
def test_the_command_warns_of_files_that_other_users_can_read(
    site_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVSSL_DATA", str(site_folder / "nothing"))
    assert main([str(site_folder / "site.yaml")]) == 0  # creates the site's folder
    warned = {}
    for mode, above in ((0o644, 0o711), (0o600, 0o711), (0o644, 0o700), (0o640, 0o710)):
        (site_folder / "split.json").chmod(mode)
        site_folder.chmod(above)
        assert main([str(site_folder / "site.yaml")]) == 0
        warned[mode, above] = "Other users" in capsys.readouterr().err
    assert list(warned.values()) == [True, False, False, True]
    (site_folder / "kept").chmod(0o755)
    assert main([str(site_folder / "site.yaml")]) == 0
    assert f"can read {site_folder / 'kept'}. Remove" in capsys.readouterr().err
    (site_folder / "key").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    monkeypatch.setattr(supernode, "_find_key_problem", lambda data: "")
    for mode, said in ((0o640, True), (0o600, False)):
        (site_folder / "key").chmod(mode)
        assert main([str(site_folder / "site.yaml"), "--key", str(site_folder / "key")]) == 0
        assert (f"can read {site_folder / 'key'}. Remove" in capsys.readouterr().err) == said


@pytest.mark.usefixtures("parents_open_to_others")
def test_the_command_warns_if_other_users_can_read_cached_encoder_features(
    site_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVSSL_DATA", str(site_folder))
    site = settings.load_site_config(site_folder / "site.yaml")
    assert caches(site_folder) == ()
    rows = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    ones = Encoder("ones", (1,), "e" * 64, "nothing", lambda: lambda x: torch.ones(len(x), 1))
    encode(ones, rows, site_folder)
    [kept] = (site_folder / "encoders").iterdir()
    assert list(kept.glob("*.safetensors")) and kept in site.secrets
    site_folder.chmod(0o711)
    warned = {}
    for mode in (0o755, 0o700):
        kept.chmod(mode)
        assert main([str(site_folder / "site.yaml")]) == 0
        warned[mode] = f"can read {kept}. Remove" in capsys.readouterr().err
    assert warned == {0o755: True, 0o700: False}


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda whole: whole.replace(b'"visit"', b'"vizit"'), "line 3: reserve: has keys"),
        (lambda whole: whole[:9], "there is no complete plan line"),
    ],
    ids=["an edit", "the first line, torn"],
)
def test_the_command_reports_a_damaged_ledger_before_the_site_serves(
    site_folder: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[bytes], bytes],
    text: str,
) -> None:
    handler = open_handler(site_folder)
    send_visit(handler, step_request(handler))
    ledger = site_folder / "kept/ledger/s0.jsonl"
    ledger.write_bytes(damage(ledger.read_bytes()))
    assert main([str(site_folder / "site.yaml")]) == 2
    printed = capsys.readouterr()
    assert text in printed.err and "Traceback" not in printed.err and printed.out == ""


def _restore_older_ledger(site_folder: Path) -> None:
    ledger = site_folder / "kept/ledger/s0.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:3]))


def _restore_and_extend_ledger(site_folder: Path) -> None:
    """Restore an older ledger, and charge it without the mark."""
    _restore_older_ledger(site_folder)
    mark = site_folder / "kept/ledger.mark"
    mark.rename(site_folder / "mark")
    for visit in (7, 8):
        send_visit(open_handler(site_folder), step_request(open_handler(site_folder), visit=visit))
    (site_folder / "mark").replace(mark)


def _mark_is_folder(site_folder: Path) -> None:
    (site_folder / "kept/ledger.mark").unlink()
    (site_folder / "kept/ledger.mark").mkdir()


LEDGER_FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "restored": (_restore_older_ledger, r"ledger.mark\) records entry . it was cut or rolled back"),
    "extended": (_restore_and_extend_ledger, "the journal was cut and written on"),
    "missing": (lambda p: (p / "kept/ledger/s0.jsonl").unlink(),
                "ledger.mark says that steps were charged to it. Correct site.folder or budget"),
    "torn mark": (lambda p: (p / "kept/ledger.mark").write_text("{"),
                  "ledger.mark: damaged .* put it back"),
    "mark of texts": (lambda p: (p / "kept/ledger.mark").write_text('{"seq": "a", "head": 1}'),
                      "ledger.mark: damaged .* put it back"),
    "unreadable mark": (_mark_is_folder, "ledger.mark: cannot be read .* correct its rights"),
}  # fmt: skip


@pytest.mark.parametrize("kind", LEDGER_FAULTS)
def test_the_command_reports_a_ledger_that_contradicts_its_mark_before_the_site_serves(
    site_folder: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    handler = open_handler(site_folder)
    assert [send_visit(handler, step_request(handler, visit=n)).error for n in (1, 2)] == ["", ""]
    assert main([str(site_folder / "site.yaml")]) == 0  # the control
    assert "spent (delta 0.001) in 2 steps" in capsys.readouterr().out
    damage, text = LEDGER_FAULTS[kind]
    damage(site_folder)
    capsys.readouterr()
    assert main([str(site_folder / "site.yaml")]) == 2
    printed = capsys.readouterr()
    assert re.search(text.replace("entry .", "entry [0-9]+:"), printed.err), printed.err
    assert "Traceback" not in printed.err and printed.out == ""
    with count_reads_and_noise() as seen:
        assert send_visit(handler, step_request(handler, visit=3)).error == "ledger"
    assert seen["read"] == 0


def test_a_mistyped_ledger_folder_is_refused_and_not_created(site_folder: Path) -> None:
    handler = open_handler(site_folder)
    send_visit(handler, step_request(handler))
    edit(site_folder / "site.yaml", ("delta: 1.0e-3", "delta: 1.0e-3, ledger: kept/leger"))
    with pytest.raises(AccountingError, match=r"leger/s0.jsonl: missing, .*Correct site.folder or"):
        open_handler(site_folder)
    assert not (site_folder / "kept/leger").exists()


def test_the_error_about_an_unwritable_ledger_says_what_to_do(site_folder: Path) -> None:
    (site_folder / "kept").mkdir()
    (site_folder / "kept/ledger").write_text("no folder")
    text = r"registry: cannot be read or written .* correct its path and rights, or free space"
    with pytest.raises(AccountingError, match=text):
        open_handler(site_folder)


def test_the_socket_serves_other_requests_while_one_takes_long(tmp_path: Path) -> None:
    def handle(frame: bytes) -> bytes:
        time.sleep(300.0 if frame == b"long" else 0.0)
        return frame[::-1]

    with serving(tmp_path / "door", handle):
        assert send_request(tmp_path / "door", b"", 60) == b""
        long = b"ab" * 3_000_000
        assert send_request(tmp_path / "door", long, 60) == long[::-1]
        waits = threading.Thread(target=_send_long_request, args=(tmp_path / "door",), daemon=True)
        waits.start()
        assert send_request(tmp_path / "door", b"abc", 60) == b"cba"
        with pytest.raises(OSError):
            send_request(tmp_path / "door", b"long", 0.1)


def _send_long_request(path: Path) -> None:
    with contextlib.suppress(OSError):
        send_request(path, b"long", 300)


def test_unfinished_requests_occupy_a_limited_number_of_connections(
    tmp_path: Path,
) -> None:
    path = tmp_path / "door"
    with serving(path, bytes.upper), contextlib.ExitStack() as stack:
        begun = [
            stack.enter_context(socket.socket(socket.AF_UNIX))
            for _ in range(socket_server.MAX_CONNECTIONS)
        ]
        for number, unfinished in enumerate(begun):
            assert send_request(path, b"a", 60) == b"A", f"{number} requests are unfinished"
            unfinished.connect(str(path))
            unfinished.sendall((10**9).to_bytes(8, "little") + b"the first bytes")
        with pytest.raises(TimeoutError):
            send_request(path, b"a", 0.5)
        begun[0].close()
        assert send_request(path, b"a", 60) == b"A"


def test_only_one_process_serves_a_socket_and_a_stale_socket_is_replaced(
    tmp_path: Path,
) -> None:
    path, connected = tmp_path / "door", list[str]()
    with serving(path, bytes.upper):
        with pytest.raises(UserError, match="another process serves this site"):
            socket_server.serve(path, bytes.upper, lambda: connected.append("a SuperNode"))
        assert not connected
        assert oct(path.stat().st_mode)[-3:] == "660"
    assert path.exists()
    with pytest.raises(OSError):
        send_request(path, b"a", 1)
    with serving(path, bytes.upper):
        assert becomes_true(lambda: send_request(path, b"a", 60) == b"A")


def test_a_folder_where_no_socket_can_be_created_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(socket_server._Server, "server_bind", raise_disk_full)
        with pytest.raises(UserError, match=r"door: no socket can be made here: No space.*door"):
            socket_server.serve(tmp_path / "door", bytes.upper)
    with serving(tmp_path / "door", bytes.upper):  # the control
        assert send_request(tmp_path / "door", b"a", 60) == b"A"


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_path_that_is_no_socket_is_left_unchanged(tmp_path: Path, kind: str) -> None:
    path, rows = tmp_path / "door", tmp_path / "rows.npz"
    rows.write_text("rows")
    if kind == "folder":
        path.mkdir()
    elif kind == "file":
        rows.rename(path)
    else:
        path.symlink_to(rows)
    with pytest.raises(UserError, match="exists and is not a socket"):
        socket_server.serve(path, bytes.upper)
    assert path.is_dir() or path.read_text() == "rows"


def becomes_true(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            return true()
        time.sleep(0.01)
    return False


def test_the_socket_server_does_not_import_torch() -> None:
    code = "import sys, privssl.site.socket_server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_incomplete_request_does_not_disturb_the_next_one(tmp_path: Path) -> None:
    with serving(tmp_path / "door", bytes.upper):
        with socket.socket(socket.AF_UNIX) as half:
            half.connect(str(tmp_path / "door"))
            half.sendall((100).to_bytes(8, "little") + b"only this")
        with socket.socket(socket.AF_UNIX) as huge:
            huge.connect(str(tmp_path / "door"))
            huge.sendall((2**60).to_bytes(8, "little"))
        assert send_request(tmp_path / "door", b"a", 60) == b"A"


def test_the_mark_records_the_end_of_the_ledger_and_a_damaged_mark_stops_visits(
    site_folder: Path,
) -> None:
    handler = open_handler(site_folder)
    send_visit(handler, step_request(handler))
    mark = json.loads((site_folder / "kept/ledger.mark").read_text())
    journal = read_journal(site_folder / "kept/ledger/s0.jsonl")
    assert mark == {"seq": journal.seq, "head": journal.head}
    (site_folder / "kept/ledger.mark").write_text("{}")
    assert send_visit(handler, step_request(handler, visit=2)).error == "ledger"
