"""A site answers each visit once, charges before it reads, and is moved by no request.

The site is a real one, opened from a SITE.yaml: FedSSL-DP on toy rows. Its processes are killed at
each moment of a visit, and what they read and drew is written down before it can leave. Requests of
a malicious coordinator stand in a table, each with the word that it gets.
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
from privssl.privacy.noisy_optimizer import SecureNoise
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
from tests.support.damage import KINDS, Watched, damaged
from tests.support.site import send_request, serving
from tests.support.transports import at_moment, in_a_fork

# Epsilon of full batches is a formula and takes no time.
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
    """Who holds which toy rows."""
    folder = tmp_path_factory.mktemp("split")
    (folder / "c.yaml").write_text(CONFIG)
    prepared = prepare(configs.load_config(folder / "c.yaml"))
    prepared.federated_data.manifest.write(folder / "split.json")
    return folder / "split.json"


@pytest.fixture
def place(tmp_path: Path, split: Path) -> Path:
    """A folder with the config, the split and a SITE.yaml."""
    shutil.copy(split, tmp_path)
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "site.yaml").write_text(SITE)
    return tmp_path


def opened(place: Path, **changes: Any) -> SiteRequestHandler:
    handler = startup.open_site(settings.load_site_config(place / "site.yaml"))
    return dataclasses.replace(handler, **changes) if changes else handler


def edit(path: Path, *pairs: tuple[str, str]) -> None:
    text = path.read_text()
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)


def make_request(handler: SiteRequestHandler) -> FedSSLRequest:
    """What a coordinator sends first."""
    home = LocalEngine([], seed=0, device=transports.CPU)
    federation = Federation(home, 0)
    federation.begin(Round(1))
    algorithm = handler.algorithm
    assert isinstance(algorithm, FedSSL)
    return algorithm._request(algorithm.start(federation), federation)


def visit_to(handler: SiteRequestHandler, told: Any = None, /, **changes: Any) -> StepRequest:
    told = told or make_request(handler)
    plain: dict[str, Any] = {
        "run": "r1", "agreement": handler.agreement, "agent": handler.agent.id, "round": 1,
        "step": "support_pass", "visit": 1, "memory": "", "message": type(told).__name__,
        "deadline": 10**11, "body": serialize(told),
    }  # fmt: skip
    return StepRequest(**(plain | changes))


def ask(handler: SiteRequestHandler, visit: StepRequest) -> StepResponse:
    answer: StepResponse = protocol.from_bytes(
        handler.handle(protocol.to_bytes(visit)), StepResponse
    )
    return answer


def spent(place: Path) -> int:
    """Charges in the ledger."""
    return len(read_journal(place / "kept/ledger/s0.jsonl").events)


@contextlib.contextmanager
def watched() -> Iterator[dict[str, int]]:
    """Inside, counts how often labelled rows are trained on, and noise is drawn."""
    seen = {"read": 0, "noise": 0}

    def counted(kind: str) -> Callable[..., Any]:
        def action(old: Any, *given: Any, **named: Any) -> Any:
            seen[kind] += 1
            return old(*given, **named)

        return action

    with (
        at_moment(secure_noise, "secure_normal", counted("noise")),
        at_moment(FedSSL, "_train_privately", counted("read")),
    ):
        yield seen


def test_a_site_takes_no_split_whose_order_follows_from_labels(place: Path) -> None:
    assert opened(place).agent.id == "s0"  # the control: rows as they are stored
    spread = dataclasses.replace(configs.load_config(place / "c.yaml").data, order="by-class")
    found = data.build(spread, AgentSettings(support=2, query=1), 0)
    found.manifest.write(place / "split.json")
    with pytest.raises(PrivacyError, match=r"split\.json was drawn with data\.order"):
        opened(place)


# Once -----------------------------------------------------------------------------------------


def test_a_visit_is_charged_and_the_same_request_again_gets_the_stored_reply(place: Path) -> None:
    handler = opened(place)
    frame = protocol.to_bytes(visit_to(handler))
    with watched() as seen:
        first = handler.handle(frame)
        assert (spent(place), seen["read"]) == (1, 1) and seen["noise"] > 0
        drawn = seen["noise"]
        assert handler.handle(frame) == first
        assert opened(place).handle(frame) == first  # another process, later
        late = dataclasses.replace(visit_to(handler), deadline=1)
        assert (
            handler.handle(protocol.to_bytes(late)) == first
        )  # what is done costs nothing to tell
        assert (spent(place), seen["read"], seen["noise"]) == (1, 1, drawn)
    answer = protocol.from_bytes(first, StepResponse)
    assert (answer.error, answer.message, answer.weight, answer.notes) == (
        "",
        "FedSSLUpdate",
        1.0,
        {},
    )


def test_another_message_or_run_or_visit_is_charged_and_noised_anew(place: Path) -> None:
    handler = opened(place)
    other = dataclasses.replace(make_request(handler), mixes_teach=False)
    visits = [
        visit_to(handler), visit_to(handler, other), visit_to(handler, run="r2"),
        visit_to(handler, visit=2),
    ]  # fmt: skip
    answers = [ask(handler, visit) for visit in visits]
    assert [answer.error for answer in answers] == [""] * 4
    assert spent(place) == 4
    assert len({answer.body for answer in answers}) == 4


def test_no_number_of_requests_spends_more_than_the_budget(place: Path) -> None:
    handler = opened(place)
    with watched() as seen:
        answers = [ask(handler, visit_to(handler, visit=n, run=f"r{n}")) for n in range(1, 13)]
    journal = read_journal(place / "kept/ledger/s0.jsonl")
    worked = [a for a in answers if a.message == "FedSSLUpdate"]
    assert 0 < len(worked) < len(answers) and journal.epsilon <= 5.0
    assert seen["read"] == len(worked) == len(journal.events)
    declined = answers[-1]
    assert deserialize(Declined, declined.body) == Declined("privacy budget is spent")


def test_a_smaller_budget_of_the_operator_holds_whatever_the_config_promises(place: Path) -> None:
    edit(place / "site.yaml", ("epsilon: 5.0", "epsilon: 2.0"))
    handler = opened(place)
    few = sum(
        ask(handler, visit_to(handler, visit=n)).message == "FedSSLUpdate" for n in range(1, 9)
    )
    assert read_journal(place / "kept/ledger/s0.jsonl").epsilon <= 2.0
    edit(place / "site.yaml", ("epsilon: 2.0", "epsilon: 5.0"))
    with pytest.raises(AccountingError, match="the budget cannot rise from 2 to 5"):
        opened(place)
    assert few == spent(place)


def test_an_operator_is_told_before_a_run_that_it_may_spend_more_than_is_left(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handler = opened(place)
    assert "is left" not in caplog.text  # the control: a whole budget
    assert ask(handler, visit_to(handler)).error == ""
    left = 5.0 - read_journal(place / "kept/ledger/s0.jsonl").epsilon
    opened(place)
    assert "may spend epsilon 5 of each labelled row, and of this site's" in caplog.text
    assert f"budget.epsilon 5 at most {left:.4f} is left" in caplog.text


# A malicious coordinator ------------------------------------------------------------------------


def _nan(handler: SiteRequestHandler) -> StepRequest:
    F = {name: torch.full_like(w, float("nan")) for name, w in make_request(handler).F.items()}
    return visit_to(handler, body=serialize(dataclasses.replace(make_request(handler), F=F)))


CROOKED: dict[str, tuple[Callable[[SiteRequestHandler], StepRequest], str]] = {
    "another agent": (lambda d: visit_to(d, agent="s1"), "refused"),
    "another config": (lambda d: visit_to(d, agreement="0" * 64), "config"),
    "a step of another role": (lambda d: visit_to(d, step="query_pass"), "refused"),
    "a method that is no step": (lambda d: visit_to(d, step="check_private"), "refused"),
    "a step that does not exist": (lambda d: visit_to(d, step="give_rows"), "refused"),
    "an attribute of the class": (lambda d: visit_to(d, step="StateType"), "refused"),
    "a message of another step": (lambda d: visit_to(d, Ack()), "refused"),
    "bytes that are no message": (lambda d: visit_to(d, body=b"cos\nsystem\n"), "refused"),
    "a message without a field": (lambda d: visit_to(d, Ack(), message="FedSSLRequest"), "refused"),
    "weights that are no numbers": (_nan, "refused"),
    "a memory that is not here": (lambda d: visit_to(d, memory="f" * 64), "forgotten"),
    "a deadline that has passed": (lambda d: visit_to(d, deadline=1), "late"),
}


@pytest.mark.parametrize("kind", CROOKED)
def test_a_malicious_request_gets_a_word_and_costs_nothing(place: Path, kind: str) -> None:
    make, word = CROOKED[kind]
    handler = opened(place)
    with watched() as seen:
        answer = ask(handler, make(handler))
    assert answer == StepResponse(answer.id, error=word)
    assert (spent(place), seen) == (0, {"read": 0, "noise": 0})
    assert ask(handler, visit_to(handler)).error == ""  # the control: an honest one is done


def test_weights_of_another_form_cost_the_crook_a_charge_and_tell_nothing(place: Path) -> None:
    handler = opened(place)
    malicious = dataclasses.replace(make_request(handler), F={"w": torch.zeros(3)})
    assert ask(handler, visit_to(handler, malicious)).error == "failed"
    assert spent(place) == 1  # paid before anything is looked at
    assert ask(handler, visit_to(handler, malicious)).error == "lost"
    assert spent(place) == 1


HARM = """\
import os
os.mkdir(os.environ["MARK"])
from tests.api.digits import Net
"""


def test_a_site_imports_only_the_network_that_its_own_file_names(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = place / "mark"
    (place / "harmful_site_network.py").write_text(HARM)
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("MARK", str(mark))
    named = "harmful_site_network:Net"
    edit(place / "c.yaml", ("{name: small_cnn, width: 4}", f"{{name: '{named}'}}"))
    for here in ("", f", network: '{named}2'"):  # not named, or another one
        text = SITE.replace("folder: kept", f"folder: kept{here}")
        (place / "site.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"Read that code; then allow it with site\.network"):
            opened(place)
        assert not mark.exists()
    (place / "site.yaml").write_text(
        SITE.replace("folder: kept", f"folder: kept, network: '{named}'")
    )
    handler = opened(place)  # the control: it is imported, and its visits are charged
    assert mark.exists()
    assert ask(handler, visit_to(handler)).charged
    assert spent(place) == 1


HARM_OF_METHOD = """\
import os
os.mkdir(os.environ["MARK"])
from tests.testing.own_method import Own
"""


def test_a_site_imports_only_the_plug_ins_that_its_own_file_names(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, named = place / "mark", "harmful_site_method:Own"
    (place / "harmful_site_method.py").write_text(HARM_OF_METHOD)
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("MARK", str(mark))
    # A coordinator with such a config is refused by a site of another one, which imports nothing.
    handler, text = opened(place), (place / "c.yaml").read_text()
    theirs = text[: text.index("algorithm:")] + f"algorithm: {{name: '{named}', rounds: 8}}\n"
    for key in ("step", "message"):  # a request has no place for a reference
        with pytest.raises(ValueError, match="should match pattern"):
            visit_to(handler, **{key: named})
    asked = [visit_to(handler, agreement="b" * 64), visit_to(handler, step="Own")]
    assert [ask(handler, request).error for request in asked] == ["config", "refused"]
    assert not mark.exists() and spent(place) == 0
    # A tracker is the coordinator's: no site has one.
    trackers = f"run: {{seed: 0, trackers: ['{named}'], "
    (place / "c.yaml").write_text(text.replace("run: {seed: 0, ", trackers))
    opened(place)
    assert not mark.exists()
    # The same config at the site, without a word of its operator.
    (place / "c.yaml").write_text(theirs + text[text.index("privacy:") :])
    for here in ("", f", plugins: ['{named}2']", f", network: '{named}2'"):
        (place / "site.yaml").write_text(SITE.replace("folder: kept", f"folder: kept{here}"))
        with pytest.raises(ConfigError, match=r"nobody allowed it(.|\n)*site\.plugins"):
            opened(place)
        assert not mark.exists()
    allowed = SITE.replace("folder: kept", f"folder: kept, plugins: ['{named}']")
    (place / "site.yaml").write_text(allowed)
    handler = opened(place)  # the control
    assert mark.exists() and type(handler.algorithm).__name__ == "Own"


def test_less_noise_in_the_coordinators_config_is_another_config(place: Path) -> None:
    handler = opened(place)
    edit(place / "c.yaml", ("noise_multiplier: 2.0", "noise_multiplier: 0.5"))
    theirs = configs.compatibility_hash(
        configs.load_config(place / "c.yaml"), tuple(map(str, range(10))), (1, 8, 8)
    )
    assert ask(handler, visit_to(handler, agreement=theirs)).error == "config"
    assert spent(place) == 0


def test_labelled_rows_are_out_of_reach_of_a_step_that_forgot_to_pay(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def unpaid(self: FedSSL, agent: Any, msg: FedSSLRequest, ctx: Any) -> Declined:
        found.append(float(agent.labelled.x.float().mean()))
        return Declined("read them")

    monkeypatch.setattr(FedSSL, "_private_pass", unpaid)
    handler = opened(place)
    assert ask(handler, visit_to(handler)).error == "failed" and not found
    monkeypatch.setattr(step_runner, "ChargedRows", lambda rows, *_, **__: rows)
    assert ask(handler, visit_to(handler, visit=2)).error == "" and found  # the control


def test_a_plan_for_a_network_that_the_method_has_not_opens_no_site(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(place)  # the control
    monkeypatch.setattr(FedSSL, "networks", lambda self: {"G": self._networks["G"]})
    with pytest.raises(PrivacyError, match="fedssl has no network F"):
        opened(place)


def test_of_an_error_one_word_leaves_and_the_rest_stays_in_the_log(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("row 7 is patient 4711")

    monkeypatch.setattr(FedSSL, "_train_privately", fail)
    handler = opened(place)
    data = handler.handle(protocol.to_bytes(visit_to(handler)))
    assert protocol.from_bytes(data, StepResponse).error == "failed" and b"4711" not in data
    assert "patient 4711" in caplog.text


def test_an_introduction_tells_no_number_of_rows(place: Path) -> None:
    handler = opened(place)
    found = protocol.from_bytes(handler.handle(protocol.to_bytes(IdentifyRequest())), Identity)
    assert found == Identity("s0", "support", handler.agreement, False, python_fingerprint())
    edit(place / "c.yaml", ("labelled: 24", "labelled: 25"))  # only what is declared is in it
    assert opened(place).agreement != handler.agreement


# Bad luck -------------------------------------------------------------------------------------


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(old: Any, *given: Any, **named: Any) -> None:
    die()


def after(old: Any, *given: Any, **named: Any) -> None:
    old(*given, **named)
    die()


def on_line(kind: str, action: Callable[..., Any]) -> Callable[..., Any]:
    def append(old: Any, self: Any, record: Any) -> Any:
        return (action if record["type"] == kind else lambda o, *g: o(*g))(old, self, record)

    return append


def half_a_line(old: Any, self: Any, record: Any) -> None:
    os.write(self._file, b'{"type": "res')
    die()


def half_an_answer(old: Any, path: Path, data: Any) -> None:
    if path.name.endswith(".answer"):
        old(path, data[: len(data) // 2])
        die()
    old(path, data)


FILE = journals.JournalFile
#: moment -> where it is, what happens there, and what the request gets when it comes again
MOMENTS: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "before the reserve": (FILE, "append", on_line("reserve", before), ""),
    "within the reserve": (FILE, "append", on_line("reserve", half_a_line), ""),
    "after the reserve": (FILE, "append", on_line("reserve", after), "lost"),
    "before the first gradient": (dp_sgd, "factored_gradients", before, "lost"),
    "after the noise": (SecureNoise, "add_noise", after, "lost"),
    "before the settle": (FILE, "append", on_line("settle", before), "lost"),
    "after the settle": (FILE, "append", on_line("settle", after), "lost"),
    "before the answer is stored": (Store, "put_answer", before, "lost"),
    "within the answer": (atomic_files, "write_new", half_an_answer, "lost"),
    "before the answer leaves": (Store, "put_answer", after, ""),
}


def noted(path: Path) -> Any:
    """Write down in a file, before it can leave, that rows are read."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def reads(old: Any, *given: Any) -> Any:
        os.write(log, b"r")
        return old(*given)

    return at_moment(FedSSL, "_train_privately", reads)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_site_that_is_killed_at_any_moment_has_paid_for_what_it_read(
    place: Path, moment: str
) -> None:
    owner, name, action, word = MOMENTS[moment]
    frame, notes = protocol.to_bytes(visit_to(opened(place))), place / "notes"

    def killed() -> bytes:
        with noted(notes), at_moment(owner, name, action):
            return opened(place).handle(frame)

    assert in_a_fork(killed) is None, "the control: it did die there"
    with noted(notes):
        handler = opened(place)
        answers = [handler.handle(frame) for _ in range(2)]
    assert answers[0] == answers[1]
    assert protocol.from_bytes(answers[0], StepResponse).error == word
    assert read_journal(place / "kept/ledger/s0.jsonl").problems == []
    assert len(notes.read_bytes()) <= spent(place) in (1, 2)  # 2: half a line counts as well
    # The next visit is one like any other.
    assert ask(handler, visit_to(handler, visit=2)).error == ""


