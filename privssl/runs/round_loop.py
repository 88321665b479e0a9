"""The round loop of a prepared run, its checkpoints and its results.

The state consists of the algorithm's value and the agents' memories. Both are stored as of the last
finished round, so an interruption leaves a checkpoint of a complete round.
"""

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch.nn.functional import one_hot

from accounting.errors import LedgerError
from privssl import data
from privssl.core.engine import Engine
from privssl.core.federation import Federation, Round
from privssl.core.rows import SEQUENCE, kind_of
from privssl.engines.worker_process import WorkerError
from privssl.errors import RunFolderError
from privssl.experiment import config as configs
from privssl.experiment.prepare import Prepared
from privssl.privacy.card_schema import PrivacyCard
from privssl.privacy.card_text import guarantee_sentence, render_markdown
from privssl.privacy.former_ledgers import former_ledgers
from privssl.privacy.label_histogram import CENSUS
from privssl.privacy.privacy_card import privacy_card
from privssl.remote.discovery import SiteError
from privssl.reporting import figures
from privssl.reporting.generator_quality import GeneratorQuality
from privssl.reporting.trackers import RoundRecord, Tracker, for_the_log
from privssl.runs import accounts, checkpoint, result_warnings
from privssl.runs.checked_algorithm import add_checks
from privssl.runs.checkpoint import CompletedRound, Progress, Snapshot
from privssl.runs.engine_factory import check_memory_names, log_traffic, make_engine, spending
from privssl.runs.resume import PLUGINS, SOURCES, SPLIT, other_code_warnings, public_parts
from privssl.runs.round_plan import planned_rounds, rounds_of
from privssl.runs.run_dir import CLASSIFIER, damaged, remove_claim
from privssl.runs.summary import summarise, write_confusion, write_summary
from privssl.runtime.code_version import fingerprint
from privssl.runtime.process import defer_interrupts, raise_if_interrupted
from privssl.storage import atomic_files, tensor_files
from privssl.storage.spill_store import SpillStore
from privssl.training.evaluation import Evaluator, HiddenLabelMeter, Scores
from privssl.training.local_training import network_input

Status = Literal["finished", "budget_exhausted", "interrupted"]

log = logging.getLogger("privssl")


