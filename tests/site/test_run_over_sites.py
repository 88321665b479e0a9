"""A whole run over sites: the training command, with sites of its own making behind the transport.

Flower is replaced by a function call (``transports.InProcessTransport``); all else is what a
deployment has, down to SITE.yaml and ledgers. test_flower.py has the same with Flower.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from accounting import verify
from accounting.ledger import Account, read_journal
from privssl.algorithms.fedssl.algorithm import FedSSL
from privssl.audit import __main__ as audit
from privssl.remote import flower_transport
from privssl.remote.discovery import RemoteTimeouts, SiteError
from privssl.runs import engine_factory, launch
from privssl.site import settings, startup
from privssl.site.demo import write_sites
from tests.support.command_line import assert_refused
from tests.support.resume import PLAIN, PRIVATE, Place, command
from tests.support.run_over_sites import DIGITS, on_digits
from tests.support.transports import InProcessTransport

#: A second of waiting for a site that is gone tells no more.
IMPATIENT = partial(RemoteTimeouts, retry_interval=0.02)


class Over:
    """Sites for a config, a place for the run over them, and what delivers its requests."""

    def __init__(self, folder: Path, text: str) -> None:
        (folder / "tiny.yaml").write_text(text)
        self.sites = folder / "sites"
        self.names = write_sites(self.sites, folder / "tiny.yaml", [])
        self.place = Place(self.sites / "experiment.yaml", folder / "run")
        self.transport = InProcessTransport({})
        self.open()

    def open(self) -> None:
        """As after a restart: every site is opened from its file."""
        for name in self.names:
            self.close(name)
            site = settings.load_site_config(self.sites / name / "site.yaml")
            self.transport.handlers[f"{name} opened"] = startup.open_site(site).handle

    def close(self, name: str) -> None:
        self.transport.handlers.pop(f"{name} opened", None)

    def train(self, *arguments: object) -> Any:
        how = {
            "run.engine": "flower", "run.workers": "auto", "run.join_seconds": "0.2",
            "run.visit_seconds": "20.0", "run.images_every": "1000",
        }  # fmt: skip
        if "--resume" not in arguments:
            how["run.output"] = str(self.place.run)
        how |= dict(str(given).split("=", 1) for given in arguments if "=" in str(given))
        flags = [given for given in arguments if "=" not in str(given)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_factory, "FlowerTransport", lambda *_: self.transport)
            patch.setattr(engine_factory, "RemoteTimeouts", IMPATIENT)
            patch.setattr(launch, "refuse_unreachable", lambda prepared: None)
            return command(self.place.config, *flags, *(f"{k}={v}" for k, v in how.items()))

    def journal(self, name: str) -> Any:
        return read_journal(self.sites / name / "ledger" / f"{name}.jsonl")


def metrics(place: Place) -> list[dict[str, str]]:
    header, *lines = (line.split(",") for line in place.metrics().decode().splitlines())
    return [dict(zip(header, line, strict=True)) for line in lines]


@pytest.fixture
def private(tmp_path: Path) -> Over:
    return Over(tmp_path, PRIVATE)


@contextlib.contextmanager
def at_visit(number: int, action: Any) -> Iterator[None]:
    """Inside, something happens before the support agents' visit of this number."""
    count, old = 0, FedSSL.support_pass

    def step(self: Any, agent: Any, msg: Any, ctx: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            action()
        return old(self, agent, msg, ctx)

    step.__annotations__ = old.__annotations__
    step.__name__, step.runs_on_agent = "support_pass", True  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedSSL, "support_pass", step)
        yield


# The same bits -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", DIGITS)
def test_a_run_over_sites_ends_with_the_weights_and_measures_of_one_process(
    tmp_path: Path, method: str
) -> None:
    over = Over(tmp_path, on_digits(method))
    outcome = over.train()
    assert outcome.status == 0, outcome.err
    here = Place(over.place.config, tmp_path / "here")
    assert command(here.config, here.output, "run.workers=1").status == 0
    assert over.place.weights().keys() == here.weights().keys()
    assert all((w == here.weights()[name]).all() for name, w in over.place.weights().items())
    told, expected = metrics(over.place), metrics(here)
    for one, other in zip(told, expected, strict=True):
        # Who knows true labels measures pseudo-labels, who has training rows copies: no site does.
        ours = {k: v for k, v in one.items() if k in other}
        unknown = ("pseudo/", "gen/nearest_training_row")
        assert ours == {k: v for k, v in other.items() if not k.startswith(unknown)}
        assert float(one["comm/sent_down_bytes"]) > float(one["comm/down_bytes"]) > 0
        assert float(one["comm/sent_up_bytes"]) > float(one["comm/up_bytes"]) > 0