def test_a_site_that_pays_after_it_has_read_would_be_found_out(place: Path) -> None:
    real = Account.spend

    @contextlib.contextmanager
    def late(self: Account, event: Any, visit: str) -> Iterator[None]:
        yield
        with real(self, event, visit):
            pass

    frame, notes = protocol.to_bytes(visit_to(opened(place))), place / "notes"

    def killed() -> bytes:
        Account.spend = late  # type: ignore[method-assign]
        vars(step_runner)["ChargedRows"] = lambda rows, *_, **__: rows
        with noted(notes), at_moment(SecureNoise, "add_noise", after):
            return opened(place).handle(frame)

    assert in_a_fork(killed) is None
    assert len(notes.read_bytes()) == 1 > spent(place) == 0


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_at_the_ledger_gets_a_word_and_no_row_is_read(place: Path) -> None:
    handler = opened(place)
    visit = visit_to(handler)

    def no_room(old: Any, self: Any, record: Any) -> Any:
        with at_moment(journals, "_write_all", full):
            return old(self, record)

    with watched() as seen:
        with at_moment(FILE, "append", on_line("reserve", no_room)):
            assert ask(handler, visit).error == "ledger"
        assert seen["read"] == 0 and spent(place) == 0
        assert ask(handler, visit).error == "" and seen["read"] == 1  # the control


