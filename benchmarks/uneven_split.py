"""A split with few or no labels of some classes, for any method.

    python -m benchmarks.uneven_split CONFIG OUTPUT.json CLASS=MOST... [section.key=value ...]

Samples the split of the config and removes labelled rows of the named classes until at most MOST of
each are left over all agents; 0 removes all labels of a class. No agent holds the removed rows.
Prints the overrides to run a config on it.
"""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from privssl.data.split_manifest import Manifest
from privssl.errors import UserError
from privssl.experiment.config import load_config
from privssl.experiment.prepare import prepare


def with_fewer(split: Manifest, labels: Tensor, most: Mapping[int, int]) -> Manifest:
    """Return the split with at most ``most[c]`` labelled rows of class c, taken from agents in
    turn.

    Args:
        labels: (N,) true classes of all training rows, by id.
    """
    kept = {
        agent: [row for row in holding.labelled if int(labels[row]) not in most]
        for agent, holding in split.agents.items()
    }
    for c, limit in most.items():
        of_class = {
            agent: [row for row in holding.labelled if int(labels[row]) == c]
            for agent, holding in split.agents.items()
        }
        for _ in range(limit):
            agent = max(of_class, key=lambda name: len(of_class[name]))  # from the largest agent
            if of_class[agent]:
                kept[agent].append(of_class[agent].pop(0))
    agents = {
        agent: dataclasses.replace(holding, labelled=tuple(sorted(kept[agent])))
        for agent, holding in split.agents.items()
    }
    return dataclasses.replace(split, agents=agents)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 if the split cannot be made."""
    parser = argparse.ArgumentParser(prog="benchmarks.uneven_split", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("changes", nargs="*", help="CLASS=MOST, and config overrides")
    options = parser.parse_intermixed_args(arguments)
    most = {
        int(name): int(number)
        for name, _, number in (change.partition("=") for change in options.changes)
        if name.isdigit() and number.isdigit()
    }
    overrides = [text for text in options.changes if not text.partition("=")[0].isdigit()]
    try:
        federated_data = prepare(load_config(options.config, overrides)).federated_data
        split = with_fewer(federated_data.manifest, federated_data.true_labels, most)
        split.write(options.output)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    number = sum(len(holding.labelled) for holding in split.agents.values())
    print(f"data.split={options.output} data.labelled={number}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