# Under a claim --------------------------------------------------------------------------------


def test_a_private_run_is_claimed_and_audited_by_the_ledgers_that_its_sites_show(
    private: Over, tmp_path: Path
) -> None:
    outcome = private.train()
    assert outcome.status == 0, outcome.err
    told = " ".join(outcome.out.split())
    assert "Not covered over sites: what code that Flower's server ships could read" in told
    results = private.place.results()
    claimed = results["privacy"]["guarantee"]["epsilon"]
    assert 0 < claimed <= 4.0 and results["status"] == "finished"
    for name in ("s0", "s1"):
        here, there = (
            folder / f"{name}.jsonl"
            for folder in (private.place.run / "ledger", private.sites / name / "ledger")
        )
        assert here.read_bytes() == there.read_bytes()
        assert private.journal(name).epsilon <= claimed
    assert audit.main([str(private.place.run)]) == 0
    assert not list(private.sites.rglob("*.answer")), "sites forget a run that is over"
    # A second run on the same accounts finds them spent: a budget is for all runs together.
    again = private.train(f"run.output={tmp_path / 'again'}")
    assert again.status == 0, again.err
    assert json.loads((tmp_path / "again" / "results.json").read_text())["status"] == (
        "budget_exhausted"
    )
    assert private.journal("s0").epsilon <= 4.0