def test_where_a_reply_would_find_no_room_nothing_is_charged(place: Path) -> None:
    handler = opened(place)
    visit = visit_to(handler)

    def little(old: Any, folder: Path) -> Any:
        return old(folder)._replace(free=3 * len(visit.body))

    with at_moment(shutil, "disk_usage", little):
        assert ask(handler, visit) == StepResponse(visit.id, error="disk")
    assert spent(place) == 0
    assert ask(handler, visit).error == ""  # the control


def test_a_reply_that_cannot_be_stored_does_not_leave_and_is_lost(place: Path) -> None:
    handler = opened(place)
    visit = visit_to(handler)
    with at_moment(Store, "put_answer", full):
        assert ask(handler, visit) == StepResponse(visit.id, error="disk")
    assert ask(handler, visit).error == "lost"
    assert spent(place) == 1


def test_a_ledger_that_is_gone_cut_or_in_use_gets_a_word_and_no_row_is_read(place: Path) -> None:
    handler = opened(place)
    assert ask(handler, visit_to(handler)).error == ""
    ledger = place / "kept/ledger/s0.jsonl"
    whole = ledger.read_bytes()
    with watched() as seen:
        ledger.unlink()
        assert ask(handler, visit_to(handler, visit=2)).error == "ledger"
        ledger.write_bytes(b"".join(whole.splitlines(keepends=True)[:1]))  # a chain, but shorter
        assert ask(handler, visit_to(handler, visit=2)).error == "ledger"
        ledger.write_bytes(whole)
        assert handler.open_account is not None
        with contextlib.closing(handler.open_account("r7")):
            assert ask(handler, visit_to(handler, visit=2)).error == "ledger"
        assert seen["read"] == 0
    assert ask(handler, visit_to(handler, visit=2)).error == ""  # the control


