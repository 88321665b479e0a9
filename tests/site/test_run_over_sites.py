"""Whole runs over sites with the training command.

``transports.InProcessTransport`` replaces Flower; all else is as in a deployment, down to SITE.yaml
and ledgers. test_flower.py does the same with Flower.
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
from tests.support.resume import PLAIN, PRIVATE, RunPaths, command
from tests.support.run_over_sites import DIGITS, on_digits
from tests.support.transports import InProcessTransport

#: Retries come fast, so tests with missing sites take little time.
SHORT_RETRIES = partial(RemoteTimeouts, retry_interval=0.02)


class RunOverSites:
    """The sites of a config, the paths of the run over them, and the transport between."""

    def __init__(self, folder: Path, text: str) -> None:
        (folder / "tiny.yaml").write_text(text)
        self.sites = folder / "sites"
        self.names = write_sites(self.sites, folder / "tiny.yaml", [])
        self.place = RunPaths(self.sites / "experiment.yaml", folder / "run")
        self.transport = InProcessTransport({})
        self.open_sites()

    def open_sites(self) -> None:
        """Open every site from its file, as after a restart."""
        for name in self.names:
            self.close_site(name)
            site = settings.load_site_config(self.sites / name / "site.yaml")
            self.transport.handlers[f"{name} opened"] = startup.open_site(site).handle

    def close_site(self, name: str) -> None:
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
            patch.setattr(engine_factory, "RemoteTimeouts", SHORT_RETRIES)
            patch.setattr(launch, "refuse_unreachable", lambda prepared: None)
            return command(self.place.config, *flags, *(f"{k}={v}" for k, v in how.items()))

    def read_journal_of(self, name: str) -> Any:
        return read_journal(self.sites / name / "ledger" / f"{name}.jsonl")


def metrics(place: RunPaths) -> list[dict[str, str]]:
    header, *lines = (line.split(",") for line in place.metrics().decode().splitlines())
    return [dict(zip(header, line, strict=True)) for line in lines]


@pytest.fixture
def private_run(tmp_path: Path) -> RunOverSites:
    return RunOverSites(tmp_path, PRIVATE)


@contextlib.contextmanager
def before_visit(number: int, action: Any) -> Iterator[None]:
    """Call ``action`` before this visit of the support agents, counted from 1."""
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


# Equal bits ----------------------------------------------------------------------------------


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("method", DIGITS)
def test_a_run_over_sites_has_the_weights_and_metrics_of_one_process(
    tmp_path: Path, method: str
) -> None:
    run = RunOverSites(tmp_path, on_digits(method))
    outcome = run.train()
    assert outcome.status == 0, outcome.err
    local = RunPaths(run.place.config, tmp_path / "here")
    assert command(local.config, local.output, "run.workers=1").status == 0
    assert run.place.weights().keys() == local.weights().keys()
    assert all((w == local.weights()[name]).all() for name, w in run.place.weights().items())
    printed, expected = metrics(run.place), metrics(local)
    for one, other in zip(printed, expected, strict=True):
        # These metrics need true labels or training rows, which no coordinator of sites has.
        ours = {k: v for k, v in one.items() if k in other}
        unknown = ("pseudo/", "gen/nearest_training_row")
        assert ours == {k: v for k, v in other.items() if not k.startswith(unknown)}
        assert float(one["comm/sent_down_bytes"]) > float(one["comm/down_bytes"]) > 0
        assert float(one["comm/sent_up_bytes"]) > float(one["comm/up_bytes"]) > 0


# Private runs ---------------------------------------------------------------------------------


def test_a_private_run_is_claimed_and_audited_from_the_ledgers_of_its_sites(
    private_run: RunOverSites, tmp_path: Path
) -> None:
    outcome = private_run.train()
    assert outcome.status == 0, outcome.err
    printed = " ".join(outcome.out.split())
    assert "Not covered over sites: what code that Flower's server ships could read" in printed
    results = private_run.place.results()
    claimed = results["privacy"]["guarantee"]["epsilon"]
    assert 0 < claimed <= 4.0 and results["status"] == "finished"
    for name in ("s0", "s1"):
        local, remote = (
            folder / f"{name}.jsonl"
            for folder in (private_run.place.run / "ledger", private_run.sites / name / "ledger")
        )
        assert local.read_bytes() == remote.read_bytes()
        assert private_run.read_journal_of(name).epsilon <= claimed
    assert audit.main([str(private_run.place.run)]) == 0
    assert not list(private_run.sites.rglob("*.answer")), (
        "sites delete the replies of a finished run"
    )
    # A second run on the same accounts finds them spent: a budget covers all runs together.
    again = private_run.train(f"run.output={tmp_path / 'again'}")
    assert again.status == 0, again.err
    assert json.loads((tmp_path / "again" / "results.json").read_text())["status"] == (
        "budget_exhausted"
    )
    assert private_run.read_journal_of("s0").epsilon <= 4.0


def test_the_audit_finds_a_rewritten_copy_of_a_sites_ledger_in_the_run_folder(
    private_run: RunOverSites, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The site keeps its ledger; an auditor of the run folder sees only the copy.
    monkeypatch.setattr(verify, "available", lambda: False)  # it takes a second
    assert private_run.train().status == 0
    assert audit.audit(private_run.place.run).verdict == audit.Verdict.CONSISTENT  # the control
    path = private_run.place.run / "ledger" / "s0.jsonl"
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
        assert why in " ".join(audit.audit(private_run.place.run).problems)


def test_a_site_that_does_not_share_its_ledger_stops_the_run_before_round_one(
    private_run: RunOverSites,
) -> None:
    path = private_run.sites / "s1" / "site.yaml"
    path.write_text(path.read_text().replace("share_ledger: true", "share_ledger: false"))
    private_run.open_sites()
    assert_refused(
        private_run.train(), "s1 does not share its ledger", "must set site.share_ledger: true"
    )
    assert len(private_run.read_journal_of("s0").events) == 0


# Failures -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_whose_site_dies_stops_after_a_checkpoint_and_can_be_resumed(
    tmp_path: Path,
) -> None:
    run = RunOverSites(tmp_path, PRIVATE)
    real = run.transport.handlers["s0 opened"]

    def dies_in_round_3(frame: bytes) -> Any:
        if b'"round":3' in frame:
            real(frame)
            return None  # the reply is stored and never arrives
        return real(frame)

    run.transport.handlers["s0 opened"] = dies_in_round_3
    how = ("run.visit_seconds=2.0", "run.checkpoint_every=100", "run.absent=stop")
    outcome = run.train(*how)
    assert_refused(
        outcome, "s0 has no reply to support_pass in round 3 (gone)",
        f"The checkpoint is of round 2: continue with --resume {run.place.run}",
    )  # fmt: skip
    charged = len(run.read_journal_of("s0").events)
    run.open_sites()
    assert run.train("--resume", run.place.run).status == 0
    assert run.place.results()["rounds"] == 4
    # Round 3 was charged once: the repeated request got the stored reply.
    assert len(run.read_journal_of("s0").events) == charged + 1 == 4


@pytest.mark.slow
def test_a_lost_visit_stops_the_run_with_advice_how_to_resume_without_it(
    tmp_path: Path,
) -> None:
    run = RunOverSites(tmp_path, PRIVATE)
    real = run.transport.handlers["s0 opened"]

    def dies_after_the_charge(frame: bytes) -> Any:
        known, answer = len(run.read_journal_of("s0").events), real(frame)
        if b'"round":3' not in frame or len(run.read_journal_of("s0").events) == known:
            return answer
        for stored in (run.sites / "s0" / "runs").rglob("*.answer"):
            stored.unlink()
        return None

    run.transport.handlers["s0 opened"] = dies_after_the_charge
    strict = ("run.absent=stop", "run.checkpoint_every=100")
    lost = "s0 has no reply to support_pass in round 3 (lost): the step was charged and broke off"
    way = "never run again. To continue without it: --resume with run.absent=skip"
    assert_refused(run.train(*strict), lost, way)
    charged = len(run.read_journal_of("s0").events)
    run.open_sites()
    # It stays lost, however often the run is resumed.
    assert_refused(run.train("--resume", run.place.run, *strict), lost, way)
    assert len(run.read_journal_of("s0").events) == charged
    outcome = run.train("--resume", run.place.run, "run.absent=skip")
    assert outcome.status == 0, outcome.err
    assert run.place.results()["rounds"] == 4
    assert [m["sites/absent"] for m in metrics(run.place)] == ["0", "0", "1", "0"]
    # Round 3 was charged once, and round 4 was done.
    assert len(run.read_journal_of("s0").events) == charged + 1 == 4
    assert audit.main([str(run.place.run)]) == 0


def test_a_site_ledger_restored_from_a_backup_ends_the_run_without_a_guarantee(
    tmp_path: Path,
) -> None:
    run = RunOverSites(tmp_path, PRIVATE)
    true, backup = run.transport.handlers["s0 opened"], tmp_path / "backup"
    handler = true

    def restore_backup_in_round_4(frame: bytes) -> Any:
        """Copy the ledger when round 2 begins, and restore the copy when round 4 begins."""
        nonlocal handler
        if b'"round":2' in frame and not backup.exists():
            backup.mkdir()
            shutil.copytree(run.sites / "s0" / "ledger", backup / "ledger")
            shutil.copy(run.sites / "s0" / "ledger.mark", backup)
        if b'"round":4' in frame and handler is true:
            shutil.copytree(backup, run.sites / "s0", dirs_exist_ok=True)
            handler = startup.open_site(
                settings.load_site_config(run.sites / "s0" / "site.yaml")
            ).handle
        return handler(frame)

    run.transport.handlers["s0 opened"] = restore_backup_in_round_4
    lacks = "ledger that s0 shows is not in order: it lacks 2 visits that were charged, as if from"
    assert_refused(run.train("run.checkpoint_every=1"), lacks)
    privacy = run.place.results()["privacy"]
    assert privacy["guarantee"] is None and "it lacks 2 visits" in privacy["problems"][0]
    assert not (run.place.run / "privacy.json").exists()
    assert run.read_journal_of("s0").problems == []  # the restored ledger itself is valid
    assert_refused(
        run.train("--resume", run.place.run), lacks
    )  # the checkpoint records the charges


def new_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_an_interrupted_run_over_sites_resumes_to_the_same_weights(tmp_path: Path) -> None:
    unbroken = RunOverSites(new_folder(tmp_path / "a"), PLAIN)
    assert unbroken.train().status == 0
    broken = RunOverSites(new_folder(tmp_path / "b"), PLAIN)
    with before_visit(5, lambda: os.kill(os.getpid(), signal.SIGINT)):
        assert broken.train().status == 130
    assert broken.place.results()["rounds"] == 2
    broken.open_sites()
    assert broken.train("--resume", broken.place.run).status == 0
    assert [m["train/agreement"] for m in metrics(broken.place)] == [
        m["train/agreement"] for m in metrics(unbroken.place)
    ]
    mine, theirs = broken.place.weights(), unbroken.place.weights()
    assert all((w == theirs[name]).all() for name, w in mine.items())


@pytest.mark.slow
def test_a_checkpoint_of_sites_is_not_resumed_in_one_process_nor_the_reverse(
    tmp_path: Path,
) -> None:
    run = RunOverSites(tmp_path, PLAIN)
    assert run.train().status == 0
    (run.place.run / "results.json").unlink()
    outcome = command(run.place.config, "--resume", run.place.run)
    assert_refused(outcome, "Continue with run.engine=flower")
    local = RunPaths(run.place.config, tmp_path / "here")
    assert command(local.config, local.output).status == 0
    (local.run / "results.json").unlink()
    assert_refused(run.train("--resume", local.run), "Continue with run.engine=local")


def test_the_error_about_a_missing_site_names_it(private_run: RunOverSites) -> None:
    private_run.close_site("q1")
    assert_refused(private_run.train(), "1 of 4 sites are not there after 0.2 s: q1")


@pytest.mark.slow
def test_a_run_refused_for_a_missing_site_starts_by_the_same_command_later(
    private_run: RunOverSites, monkeypatch: pytest.MonkeyPatch
) -> None:
    private_run.close_site("q1")
    assert_refused(private_run.train(), "1 of 4 sites are not there")
    assert_refused(private_run.train(), "1 of 4 sites are not there")  # not: exists and holds a run
    private_run.open_sites()
    assert private_run.train("algorithm.rounds=4").status == 0
    done = private_run.place.results()
    assert_refused(private_run.train(), "exists and holds a run")  # the control
    assert private_run.place.results() == done


@pytest.mark.slow
def test_above_the_quorum_a_run_continues_without_a_site_and_counts_its_absence(
    tmp_path: Path,
) -> None:
    run = RunOverSites(tmp_path, PLAIN.replace("rounds: 4", "rounds: 2"))
    real = run.transport.handlers["q1 opened"]
    run.transport.handlers["q1 opened"] = lambda frame: (
        None if b'"letter":"Visit"' in frame else real(frame)
    )
    # Present sites reply in a tenth of this time, so even a slow machine misses none of them.
    how = ("run.visit_seconds=1.5", "run.quorum=0.5")
    outcome = run.train(*how)
    assert outcome.status == 0, outcome.err
    assert [m["sites/absent"] for m in metrics(run.place)] == ["1"] * 2
    assert run.place.results()["status"] == "finished"


# Refused settings -----------------------------------------------------------------------------


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
def test_settings_without_meaning_over_sites_are_refused(
    tmp_path: Path, argument: str, text: str
) -> None:
    (tmp_path / "c.yaml").write_text(PLAIN)
    outcome = command(tmp_path / "c.yaml", "run.engine=flower", argument)
    assert_refused(outcome, text)


def test_without_flower_the_error_says_what_to_install(
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
def test_a_label_census_over_sites_charges_each_holder_once_and_has_a_guarantee(
    tmp_path: Path, labels: str, parties: str, holders: tuple[str, ...]
) -> None:
    run = RunOverSites(tmp_path, CENSUS.replace("LABELS", labels).replace("AGENTS", parties))
    outcome = run.train()
    assert outcome.status == 0, outcome.err
    guarantee = run.place.results()["privacy"]["guarantee"]
    assert (guarantee["epsilon"], guarantee["delta"]) == (2.0, 0.0)
    for name in holders:
        assert (
            len(run.read_journal_of(name).events) == 1 and run.read_journal_of(name).epsilon == 2.0
        )
    assert audit.main([str(run.place.run)]) == 0