class RoundLoop:
    """A prepared run in its folder."""

    _kept: CompletedRound

    def __init__(
        self, prepared: Prepared, folder: Path, engine: Engine, label_meter: HiddenLabelMeter,
        trackers: Sequence[Tracker], spill_store: SpillStore | None = None,
    ) -> None:  # fmt: skip
        """Set up the run. ``label_meter`` and ``spill_store`` are those of ``engine``."""
        config = prepared.config
        self._prepared, self._config, self._folder = prepared, config, folder
        self._trackers, self._events = trackers, list[str]()  # warnings of rounds
        warn = partial(result_warnings.warn_once, self._events)
        self._algorithm = add_checks(prepared.algorithm, config.algorithm.name, warn)
        dataset = prepared.federated_data.dataset
        self._test = (dataset.x_test, dataset.y_test)
        self._label_meter, self._engine = label_meter, engine
        self._spill_store = spill_store or SpillStore()
        held_out = {"test": self._test}
        if prepared.federated_data.validation is not None:
            rows = prepared.federated_data.validation
            held_out["validation"] = (rows.x, rows.y)
        classifier = self._algorithm.task.new_classifier()
        self._evaluator = Evaluator(classifier, held_out, prepared.device)
        classes = self._algorithm.task.classes
        self._quality = GeneratorQuality(*self._test, classes, dataset.scales)
        validate = None if prepared.plan else self._evaluator.validation_loss  # not covered
        self._federation = Federation(self._engine, config.run.seed, validate)
        self._digest = configs.config_hash(config)
        self._durations: list[float] = []
        self._names = dataset.class_names
        self._scores: Scores | None = None  # of the last evaluation on test rows
        self._at_end: list[str] = []  # warnings

    def begin(self) -> None:
        """Initialise the state before round 1."""
        state = self._spill_store.put_parts(self._algorithm.start(self._federation))
        progress = Progress(
            start=result_warnings.fingerprint_networks(self._algorithm, state), asked=""
        )
        self._kept = CompletedRound(state, self._engine.memories(), progress)
        labelled, unlabelled = data.class_counts(self._prepared.federated_data)
        # Not in a private run: an agent's unlabelled classes reveal its labelled ones.
        if self._trackers and self._prepared.plan is None and (labelled or unlabelled):
            picture = figures.partition_plot(labelled, unlabelled)
            for tracker in self._trackers:
                tracker.images(0, "images/partition", picture)
        self.save()  # a run that ends in its first round can be resumed too

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot, as if the run had never stopped."""
        check_memory_names(self._engine, snapshot.memories)
        self._engine.restore(snapshot.memories)
        field_names = {f.name for f in dataclasses.fields(Progress)}
        progress = Progress(**{k: v for k, v in snapshot.extra.items() if k in field_names})  # type: ignore[arg-type]
        try:
            state = self._algorithm.StateType(**snapshot.state)  # type: ignore[arg-type]
        except TypeError as error:
            raise RunFolderError(
                f"{self._folder}: its checkpoint is not one of this algorithm ({error}). It was "
                "written by another version; start a new run"
            ) from None
        self._federation.agents_that_trained = set(progress.trained.split())
        self._federation.called_roles = set(progress.asked.split())
        self._events[:] = [*json.loads(progress.warnings), *other_code_warnings(snapshot)]
        # A copy: the snapshot's file may be deleted before the next round ends.
        self._record(state, progress)
        log.info("Resuming after round %d", progress.round)

    def run_rounds(self) -> Status:
        """Run the remaining rounds. On Ctrl-C save and return "interrupted"."""
        rounds = planned_rounds(self._algorithm.phases())
        try:
            for current in rounds[self._kept.progress.round :]:
                raise_if_interrupted()
                # The replies of a saved round are sent only once.
                with defer_interrupts() if current.saved else nullcontext():
                    self._run_round(current, last=current is rounds[-1])
            state = self._algorithm.finish(self._kept.state, self._federation)
            self._kept = dataclasses.replace(self._kept, state=state)
        except KeyboardInterrupt:
            log.info("Interrupted: the checkpoint is of round %d", self._kept.progress.round)
            self.save()
            return "interrupted"
        except LedgerError as error:
            if not damaged(self._prepared):
                raise  # e.g. a full disk
            log.error("%s", error)
            self.save()
            return "interrupted"
        except (WorkerError, SiteError) as error:
            self.save()
            hint = f"The checkpoint is of round {self._kept.progress.round}"
            raise type(error)(f"{error}. {hint}: continue with --resume {self._folder}") from error
        private = self._prepared.plan is not None  # early versions counted other refusals
        return "budget_exhausted" if private and self._kept.progress.refused else "finished"

    def _run_round(self, current: Round, *, last: bool) -> None:
        start = time.perf_counter()
        self._federation.begin(current)
        state = self._algorithm.round(self._kept.state, self._federation)
        values = self._measure_round(state, current, last)
        seconds = time.perf_counter() - start
        saved = last or current.number % self._config.run.checkpoint_every == 0 or current.saved
        progress = self._update_progress(current, values, seconds, saved)
        try:
            self._log_round(current, state, {**values, "time/round_s": seconds}, last)
        except RunFolderError:
            if current.saved:  # losing a line of metrics.csv is better than losing the round
                self._record(state, progress)
                self.save()
            raise
        # Recorded after logging: resume truncates an extra line, but cannot restore a missing one.
        self._record(state, progress)
        self._durations.append(seconds)
        if saved:
            self.save()

    def _record(self, state: Any, progress: Progress) -> None:
        self._kept = CompletedRound(
            self._spill_store.put_parts(state), self._engine.memories(), progress
        )

    def _log_round(
        self, current: Round, state: Any, values: Mapping[str, float], last: bool
    ) -> None:
        total = rounds_of(self._algorithm)
        for tracker in self._trackers:
            tracker.round(RoundRecord(current.number, total, current.phase, values))
        if text := for_the_log(values, nominal=self._prepared.is_nominal):
            log.info("Round %d of %d: %s", current.number, total, text)
        if self._has_pictures(current, last):
            self._log_images(current.number, state)

    def _has_pictures(self, current: Round, last: bool) -> bool:
        """Return whether the round has pictures."""
        return last or current.number == 1 or current.number % self._config.run.images_every == 0

    def _update_progress(
        self, current: Round, values: Mapping[str, float], seconds: float, saved: bool
    ) -> Progress:
        """Return the progress after one more round."""
        previous, traffic = self._kept.progress, self._federation.traffic
        changes: dict[str, Any] = {}
        accuracy = values.get("test/accuracy")
        if accuracy is not None:
            changes["final"] = accuracy
            if accuracy > previous.best or not previous.best_round:
                changes |= {"best": accuracy, "best_round": current.number}
        validation = values.get("validation/accuracy")  # test rows choose no checkpoint
        if validation is not None and saved and validation > previous.saved_best:
            changes |= {"saved_best": validation, "saved_best_round": current.number}
        return dataclasses.replace(
            previous, round=current.number, up=previous.up + traffic.up,
            down=previous.down + traffic.down, seconds=previous.seconds + seconds,
            refused=previous.refused + self._federation.budget_declines,
            trained=" ".join(sorted(self._federation.agents_that_trained)),
            asked=" ".join(sorted(self._federation.called_roles)),
            warnings=json.dumps(self._events), **changes,
        )  # fmt: skip

    def _measure_round(self, state: Any, current: Round, last: bool) -> dict[str, float]:
        values = {**self._federation.mean_metrics(), **self._algorithm.metrics(state)}
        values |= self._label_meter.report()
        traffic = self._federation.traffic
        values |= {"comm/up_bytes": traffic.up, "comm/down_bytes": traffic.down}
        values |= log_traffic(self._engine, self._federation.absences)
        for agent in self._prepared.labelled_agents:
            if agent.account is not None:
                values[f"dp/epsilon/{agent.id}"] = agent.account.spent()
                values[f"dp/budget_left/{agent.id}"] = agent.account.left()
        if current.number % self._config.run.evaluate_every == 0 or last:
            values |= self._evaluate(state, current)
            predict = partial(self._evaluator.classes_of, self._algorithm.classifier(state))
            generator = self._algorithm.generator(state)
            if generator is not None and kind_of(self._algorithm.task.shape) is not SEQUENCE:
                private, held = self._prepared.plan is not None, self._prepared.federated_data
                detailed = self._has_pictures(current, last)
                training = held.measured_rows(private=private) if detailed else ()
                taught = current.number % self._config.run.images_every == 0
                values |= self._quality.measure_all(generator, predict, training, taught=taught)
        return values

    def _evaluate(self, state: Any, current: Round) -> dict[str, float]:
        """Compute metrics on held-out rows, which choose nothing in a run."""
        classifiers = {"accuracy": self._algorithm.classifier(state)}
        for name, weights in self._algorithm.also_evaluated(state).items():
            classifiers[f"accuracy_{name}"] = weights
        metrics = self._evaluator.accuracies(classifiers)
        scores = self._evaluator.scores(classifiers["accuracy"])
        for split, split_scores in scores.items():
            metrics |= {f"{split}/{k}": v for k, v in split_scores.as_curves(self._names).items()}
        if self._config.run.evaluate_agents:
            metrics |= self._evaluator.of_agents(self._algorithm.own_classifiers(state))
        self._scores = scores["test"]
        warning = result_warnings.not_finite_warning(self._scores)
        if warning and not any(result_warnings.NOT_FINITE in text for text in self._events):
            result_warnings.warn_once(self._events, f"round {current.number}: {warning}")
        return metrics

    def _log_images(self, number: int, state: Any) -> None:
        """Log pictures of held-out rows; none may show an agent's row."""
        x, y = self._test
        # The first row of each class, then the second: files may be sorted by class.
        rank = one_hot(y).cumsum(dim=0).gather(1, y[:, None])[:, 0]
        indices = rank.argsort(stable=True)[:500]
        pictures = self._algorithm.pictures(state, network_input(x[indices]), y[indices])
        if (generator := self._algorithm.generator(state)) is not None:
            pictures = {**pictures, **self._quality.columns_picture(generator)}
        for tag, image in pictures.items():
            for tracker in self._trackers:
                tracker.images(number, tag, image)

    def save(self) -> None:
        """Write a checkpoint of the last finished round."""
        try:
            for tracker in self._trackers:
                tracker.keep()
        finally:  # keep a charged round even if logging fails
            self._save()

    def _save(self) -> None:
        last, folder = self._kept, self._folder / "checkpoints"
        records: dict[str, str | int] = {SOURCES: fingerprint(), **public_parts(self._prepared)}
        if self._prepared.plugins:
            records[PLUGINS] = json.dumps(self._prepared.plugins)
        if self._prepared.plan is None:
            records[SPLIT] = self._prepared.federated_data.manifest.hash
        for agent in self._prepared.labelled_agents:
            if agent.account is not None:
                records[accounts.LEDGER_SEQ + agent.id] = agent.account.seq
                records[accounts.LEDGER_HEAD + agent.id] = agent.account.head
                records[accounts.RUN_ID] = agent.account.run
        records |= accounts.record_former_ledgers(self._config, self._folder)
        extra = {**dataclasses.asdict(last.progress), **records}
        state = vars(last.state)
        snapshot = Snapshot(last.progress.round, state, last.memories, self._digest, extra)
        checkpoint.save_snapshot(folder, snapshot)
        if last.progress.saved_best_round == last.progress.round > 0:
            checkpoint.update_pointer(folder, "best", last.progress.round)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()

    def write_results(self, status: Status) -> None:
        """Write the weights, the privacy card, and last of all results.json.

        Raises:
            LedgerError: a ledger was damaged during the run. Card and results state no guarantee,
                and ``--resume`` ends the run once the ledger is restored.
            SiteError: a site does not send its ledger, or sends a damaged one. results.json records
                it.
        """
        released: dict[Literal["file", "sha256"], str] | None = None
        if status != "interrupted":
            path = self._folder / CLASSIFIER
            weights = self._algorithm.classifier(self._kept.state)
            self._scores = self._evaluator.scores(weights)["test"]
            self._at_end = list(self._find_end_warnings(self._scores))
            for sentence in self._at_end:  # the command prints them in its last lines
                log.warning("%s", sentence, extra={"repeated": True})
            tensor_files.save_weights(path, weights, self._prepared.about_rows)
            released = {"file": CLASSIFIER, "sha256": tensor_files.sha256_of(path)}
        try:
            card = self._build_card(status, released)
        except SiteError as error:
            remove_claim(self._folder)
            self._write_results("interrupted", None, [str(error)])
            raise
        problems = [] if card is None else card["ledger_problems"]
        if card is not None:
            if not problems:
                accounts.copy_ledgers(self._prepared, self._folder)
            text = json.dumps(card, indent=2) + "\n"
            atomic_files.write(self._folder / "privacy.json", text)
            atomic_files.write(self._folder / "privacy.md", render_markdown(card))
        if released is not None and self._scores is not None:
            picture = write_confusion(self._folder, self._scores, self._names)
            for tracker in self._trackers:
                tracker.images(self._kept.progress.round, "images/confusion", picture)
        self._write_results("interrupted" if problems else status, card, problems)
        if problems:
            raise LedgerError(guarantee_sentence(card))
        rounds = self._kept.progress.round
        log.info("%s after %d rounds. %s", status, rounds, guarantee_sentence(card))

    def _find_end_warnings(self, scores: Scores) -> Iterator[str]:
        """Yield reasons why results mean little, from covered releases and test rows."""
        progress = self._kept.progress
        end = result_warnings.fingerprint_networks(self._algorithm, self._kept.state)
        yield from result_warnings.untrained_warnings(progress.start, end)
        roles = progress.asked.split()
        if self._prepared.plan is not None:  # with a budget of 0 no agent is called
            roles += ["support", "mixed"]
        yield from result_warnings.idle_agent_warnings(
            self._federation.agents, progress.trained.split(), roles
        )
        yield from result_warnings.warm_up_warnings(self._algorithm, progress.round)
        metrics = self._algorithm.metrics(self._kept.state)
        yield from result_warnings.cluster_warnings(self._algorithm, metrics)
        yield from result_warnings.score_warnings(scores, self._names)

    def _write_results(
        self, status: Status, card: Mapping[str, Any] | None, problems: Sequence[str]
    ) -> None:
        results = summarise(
            self._prepared, self._kept.progress, status=status, durations=self._durations,
            card=card, problems=problems,
            metrics={} if self._scores is None else self._scores.as_json(self._names),
            warnings=[*self._prepared.warnings, *self._events, *self._at_end],
        )  # fmt: skip
        write_summary(self._folder, results, card)

    def _build_card(
        self, status: Status, released: Mapping[Literal["file", "sha256"], str] | None
    ) -> PrivacyCard | None:
        plan, privacy = self._prepared.plan, self._config.privacy
        if plan is None or privacy is None:
            return None
        task, ended = self._prepared.algorithm.task, status != "interrupted"
        journals, this_run, problems = spending(self._engine, self._prepared, self._folder, ended)
        return privacy_card(
            [(name, j.plan, tuple(j.events), j.head) for name, j in journals.items()],
            scope=plan.scope, delta=privacy.delta, releases=accounts.releases(plan, self._config),
            algorithm=self._config.algorithm.name, dataset=self._config.data.name,
            task={"classes": task.classes, "shape": list(task.shape)},
            encoder=self._prepared.about_rows["rows"]["encoder"],
            network=self._prepared.network,
            planned=plan.visits if ended and not problems else None,
            promised={name: j.promised for name, j in journals.items()},
            this_run=this_run, former=former_ledgers(self._folder, journals),
            ledger_problems=problems, weights=released,
            clip_norm=None if plan.update == (CENSUS,) else privacy.clip_norm,
        )  # fmt: skip


def train(
    prepared: Prepared,
    folder: Path,
    make_trackers: Callable[[], Sequence[Tracker]],
    snapshot: Snapshot | None,
) -> None:
    """Run in a folder, from the start or from a snapshot.

    ``make_trackers``: called after the accounts are opened, because trackers truncate the lines
    that a resumed run repeats, and a ledger may forbid the run.
    """
    with accounts.open_accounts(prepared, folder, snapshot), ExitStack() as stack:
        private = prepared.plan is not None
        label_meter = HiddenLabelMeter(prepared.federated_data.measured_labels(private=private))
        limit = prepared.config.run.memories_mb * 2**20
        spill_store = stack.enter_context(closing(SpillStore(folder, limit)))
        # Before the trackers, because workers are forked here and trackers start threads.
        engine = stack.enter_context(closing(make_engine(prepared, label_meter, spill_store)))
        run = RoundLoop(prepared, folder, engine, label_meter, make_trackers(), spill_store)
        stack.callback(run.close)
        if snapshot is None:
            run.begin()
        else:
            run.restore(snapshot)
        run.write_results(run.run_rounds())