def test_a_ledger_is_moved_as_a_whole_folder_or_refused(place: Path) -> None:
    """The registry knows which rows were used without protection: without it they get a budget."""
    handler = opened(place)
    assert ask(handler, visit_to(handler, make_request(handler))).charged
    (place / "kept/ledger").rename(place / "moved")
    edit(place / "site.yaml", ("folder: kept", "folder: new"),
         ("delta: 1.0e-3", "delta: 1.0e-3, ledger: moved"))  # fmt: skip
    opened(place)  # the control: the whole folder, and its charge
    assert len(read_journal(place / "moved/s0.jsonl").events) == 1
    (place / "moved/registry").rename(place / "left behind")
    with pytest.raises(AccountingError, match=r"registry/s0.rows: missing, .*the whole folder"):
        opened(place)
    assert not (place / "moved/registry").exists()


def test_a_site_that_serves_begins_no_second_ledger_and_takes_no_older_one(place: Path) -> None:
    handler = opened(place)
    assert ask(handler, visit_to(handler)).error == ""
    shutil.copytree(place / "kept", place / "backup")
    assert ask(handler, visit_to(handler, visit=2)).error == ""
    for former in (None, place / "backup"):  # deleted, with its mark; restored, with its mark
        (place / "kept").rename(place / f"true {former is None}")
        if former is not None:
            former.rename(place / "kept")
        with watched() as seen:
            assert ask(handler, visit_to(handler, visit=3)).error == "ledger"
        assert seen["read"] == 0
        shutil.rmtree(place / "kept")
        (place / f"true {former is None}").rename(place / "kept")
    assert ask(handler, visit_to(handler, visit=3)).error == "" and spent(place) == 3  # the control


def test_a_stored_reply_that_the_disk_has_damaged_is_lost(place: Path) -> None:
    handler = opened(place)
    visit = visit_to(handler)
    assert ask(handler, visit).error == ""
    [stored] = (place / "kept/runs/r1").glob("*.answer")
    stored.write_bytes(b"privssl?")
    assert ask(handler, visit).error == "lost"
    assert spent(place) == 1