def test_a_sites_ledger_that_is_written_anew_in_the_run_folder_is_violated(
    private: Over, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its owner has the ledger: the folder's copy is all that an auditor of the folder sees.
    monkeypatch.setattr(verify, "available", lambda: False)  # it takes a second
    assert private.train().status == 0
    assert audit.audit(private.place.run).verdict == audit.Verdict.CONSISTENT  # the control
    path = private.place.run / "ledger" / "s0.jsonl"
    true = read_journal(path)
    cheap = replace(true.plan, event=replace(true.plan.event, noise_multiplier=50.0))  # type: ignore[arg-type]
    forged: list[tuple[list[Any], Any, str]] = [
        ([cheap], list(true.visits), "config.yaml asks for a visit of"),
        ([true.plan, cheap], list(true.visits), "has charged this run less than its"),
        ([true.plan], list(true.visits)[1:], "lacks 1 visits that checkpoints record"),
    ]
    for plans, visits, why in forged:
        path.unlink()
        for number, plan in enumerate(plans):
            account = Account.open(path, plan, resume=number > 0, run=true.runs[-1])
            for visit in visits if plan is plans[-1] else ():
                with account.spend(plan.event, visit):
                    pass
            account.close()
        assert why in " ".join(audit.audit(private.place.run).problems)


def test_a_site_that_would_not_show_its_ledger_is_told_of_before_the_first_round(
    private: Over,
) -> None:
    path = private.sites / "s1" / "site.yaml"
    path.write_text(path.read_text().replace("share_ledger: true", "share_ledger: false"))
    private.open()
    assert_refused(
        private.train(), "s1 does not share its ledger", "must set site.share_ledger: true"
    )
    assert len(private.journal("s0").events) == 0


# Bad luck -------------------------------------------------------------------------------------


def test_a_run_whose_site_dies_stops_after_a_checkpoint_and_goes_on_to_the_same_end(
    tmp_path: Path,
) -> None:
    over = Over(tmp_path, PRIVATE)
    real = over.transport.handlers["s0 opened"]

    def dies_in_round_3(frame: bytes) -> Any:
        if b'"round":3' in frame:
            real(frame)
            return None  # what it did and stored never arrives
        return real(frame)

    over.transport.handlers["s0 opened"] = dies_in_round_3
    how = ("run.visit_seconds=2.0", "run.checkpoint_every=100", "run.absent=stop")
    outcome = over.train(*how)
    assert_refused(
        outcome, "s0 has no reply to support_pass in round 3 (gone)",
        f"The checkpoint is of round 2: continue with --resume {over.place.run}",
    )  # fmt: skip
    charged = len(over.journal("s0").events)
    over.open()
    assert over.train("--resume", over.place.run).status == 0
    assert over.place.results()["rounds"] == 4
    # Round 3 was paid for once: the same request got the stored reply.
    assert len(over.journal("s0").events) == charged + 1 == 4


def test_a_visit_that_was_lost_stops_a_run_which_says_how_it_goes_on_without_it(
    tmp_path: Path,
) -> None:
    over = Over(tmp_path, PRIVATE)
    real = over.transport.handlers["s0 opened"]

    def dies_after_the_charge(frame: bytes) -> Any:
        known, answer = len(over.journal("s0").events), real(frame)
        if b'"round":3' not in frame or len(over.journal("s0").events) == known:
            return answer
        for stored in (over.sites / "s0" / "runs").rglob("*.answer"):
            stored.unlink()
        return None

    over.transport.handlers["s0 opened"] = dies_after_the_charge
    strict = ("run.absent=stop", "run.checkpoint_every=100")
    lost = "s0 has no reply to support_pass in round 3 (lost): the step was charged and broke off"
    way = "never run again. To continue without it: --resume with run.absent=skip"
    assert_refused(over.train(*strict), lost, way)
    charged = len(over.journal("s0").events)
    over.open()
    # It stays lost, however often the run is asked to go on.
    assert_refused(over.train("--resume", over.place.run, *strict), lost, way)
    assert len(over.journal("s0").events) == charged
    outcome = over.train("--resume", over.place.run, "run.absent=skip")
    assert outcome.status == 0, outcome.err
    assert over.place.results()["rounds"] == 4
    assert [m["sites/absent"] for m in metrics(over.place)] == ["0", "0", "1", "0"]
    # Round 3 was paid for once, and round 4 done.
    assert len(over.journal("s0").events) == charged + 1 == 4
    assert audit.main([str(over.place.run)]) == 0


def test_a_ledger_that_was_put_back_from_a_backup_makes_no_claim(tmp_path: Path) -> None:
    over = Over(tmp_path, PRIVATE)
    true, kept = over.transport.handlers["s0 opened"], tmp_path / "backup"
    now = true

    def forgets(frame: bytes) -> Any:
        """As it is when the second round begins, it is put back when the fourth does."""
        nonlocal now
        if b'"round":2' in frame and not kept.exists():
            kept.mkdir()
            shutil.copytree(over.sites / "s0" / "ledger", kept / "ledger")
            shutil.copy(over.sites / "s0" / "ledger.mark", kept)
        if b'"round":4' in frame and now is true:
            shutil.copytree(kept, over.sites / "s0", dirs_exist_ok=True)
            now = startup.open_site(
                settings.load_site_config(over.sites / "s0" / "site.yaml")
            ).handle
        return now(frame)

    over.transport.handlers["s0 opened"] = forgets
    lacks = "ledger that s0 shows is not in order: it lacks 2 visits that were charged, as if from"
    assert_refused(over.train("run.checkpoint_every=1"), lacks)
    privacy = over.place.results()["privacy"]
    assert privacy["guarantee"] is None and "it lacks 2 visits" in privacy["problems"][0]
    assert not (over.place.run / "privacy.json").exists()
    assert over.journal("s0").problems == []  # by itself it is in order
    assert_refused(over.train("--resume", over.place.run), lacks)  # the checkpoint remembers


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_a_run_that_was_interrupted_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    unbroken = Over(_made(tmp_path / "a"), PLAIN)
    assert unbroken.train().status == 0
    broken = Over(_made(tmp_path / "b"), PLAIN)
    with at_visit(5, lambda: os.kill(os.getpid(), signal.SIGINT)):
        assert broken.train().status == 130
    assert broken.place.results()["rounds"] == 2
    broken.open()
    assert broken.train("--resume", broken.place.run).status == 0
    assert [m["train/agreement"] for m in metrics(broken.place)] == [
        m["train/agreement"] for m in metrics(unbroken.place)
    ]
    mine, theirs = broken.place.weights(), unbroken.place.weights()
    assert all((w == theirs[name]).all() for name, w in mine.items())


@pytest.mark.slow
def test_checkpoints_of_sites_and_of_one_process_are_not_mixed_up(tmp_path: Path) -> None:
    over = Over(tmp_path, PLAIN)
    assert over.train().status == 0
    (over.place.run / "results.json").unlink()
    outcome = command(over.place.config, "--resume", over.place.run)
    assert_refused(outcome, "Continue with run.engine=flower")
    here = Place(over.place.config, tmp_path / "here")
    assert command(here.config, here.output).status == 0
    (here.run / "results.json").unlink()
    assert_refused(over.train("--resume", here.run), "Continue with run.engine=local")


def test_a_site_that_is_missing_is_named_and_nothing_is_trained(private: Over) -> None:
    private.close("q1")
    assert_refused(private.train(), "1 of 4 sites are not there after 0.2 s: q1")


def test_a_run_that_a_site_was_missing_for_is_begun_by_the_same_command(
    private: Over, monkeypatch: pytest.MonkeyPatch
) -> None:
    private.close("q1")
    assert_refused(private.train(), "1 of 4 sites are not there")
    assert_refused(private.train(), "1 of 4 sites are not there")  # not: exists and holds a run
    private.open()
    assert private.train("algorithm.rounds=4").status == 0
    done = private.place.results()
    assert_refused(private.train(), "exists and holds a run")  # the control
    assert private.place.results() == done


def test_with_leave_to_skip_a_run_goes_on_without_a_site_and_counts_it(tmp_path: Path) -> None:
    over = Over(tmp_path, PLAIN.replace("rounds: 4", "rounds: 2"))
    real = over.transport.handlers["q1 opened"]
    over.transport.handlers["q1 opened"] = lambda frame: (
        None if b'"letter":"Visit"' in frame else real(frame)
    )
    # Sites that are there answer in a tenth of this, so that a busy machine misses none of them.
    how = ("run.visit_seconds=1.5", "run.quorum=0.5")
    outcome = over.train(*how)
    assert outcome.status == 0, outcome.err
    assert [m["sites/absent"] for m in metrics(over.place)] == ["1"] * 2
    assert over.place.results()["status"] == "finished"


# What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("run.superlink=example.org:8000", "run.certificate"),
        ("run.superlink=here", "give host:port"),
        ("run.workers=2", "agents are sites"),
        ("run.quorum=0.0", "run.quorum"),
        ("data.validation=10", "data.validation has no meaning with run.engine flower"),
        ("privacy={epsilon: 4.0}", "privacy"),
    ],
)
def test_settings_that_sites_cannot_have_are_refused(
    tmp_path: Path, argument: str, text: str
) -> None:
    (tmp_path / "c.yaml").write_text(PLAIN)
    outcome = command(tmp_path / "c.yaml", "run.engine=flower", argument)
    assert_refused(outcome, text)


