"""Accuracy of the label census at several epsilons, with one encoder and clustering per K.

    python -m benchmarks.census_curve CONFIG --epsilons 4,2,1 [--seeds 5] [--output FILE]
                                      [--also "KEY=VALUE ..."] [section.key=value ...]

The encoder and the clusters read no label, so at one seed they depend on epsilon only by the number
of clusters K. They are computed once for each K; every epsilon then has its own account, census and
training. The results are those of ``privssl.train`` with that seed and epsilon (except for the
noise), in less time. The labels of one seed are used once per epsilon: publishing all results
spends the sum of the epsilons.

Prints a line per run (seed, epsilon, final accuracy on validation rows, else on test rows, seconds)
and mean, standard deviation and worst seed per epsilon; --output writes all as JSON.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import about
from privssl.algorithms.label_census.algorithm import LabelCensus
from privssl.core.federation import Federation
from privssl.engines.local import LocalEngine
from privssl.errors import UserError
from privssl.experiment.config import Config, load_config
from privssl.experiment.prepare import Prepared, prepare
from privssl.runs import accounts
from privssl.runs.round_plan import planned_rounds
from privssl.training.evaluation import Evaluator

LABEL_FREE = ("encoder", "clusters")


def measure(
    config: Config, epsilons: Sequence[float], also: Mapping[str, Config] | None = None
) -> list[dict[str, Any]]:
    """Return a record per epsilon of one seed; infinity is a census without noise.

    Args:
        also: configs that are equal up to the census, by name.

    Raises:
        UserError: one of them distributes unlabelled rows differently.
    """
    open_run = prepare(replace(config, privacy=None))
    for name, other in (also or {}).items():
        if _unlabelled_of(prepare(replace(other, privacy=None))) != _unlabelled_of(open_run):
            raise UserError(f"{name}: unlabelled rows are with other agents, so the map is another")
    maps: dict[int, tuple[Any, dict[str, Any]]] = {}
    cases = {"": config, **(also or {})}
    records = []
    for (name, config), epsilon in itertools.product(cases.items(), epsilons):
        start = time.perf_counter()
        private = None
        if epsilon != float("inf"):
            assert config.privacy is not None
            private = replace(config.privacy, epsilon=epsilon)
        prepared = prepare(replace(config, privacy=private))
        algorithm = prepared.algorithm
        assert isinstance(algorithm, LabelCensus)
        if algorithm.k not in maps:
            settings = replace(config.algorithm, clusters=algorithm.k)
            maps[algorithm.k] = before_the_census(
                prepare(replace(config, privacy=None, algorithm=settings))
            )
        state, memories = maps[algorithm.k]
        engine, federation = _start_engine(prepared)
        engine.restore(memories)
        current_state = state
        with (
            tempfile.TemporaryDirectory() as folder,
            accounts.open_accounts(prepared, Path(folder), None),
        ):
            for planned in planned_rounds(prepared.algorithm.phases()):
                if planned.phase not in LABEL_FREE:
                    federation.begin(planned)
                    current_state = prepared.algorithm.round(current_state, federation)
        record: dict[str, Any] = {"dataset": config.data.name, "labels": config.data.labelled}
        record |= {"seed": config.run.seed, "epsilon": epsilon, **_score(prepared, current_state)}
        record |= {"also": name} if name else {}
        records.append(record | {"seconds": round(time.perf_counter() - start, 1)})
        print(json.dumps(records[-1]), flush=True)
    return records


def before_the_census(prepared: Prepared) -> tuple[Any, dict[str, Any]]:
    """Return the server's state and the agents' memories after the rounds that read no label."""
    engine, federation = _start_engine(prepared)
    state = prepared.algorithm.start(federation)
    for planned in planned_rounds(prepared.algorithm.phases()):
        if planned.phase in LABEL_FREE:
            federation.begin(planned)
            state = prepared.algorithm.round(state, federation)
    return state, dict(engine.memories())


def _unlabelled_of(prepared: Prepared) -> dict[str, tuple[int, ...]]:
    holdings = prepared.federated_data.manifest.agents.items()
    return {agent: holding.unlabelled for agent, holding in holdings if holding.unlabelled}


def _start_engine(prepared: Prepared) -> tuple[LocalEngine, Federation]:
    seed = prepared.config.run.seed
    engine = LocalEngine(prepared.federated_data.agents, seed=seed, device=prepared.device)
    return engine, Federation(engine, seed)


def _score(prepared: Prepared, state: Any) -> dict[str, float]:
    """Return the final accuracy; test rows choose nothing."""
    dataset, held_out = prepared.federated_data.dataset, prepared.federated_data.validation
    sets = {"test": (dataset.x_test, dataset.y_test)}
    if held_out is not None:
        sets["validation"] = (held_out.x, held_out.y)
    evaluator = Evaluator(prepared.algorithm.task.new_classifier(), sets, prepared.device)
    accuracies = evaluator.accuracies({"accuracy": prepared.algorithm.classifier(state)})
    return {name.removesuffix("/accuracy"): value for name, value in accuracies.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 if the config cannot be measured."""
    parser = argparse.ArgumentParser(prog="benchmarks.census_curve", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--epsilons", default="4,2,1")
    parser.add_argument("--seeds", default="5", help="a number, or a list: 3,4,5")
    parser.add_argument(
        "--also", action="append", default=[], help="overrides, separated by spaces"
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_intermixed_args(arguments)
    numbers = options.seeds.rstrip(",").split(",")
    seeds = [int(s) for s in numbers] if "," in options.seeds else list(range(int(numbers[0])))
    epsilons = [float(e) for e in options.epsilons.split(",")]
    torch.set_num_threads(1)
    records = []
    try:
        for seed in seeds:
            config = load_config(options.config, [*options.overrides, f"run.seed={seed}"])
            if config.algorithm.name != LabelCensus.Config().name or config.privacy is None:
                raise UserError(f"{options.config}: give a config of label_census with privacy")
            overrides = [*options.overrides, f"run.seed={seed}"]
            also = {
                text: load_config(options.config, [*overrides, *text.split()])
                for text in options.also
            }
            records += measure(config, epsilons, also)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"# {about()}")
    for epsilon in epsilons:
        accuracies = [r["test"] for r in records if r["epsilon"] == epsilon and "also" not in r]
        spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
        print(
            f"epsilon {epsilon:g}: mean {statistics.mean(accuracies):.4f} sd {spread:.4f} "
            f"worst {min(accuracies):.4f} of {len(accuracies)} seeds"
        )
    if options.output is not None:
        options.output.write_text(json.dumps(records, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