def test_two_processes_of_one_site_do_not_work_at_a_time(place: Path) -> None:
    handler, other, answers = opened(place), opened(place), []

    def meanwhile(old: Any, *given: Any) -> Any:
        answers.append(ask(other, visit_to(other, visit=2)).error)
        return old(*given)

    with at_moment(FedSSL, "_train_privately", meanwhile):
        assert ask(handler, visit_to(handler)).error == ""
    assert answers == ["busy"] and spent(place) == 1


# What is kept ---------------------------------------------------------------------------------


def test_the_last_visits_of_a_run_are_kept_and_older_ones_are_lost(place: Path) -> None:
    handler = opened(place)
    handler = dataclasses.replace(handler, store=Store(handler.store.folder, 2))
    visits = [visit_to(handler, visit=n) for n in (1, 2, 3)]
    assert [ask(handler, visit).error for visit in visits] == ["", "", ""]
    assert [ask(handler, visit).error for visit in visits] == ["lost", "", ""]
    assert spent(place) == 3


def test_memories_are_found_by_their_visit_in_their_order_and_unread_by_requests(
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
    assert store.memory("r2", visits[3]) is None  # another run's


def test_only_the_last_few_runs_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    for number in range(7):
        store.put_answer(f"r{number}", "a" * 64, b"x")
        os.utime(tmp_path / "runs" / f"r{number}", ns=(number, number))
    assert sorted(os.listdir(tmp_path / "runs")) == ["r3", "r4", "r5", "r6"]


def test_a_clock_that_was_set_back_costs_no_run_its_replies(place: Path) -> None:
    handler = opened(place)
    for former in range(5):  # as if made in a time that is still to come
        folder = place / "kept/runs" / f"former{former}"
        folder.mkdir(parents=True)
        os.utime(folder, (10**10, 10**10))
    frame = protocol.to_bytes(visit_to(handler))
    first = handler.handle(frame)
    assert protocol.from_bytes(first, StepResponse).error == "" and handler.handle(frame) == first
    assert ask(handler, visit_to(handler, visit=2)).error == ""
    assert len(os.listdir(place / "kept/runs")) == 4 and spent(place) == 2


def test_at_the_end_of_a_run_its_replies_go_and_the_journal_is_shown_if_allowed(
    place: Path,
) -> None:
    handler = opened(place)
    ask(handler, visit_to(handler))
    handler.handle(
        protocol.to_bytes(EndOfRun("r1", handler.agreement, False))
    )  # a run that stops, and will go on
    assert list((place / "kept/runs/r1").glob("*.answer"))
    leave = protocol.to_bytes(EndOfRun("r1", handler.agreement, True))
    gone = protocol.from_bytes(handler.handle(leave), protocol.LedgerResponse)
    assert gone == protocol.LedgerResponse("s0", b"")
    assert not (place / "kept/runs/r1").exists()
    assert ask(handler, visit_to(handler)).error == "lost"  # charged, and never done again

    edit(place / "site.yaml", ("folder: kept", "folder: kept, share_ledger: true"))
    shown = protocol.from_bytes(opened(place).handle(leave), protocol.LedgerResponse)
    assert shown.body == (place / "kept/ledger/s0.jsonl").read_bytes()


STRUCK = [(kind, visit, when) for kind in KINDS for visit in (1, 2) for when in ("in", "after")]


def struck(place: Path, kind: str, visit: int, when: str) -> tuple[Watched, Any]:
    """A site whose ledger is damaged at a visit: what was charged, and what it shows at the end."""
    edit(place / "site.yaml", ("folder: kept", "folder: kept, share_ledger: true"))
    handler = opened(place)
    with damaged(kind, visit, when, seed=STRUCK.index((kind, visit, when))) as watched:
        for number in (1, 2, 3):
            assert ask(handler, visit_to(handler, visit=number)).error in ("", "ledger")
        leave = protocol.to_bytes(EndOfRun("r1", handler.agreement, True))
        return watched, protocol.from_bytes(
            handler.handle(leave), protocol.LedgerResponse, StepResponse
        )


@pytest.mark.parametrize("kind, visit, when", STRUCK)
def test_a_site_whose_ledger_is_damaged_while_it_serves_shows_no_less_than_it_charged(
    place: Path, kind: str, visit: int, when: str
) -> None:
    watched, shown = struck(place, kind, visit, when)
    if (kind, when) == ("two writers", "in"):  # a true line of another writer: all charges stay
        journal = replay(journals.split_lines(shown.body)[0])
        assert journal.problems == [] and len(watched.entered) == 3
        assert journal.epsilon >= watched.spent(1e-3) - 1e-9
    else:
        assert len(watched.entered) == visit  # no row is read under a damaged ledger
        assert shown == StepResponse("", error="ledger")


def test_control_a_site_that_does_not_remember_its_ledger_shows_less_than_it_charged(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgets = property(lambda store: None, lambda store, mark: None)
    monkeypatch.setattr(Store, "mark", forgets)
    watched, shown = struck(place, "replace", 2, "after")
    journal = replay(journals.split_lines(shown.body)[0])
    assert journal.problems == [] and journal.epsilon < watched.spent(1e-3)


def test_a_coordinator_of_another_config_is_shown_no_journal_and_removes_nothing(
    place: Path,
) -> None:
    edit(place / "site.yaml", ("folder: kept", "folder: kept, share_ledger: true"))
    handler = opened(place)
    ask(handler, visit_to(handler))
    stranger = protocol.to_bytes(EndOfRun("r1", "0" * 64, True))
    assert protocol.from_bytes(
        handler.handle(stranger), protocol.LedgerResponse, StepResponse
    ) == StepResponse("", "config")
    assert list((place / "kept/runs/r1").glob("*.answer"))


def test_a_site_with_a_budget_takes_the_cpu_for_private_steps(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert opened(place).device == torch.device("cpu")
    edit(place / "site.yaml", ("folder: kept", "folder: kept, device: cuda"))
    with pytest.raises(ConfigError, match=r"site.device is 'cuda', but private steps need the CPU"):
        opened(place)


def test_losses_leave_only_where_the_operator_allows_it_and_never_beside_a_budget(
    place: Path,
) -> None:
    edit(place / "site.yaml", ("agent: s0, role: support", "agent: q0, role: query"),
         ("budget: {epsilon: 5.0, delta: 1.0e-3}\n", ""))  # fmt: skip
    shut = opened(place)
    visit = visit_to(shut, step="query_pass")
    assert ask(shut, visit).notes == {}
    edit(place / "site.yaml", ("folder: kept", "folder: other, share_notes: true"))
    assert ask(opened(place), visit).notes != {}
    edit(place / "site.yaml", ("agent: q0, role: query", "agent: s0, role: support"))
    (place / "site.yaml").write_text((place / "site.yaml").read_text() + SITE.splitlines()[-1])
    private, noted = opened(place), []

    def noting(old: Any, algorithm: FedSSL, agent: Any, told: Any, ctx: Any) -> Any:
        ctx.log_metric("loss", 1.0)  # of itself the private pass notes nothing
        noted.append(dict(ctx.metrics))
        return old(algorithm, agent, told, ctx)

    with at_moment(FedSSL, "_train_privately", noting):
        assert private.share_notes and ask(private, visit_to(private)).notes == {}
    assert noted == [{}]


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
def test_a_config_under_which_the_operators_promise_would_not_hold_is_refused(
    place: Path, pair: tuple[str, str], error: type[Exception], text: str
) -> None:
    edit(place / "c.yaml", pair)
    with pytest.raises(error, match=text):
        opened(place)


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
    ],
)
def test_an_operators_mistake_is_told_in_words(
    place: Path, pair: tuple[str, str], text: str
) -> None:
    edit(place / "site.yaml", pair)
    with pytest.raises(UserError, match=text):
        opened(place)


def test_a_delta_that_would_allow_to_publish_a_row_is_told_to_the_operator(place: Path) -> None:
    edit(place / "c.yaml", ("labelled: 24", "labelled: 20"))  # 10 of an agent, and s0 has 12
    for name in ("c.yaml", "site.yaml"):
        edit(place / name, ("delta: 1.0e-3", "delta: 0.083"))
    opened(place)  # the control: below 1 / 12
    for name in ("c.yaml", "site.yaml"):
        edit(place / name, ("delta: 0.083", "delta: 0.084"))
    with pytest.raises(PrivacyError, match=r"budget.delta is 0.084.*Give less than 1 / 12"):
        opened(place)


def test_with_private_counts_a_site_opens_whatever_the_number_of_its_rows(place: Path) -> None:
    private = "sample_rate: 1.0, record_counts: private"
    edit(place / "c.yaml", ("labelled: 24", "labelled: 20"), ("sample_rate: 1.0", private))
    for name in ("c.yaml", "site.yaml"):
        edit(place / name, ("delta: 1.0e-3", "delta: 0.084"))
    opened(place)  # 12 rows, of 10 that are declared


def test_a_site_with_a_budget_takes_no_weights_that_training_does_not_come_to(place: Path) -> None:
    handler = opened(place)
    told = make_request(handler)
    key = next(iter(told.F))
    for size, word in ((2e6, "refused"), (-2e6, "refused"), (1e6, "")):
        F = {**told.F, key: torch.full_like(told.F[key], size)}
        assert ask(handler, visit_to(handler, dataclasses.replace(told, F=F))).error == word


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.float64])
def test_weights_that_are_too_large_are_refused_whatever_type_of_number_they_have(
    place: Path, kind: torch.dtype
) -> None:
    handler = opened(place)
    told = make_request(handler)
    key = next(iter(told.F))
    lowest = torch.iinfo(kind).min if kind in (torch.int64, torch.int32) else -1e30
    for size, word in ((10**9, "refused"), (lowest, "refused"), (1, "")):
        F = {**told.F, key: torch.full_like(told.F[key], size, dtype=kind)}
        assert ask(handler, visit_to(handler, dataclasses.replace(told, F=F))).error == word