def test_without_flower_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(SiteError, match=r"flwr is not installed.*pip install 'privssl\[flower\]'"):
        flower_transport.FlowerTransport("127.0.0.1:1", "")


CENSUS = """
data: {name: toy, labelled: 40, unlabelled: 80LABELS}
agents: {AGENTS}
model: {name: small_cnn, width: 4}
algorithm:
  {name: label_census, clusters: 5, cells: 12, filters: 8, places: 2, cluster_rounds: 3,
   vote_rounds: 1, self_training_rounds: 1}
privacy: {epsilon: 2.0, delta: 1.0e-3}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("labels", "parties", "holders"),
    [("", "support: 2, query: 2", ("s0", "s1")),
     (", labels: labels-at-client", "mixed: 2, query: 1", ("m0", "m1"))],
)  # fmt: skip
def test_a_label_census_over_sites_pays_once_at_each_and_is_claimed(
    tmp_path: Path, labels: str, parties: str, holders: tuple[str, ...]
) -> None:
    over = Over(tmp_path, CENSUS.replace("LABELS", labels).replace("AGENTS", parties))
    outcome = over.train()
    assert outcome.status == 0, outcome.err
    guarantee = over.place.results()["privacy"]["guarantee"]
    assert (guarantee["epsilon"], guarantee["delta"]) == (2.0, 0.0)
    for name in holders:
        assert len(over.journal(name).events) == 1 and over.journal(name).epsilon == 2.0
    assert audit.main([str(over.place.run)]) == 0
