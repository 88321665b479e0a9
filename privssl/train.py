"""``python -m privssl.train CONFIG.yaml [section.key=value ...]``: one run, from file to claim.

Exit status: 0 finished or budget spent, 2 the user's mistake, 130 interrupted after a
checkpoint. The last line is always the guarantee, or the sentence that there is none.
"""

import argparse
import errno
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from accounting.errors import AccountingError
from privssl.errors import RunFolderError, UserError

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(argv)
    console = Console(stderr=options.json, highlight=False, soft_wrap=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill is a Ctrl-C
    try:
        return _train(options, console)
    except (UserError, AccountingError) as problem:
        Console(stderr=True, highlight=False, soft_wrap=True).print(str(problem), markup=False)
        return problem.exit_status
    except KeyboardInterrupt:
        console.print("Interrupted before the first round. Nothing was trained.")
        return INTERRUPTED
    except OSError as problem:
        if problem.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        print(
            f"{problem.filename or 'The run folder'}: {problem.strerror}. Make room or choose "
            "another run.output, then go on with --resume. Checkpoints already written are whole.",
            file=sys.stderr,
        )
        return RunFolderError.exit_status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m privssl.train",
        description="Train one classifier from many parties and say what it leaked.",
    )
    parser.add_argument("config", type=Path, help="a YAML file, for example configs/fedssl.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--resume", type=Path, metavar="RUN_DIR", help="go on from a checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="check everything, train nothing")
    parser.add_argument("--json", action="store_true", help="print results.json, and only that")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def _train(options: argparse.Namespace, console: Console) -> int:
    import torch  # here, so that --help and a typo in the command need no second

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    from privssl import checkpoint, run, run_folder
    from privssl import config as configs

    started = time.perf_counter()
    config = configs.load(options.config, options.overrides)
    for warning in config.warnings:
        console.print(f"Warning: {warning}", style="yellow", markup=False)
    prepared = run.prepare(config)
    if options.dry_run:
        _describe(prepared, console)
        return 0
    snapshot = None
    if options.resume is not None:
        snapshot = checkpoint.load(options.resume / "checkpoints", configs.digest(config))
    folder = run_folder.open_folder(prepared, options.resume)
    _log_to(folder / "train.log")
    if prepared.plan is not None and prepared.plan.scope == "as_published":
        console.print(_nominal_warning(config.privacy), style="bold red", markup=False)
    trackers = _trackers(folder, options, run.rounds_of(prepared.algorithm), snapshot)
    results = run.execute(prepared, folder, trackers, snapshot)
    sentence = results.pop("sentence")
    if options.json:
        print(json.dumps(results, indent=2))
    _report(results, sentence, folder, time.perf_counter() - started, console)
    return INTERRUPTED if results["status"] == "interrupted" else 0


def _trackers(folder: Path, options: argparse.Namespace, rounds: int, snapshot: Any) -> list[Any]:
    from privssl.tracker import CsvTracker, ProgressTracker, TensorBoardTracker

    after = None if snapshot is None else snapshot.round
    trackers: list[Any] = [
        CsvTracker(folder / "metrics.csv", resume_after=after),
        TensorBoardTracker(folder / "tensorboard", resume_after=after),
    ]
    if not options.quiet:
        trackers.append(ProgressTracker(rounds, resume_after=after))
    return trackers


def _log_to(path: Path) -> None:
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("privssl")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)


def _nominal_warning(privacy: Any) -> str:
    from accounting.budget import Nominal

    bare = tuple(n for n in privacy.update_at_support if n not in privacy.protect)
    return str(Nominal(privacy.epsilon, privacy.delta, privacy.protect, bare))


def _describe(prepared: Any, console: Console) -> None:
    """What --dry-run shows: the resolved config, who holds what, what would be spent."""
    from accounting.accountants import epsilon
    from accounting.events import leaves
    from privssl import config as configs

    console.print(configs.to_yaml(prepared.config), markup=False)
    table = Table("agent", "role", "labelled", "unlabelled", "classes")
    names = prepared.federation.dataset.class_names
    for agent in prepared.federation.agents:
        labelled = agent.held_labelled
        classes = [] if labelled is None else [names[c] for c in labelled.y.unique().tolist()]
        table.add_row(
            agent.id,
            agent.role,
            str(len(labelled)) if labelled is not None else "-",
            str(len(agent.held_unlabelled)) if agent.held_unlabelled is not None else "-",
            " ".join(classes) or "unknown",
        )
    console.print(table)
    plan, privacy = prepared.plan, prepared.config.privacy
    if plan is None:
        console.print("Not private: the plan spends no budget and nothing is guaranteed.")
        return
    protected = [leaf for leaf in leaves(plan.event) if hasattr(leaf, "noise_multiplier")]
    spent = epsilon(protected * plan.visits, privacy.delta) if plan.visits else 0.0
    console.print(
        f"Scope {plan.scope}. Noise multiplier {plan.noise_multiplier:g}, sample rate "
        f"{plan.sample_rate:g}, {plan.visits} visits of {plan.steps} private steps to each "
        f"support agent: {'nominal ' if plan.scope == 'as_published' else ''}epsilon "
        f"{min(spent, float('inf')):.4f} of {privacy.epsilon:g} at delta {privacy.delta:g}."
        + (" The budget ends the visits before that." if spent > privacy.epsilon else "")
    )


def _report(
    results: dict[str, Any], sentence: str, folder: Path, seconds: float, console: Console
) -> None:
    accuracy = results["test_accuracy"]
    words = {
        "finished": "Finished",
        "budget_exhausted": "Finished; the privacy budget ended visits to support agents early",
        "interrupted": f"Interrupted; go on with --resume {folder}",
    }
    console.print(
        f"{words[results['status']]}. {results['rounds']} rounds, {seconds:.0f} s. Test accuracy "
        f"{accuracy['final']:.4f} (best {accuracy['best']:.4f} in round "
        f"{accuracy['best_round']}). Results in {folder}; pictures: "
        f"tensorboard --logdir {folder / 'tensorboard'}",
        markup=False,
    )
    console.print(sentence, style="bold", markup=False)


if __name__ == "__main__":
    sys.exit(main())