def test_a_request_that_states_a_larger_size_than_any_has_is_not_read(
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


def test_rows_come_from_arrays_or_from_a_folder_of_the_sites_own(place: Path) -> None:
    by_split = opened(place)
    rows = by_split.agent.labelled
    np.savez(place / "own.npz", x_labelled=rows.x.numpy(), y_labelled=rows.y.numpy())
    edit(place / "site.yaml", ("split: split.json", "arrays: own.npz, classes: 10"))
    (place / "kept").rename(place / "former")
    by_arrays = opened(place)
    assert by_arrays.agreement == by_split.agreement
    assert torch.equal(by_arrays.agent.labelled.x, rows.x)
    assert torch.equal(by_arrays.agent.labelled.y, rows.y)


@pytest.mark.parametrize("kind", [np.uint64, np.int64])
def test_a_label_below_zero_is_refused_before_an_account_is_opened(place: Path, kind: type) -> None:
    rows = opened(place).agent.labelled
    (place / "kept").rename(place / "former")
    edit(place / "site.yaml", ("split: split.json", "arrays: own.npz, classes: 10"))
    y = rows.y.numpy().copy()
    np.savez(place / "own.npz", x_labelled=rows.x.numpy(), y_labelled=y.astype(kind))
    opened(place)  # the control
    (place / "kept").rename(place / "good")
    y[3] = -1
    np.savez(place / "own.npz", x_labelled=rows.x.numpy(), y_labelled=y.astype(kind))
    with pytest.raises(UserError, match="y_labelled has the label"):
        opened(place)
    assert not (place / "kept/ledger").exists()


def test_a_folder_of_rows_that_are_built_in_has_no_effect_and_is_refused(place: Path) -> None:
    edit(place / "site.yaml", ("split: split.json", "split: split.json, root: somewhere"))
    with pytest.raises(ConfigError, match=r"rows\.root has no effect: .* is toy"):
        opened(place)


def test_rows_that_were_used_without_protection_get_no_budget(place: Path) -> None:
    rows = opened(place).agent.labelled
    np.savez(place / "own.npz", x_labelled=rows.x.numpy(), y_labelled=rows.y.numpy(),
             x_unlabelled=rows.x[:3].numpy())  # fmt: skip
    edit(place / "c.yaml", ("unlabelled: 30", "unlabelled: 30, labels: labels-at-client"),
         ("support: 2, query: 1", "mixed: 2"))  # fmt: skip
    edit(place / "site.yaml", ("agent: s0, role: support", "agent: m0, role: mixed"),
         ("split: split.json", "arrays: own.npz, classes: 10"),
         ("folder: kept", "folder: new"))  # fmt: skip
    with pytest.raises(AccountingError, match="without protection"):
        opened(place)


def test_the_command_describes_a_site_and_tells_of_mistakes_without_a_traceback(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(place / "site.yaml")]) == 0
    out = capsys.readouterr().out
    assert "s0, a support agent with 12 labelled rows." in out
    assert "Epsilon 0.0000 of 5 spent (delta 0.001) in 0 steps." in out
    edit(place / "site.yaml", ("role: support", "role: query"))
    assert main([str(place / "site.yaml")]) == 2
    told = capsys.readouterr()
    assert "Traceback" not in told.err and "a query agent has no labelled rows" in told.err


@pytest.fixture
def open_above(place: Path) -> Iterator[None]:
    """The folders above ``place``, which pytest closes, let other users through."""
    before = {folder: stat.S_IMODE(folder.stat().st_mode) for folder in place.parents}
    closed = {folder: mode for folder, mode in before.items() if mode & 0o011 != 0o011}
    for folder, mode in closed.items():
        folder.chmod(mode | 0o011)
    yield
    for folder, mode in closed.items():
        folder.chmod(mode)


@pytest.mark.usefixtures("open_above")
def test_files_that_other_users_could_read_are_told_of(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVSSL_DATA", str(place / "nothing"))
    assert main([str(place / "site.yaml")]) == 0  # which makes the site's folder
    told = {}
    for mode, above in ((0o644, 0o711), (0o600, 0o711), (0o644, 0o700), (0o640, 0o710)):
        (place / "split.json").chmod(mode)
        place.chmod(above)
        assert main([str(place / "site.yaml")]) == 0
        told[mode, above] = "Other users" in capsys.readouterr().err
    assert list(told.values()) == [True, False, False, True]
    (place / "kept").chmod(0o755)
    assert main([str(place / "site.yaml")]) == 0
    assert f"can read {place / 'kept'}. Remove" in capsys.readouterr().err
    (place / "key").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    monkeypatch.setattr(supernode, "_problem_of_key", lambda data: "")
    for mode, said in ((0o640, True), (0o600, False)):
        (place / "key").chmod(mode)
        assert main([str(place / "site.yaml"), "--key", str(place / "key")]) == 0
        assert (f"can read {place / 'key'}. Remove" in capsys.readouterr().err) == said


@pytest.mark.usefixtures("open_above")
def test_features_that_an_encoder_has_kept_are_a_secret_of_the_site(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVSSL_DATA", str(place))
    site = settings.load_site_config(place / "site.yaml")
    assert caches(place) == ()
    rows = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    ones = Encoder("ones", (1,), "0" * 64, "nothing", lambda: lambda x: torch.ones(len(x), 1))
    encode(ones, rows, place)
    [kept] = (place / "encoders").iterdir()
    assert list(kept.glob("*.safetensors")) and kept in site.secrets
    place.chmod(0o711)
    told = {}
    for mode in (0o755, 0o700):
        kept.chmod(mode)
        assert main([str(place / "site.yaml")]) == 0
        told[mode] = f"can read {kept}. Remove" in capsys.readouterr().err
    assert told == {0o755: True, 0o700: False}


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda whole: whole.replace(b'"visit"', b'"vizit"'), "line 3: reserve: has keys"),
        (lambda whole: whole[:9], "there is no complete plan line"),
    ],
    ids=["an edit", "the first line, torn"],
)
def test_a_damaged_ledger_is_told_to_the_operator_before_the_site_serves(
    place: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[bytes], bytes], text: str
) -> None:
    handler = opened(place)
    ask(handler, visit_to(handler))
    ledger = place / "kept/ledger/s0.jsonl"
    ledger.write_bytes(damage(ledger.read_bytes()))
    assert main([str(place / "site.yaml")]) == 2
    told = capsys.readouterr()
    assert text in told.err and "Traceback" not in told.err and told.out == ""


def _restored(place: Path) -> None:
    ledger = place / "kept/ledger/s0.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:3]))


def _written_on(place: Path) -> None:
    """Restored from a backup, and charged by somebody who did not know the mark."""
    _restored(place)
    mark = place / "kept/ledger.mark"
    mark.rename(place / "mark")
    for visit in (7, 8):
        ask(opened(place), visit_to(opened(place), visit=visit))
    (place / "mark").replace(mark)


def _no_file(place: Path) -> None:
    (place / "kept/ledger.mark").unlink()
    (place / "kept/ledger.mark").mkdir()


MARKED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "restored": (_restored, r"ledger.mark\) records entry . it was cut or rolled back"),
    "written on": (_written_on, "the journal was cut and written on"),
    "missing": (lambda p: (p / "kept/ledger/s0.jsonl").unlink(),
                "ledger.mark says that steps were charged to it. Correct site.folder or budget"),
    "torn mark": (lambda p: (p / "kept/ledger.mark").write_text("{"),
                  "ledger.mark: damaged .* put it back"),
    "mark of words": (lambda p: (p / "kept/ledger.mark").write_text('{"seq": "a", "head": 1}'),
                      "ledger.mark: damaged .* put it back"),
    "mark that cannot be read": (_no_file, "ledger.mark: cannot be read .* correct its rights"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MARKED)
def test_a_ledger_that_every_step_would_be_refused_for_is_told_before_the_site_serves(
    place: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    handler = opened(place)
    assert [ask(handler, visit_to(handler, visit=n)).error for n in (1, 2)] == ["", ""]
    assert main([str(place / "site.yaml")]) == 0  # the control
    assert "spent (delta 0.001) in 2 steps" in capsys.readouterr().out
    harm, text = MARKED[kind]
    harm(place)
    capsys.readouterr()
    assert main([str(place / "site.yaml")]) == 2
    told = capsys.readouterr()
    assert re.search(text.replace("entry .", "entry [0-9]+:"), told.err), told.err
    assert "Traceback" not in told.err and told.out == ""
    with watched() as seen:
        assert ask(handler, visit_to(handler, visit=3)).error == "ledger"
    assert seen["read"] == 0


def test_a_mistyped_folder_of_the_ledger_is_told_and_makes_nothing(place: Path) -> None:
    handler = opened(place)
    ask(handler, visit_to(handler))
    edit(place / "site.yaml", ("delta: 1.0e-3", "delta: 1.0e-3, ledger: kept/leger"))
    with pytest.raises(AccountingError, match=r"leger/s0.jsonl: missing, .*Correct site.folder or"):
        opened(place)
    assert not (place / "kept/leger").exists()


def test_a_ledger_that_cannot_be_written_is_told_with_what_to_do(place: Path) -> None:
    (place / "kept").mkdir()
    (place / "kept/ledger").write_text("no folder")
    text = r"registry: cannot be read or written .* correct its path and rights, or free space"
    with pytest.raises(AccountingError, match=text):
        opened(place)


def test_requests_go_through_a_socket_and_one_that_waits_holds_no_other_up(tmp_path: Path) -> None:
    def handle(frame: bytes) -> bytes:
        time.sleep(300.0 if frame == b"long" else 0.0)
        return frame[::-1]

    with serving(tmp_path / "door", handle):
        assert send_request(tmp_path / "door", b"", 60) == b""
        long = b"ab" * 3_000_000
        assert send_request(tmp_path / "door", long, 60) == long[::-1]
        waits = threading.Thread(target=_patiently, args=(tmp_path / "door",), daemon=True)
        waits.start()
        assert send_request(tmp_path / "door", b"abc", 60) == b"cba"
        with pytest.raises(OSError):
            send_request(tmp_path / "door", b"long", 0.1)


def _patiently(path: Path) -> None:
    with contextlib.suppress(OSError):
        send_request(path, b"long", 300)


def test_requests_that_are_never_finished_fill_no_memory_and_the_next_one_waits(
    tmp_path: Path,
) -> None:
    path = tmp_path / "door"
    with serving(path, bytes.upper), contextlib.ExitStack() as stack:
        begun = [
            stack.enter_context(socket.socket(socket.AF_UNIX))
            for _ in range(socket_server.MAX_CONNECTIONS)
        ]
        for number, unfinished in enumerate(begun):
            assert send_request(path, b"a", 60) == b"A", f"{number} letters are under way"
            unfinished.connect(str(path))
            unfinished.sendall((10**9).to_bytes(8, "little") + b"the first words")
        with pytest.raises(TimeoutError):
            send_request(path, b"a", 0.5)
        begun[0].close()
        assert send_request(path, b"a", 60) == b"A"


def test_one_process_serves_a_site_and_what_a_killed_one_left_is_in_nobodys_way(
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
        assert soon(lambda: send_request(path, b"a", 60) == b"A")


def test_a_disk_that_takes_no_socket_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(socket_server._Server, "server_bind", full)
        with pytest.raises(UserError, match=r"door: no socket can be made here: No space.*door"):
            socket_server.serve(tmp_path / "door", bytes.upper)
    with serving(tmp_path / "door", bytes.upper):  # the control
        assert send_request(tmp_path / "door", b"a", 60) == b"A"


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_socket_is_left_where_it_is(tmp_path: Path, kind: str) -> None:
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


def soon(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            return true()
        time.sleep(0.01)
    return False


def test_who_brings_requests_needs_no_torch() -> None:
    code = "import sys, privssl.site.socket_server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_request_that_breaks_off_harms_nobody(tmp_path: Path) -> None:
    with serving(tmp_path / "door", bytes.upper):
        with socket.socket(socket.AF_UNIX) as half:
            half.connect(str(tmp_path / "door"))
            half.sendall((100).to_bytes(8, "little") + b"only this")
        with socket.socket(socket.AF_UNIX) as huge:
            huge.connect(str(tmp_path / "door"))
            huge.sendall((2**60).to_bytes(8, "little"))
        assert send_request(tmp_path / "door", b"a", 60) == b"A"


def test_the_ledgers_end_is_remembered_beside_it(place: Path) -> None:
    handler = opened(place)
    ask(handler, visit_to(handler))
    mark = json.loads((place / "kept/ledger.mark").read_text())
    journal = read_journal(place / "kept/ledger/s0.jsonl")
    assert mark == {"seq": journal.seq, "head": journal.head}
    (place / "kept/ledger.mark").write_text("{}")
    assert ask(handler, visit_to(handler, visit=2)).error == "ledger"
