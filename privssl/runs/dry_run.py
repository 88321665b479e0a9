"""Output of ``--dry-run``: config, rows of agents, planned privacy spending, and a forecast."""

import dataclasses
from typing import Any

from rich.console import Console
from rich.filesize import decimal as size
from rich.markup import escape
from rich.table import Table

from accounting.errors import AccountingError
from privssl.data import class_counts
from privssl.data.split import draw_split, holders
from privssl.errors import DataError, UserError
from privssl.experiment import config as configs
from privssl.experiment.prepare import Prepared
from privssl.runs.forecast import Forecast, Visit, forecast

MOST_CLASSES, MOST_AGENTS = 20, 50  # rows and columns of a table


def describe(prepared: Prepared, console: Console) -> dict[str, Any] | None:
    """Print all of it; return the forecast as JSON values, None if there is none."""
    console.print(configs.to_yaml(prepared.config), markup=False)
    console.print(_build_holdings_table(prepared))
    if (table := _build_class_table(prepared)) is not None:
        console.print(table)
    if prepared.config.data.split:
        console.print(_describe_split(prepared), markup=False)
    privacy = prepared.config.privacy
    if prepared.plan is None or privacy is None:
        console.print("Not private: the plan spends no budget and nothing is guaranteed.")
    else:
        console.print(prepared.plan.spending(privacy), markup=False)
    if prepared.config.run.engine != "local":
        console.print("Time and bytes are not estimated: the agents are at their sites.")
        return None
    try:
        estimate = forecast(prepared)
    except (UserError, AccountingError, OSError) as error:
        console.print(f"Time and bytes cannot be estimated: {error}", markup=False)
        return None
    for line in lines_of(estimate):
        console.print(line, markup=False)
    return dataclasses.asdict(estimate) | {"disk_bytes": estimate.disk_bytes}


def _build_holdings_table(prepared: Prepared) -> Table:
    table = Table("agent", "role", "labelled", "unlabelled", "classes")
    names = prepared.federated_data.dataset.class_names
    for agent in prepared.federated_data.agents:
        labelled, unlabelled = agent.held_labelled, agent.held_unlabelled
        # The guarantee protects which classes a support agent has.
        shown = labelled if prepared.plan is None else None
        classes = [] if shown is None else [names[c] for c in sorted(set(shown.y.tolist()))]
        counts = ["-" if rows is None else str(len(rows)) for rows in (labelled, unlabelled)]
        if labelled is not None and labelled.persons is not None:
            counts[0] += f" of {len(set(labelled.persons))} persons"
        if labelled is not None and prepared.config.hides_counts:
            counts[0] = "private"
        table.add_row(agent.id, agent.role, *counts, escape(" ".join(classes)) or "unknown")
    local_ids = {agent.id for agent in prepared.federated_data.agents}
    for ref in prepared.roster:
        if ref.id not in local_ids:
            table.add_row(ref.id, ref.role, "at its site", "at its site", "unknown")
    return table


def _build_class_table(prepared: Prepared) -> Table | None:
    """Return rows of each class, labelled + unlabelled, by true labels; none in a private run."""
    names, agents = prepared.federated_data.dataset.class_names, prepared.federated_data.agents
    if prepared.plan is not None or not 0 < len(agents) <= MOST_AGENTS:
        return None
    if len(names) > MOST_CLASSES:
        return None
    table = Table(
        "", *map(escape, names), title="Rows with+without a label of each class", box=None
    )
    labelled, unlabelled = class_counts(prepared.federated_data)
    for agent in agents:
        cells = []
        for index in range(len(names)):
            with_label = str(labelled[agent.id][index]) if agent.id in labelled else "0"
            rows = agent.held_unlabelled
            without_label = str(unlabelled[agent.id][index]) if agent.id in unlabelled else "?"
            cells.append(f"{with_label}+{without_label if rows is not None else '0'}")
        table.add_row(agent.id, *cells)
    return table


def _describe_split(prepared: Prepared) -> str:
    """Describe whether the split of a file is the one that the config would sample."""
    config, federated_data = prepared.config, prepared.federated_data
    if prepared.plan is not None:  # a sampled split may depend on protected labels
        return (
            f"{config.data.split} is used; it is not compared with a drawn split in private runs."
        )
    data = dataclasses.replace(config.data, split="")
    try:
        sampled = draw_split(
            data, holders(data.labels, config.agents), config.run.seed, federated_data.dataset
        )
    except DataError as error:
        return f"{config.data.split} is used; the config itself can draw no split ({error})."
    manifest = federated_data.manifest
    differences = (
        _map_rows(manifest.agents, manifest.validation).items() ^ _map_rows(*sampled).items()
    )
    rows = len({row for row, _ in differences})
    if not rows:
        return f"{config.data.split} is the split that the config would draw."
    return (
        f"{config.data.split} differs from the split that the config would draw (run.seed "
        f"{config.run.seed}): {rows} of {manifest.rows} training rows are held elsewhere or "
        "otherwise."
    )


def _map_rows(agents: Any, validation: tuple[int, ...]) -> dict[int, tuple[str, str]]:
    """Map rows to their agent and kind."""
    assignments = dict.fromkeys(validation, ("", "validation"))
    for name, holding in agents.items():
        assignments |= dict.fromkeys(holding.labelled, (name, "labelled"))
        assignments |= dict.fromkeys(holding.unlabelled, (name, "unlabelled"))
    return assignments


def lines_of(estimate: Forecast) -> list[str]:
    """Format a forecast as lines."""
    lines = ["Estimate from one visit of one agent of each kind. Nothing was charged or kept:"]
    lines += [f"  {_format_visit(visit)}" for visit in estimate.visits]
    workers = f", {estimate.workers} workers" if estimate.workers > 1 else ""
    up, down = estimate.round_bytes
    all_up, all_down = estimate.total_bytes
    return [
        *lines,
        f"A round: about {duration(estimate.round_seconds)}{workers}; an evaluation: "
        f"{duration(estimate.evaluation_seconds)}; all {estimate.rounds} rounds: about "
        f"{duration(estimate.total_seconds)}.",
        f"Messages of a round: {size(up)} up, {size(down)} down; in all {size(all_up)} up, "
        f"{size(all_down)} down.",
        f"Checkpoints: {size(estimate.snapshot_bytes)} each, at most {size(estimate.disk_bytes)} "
        "at a time, and one more with validation rows.",
    ]


def _format_visit(visit: Visit) -> str:
    part = f", from {visit.timed} of {visit.whole} {visit.unit}"
    return (
        f"{visit.role} {visit.agent}, {visit.step}: {duration(visit.seconds)}"
        f"{part if visit.timed < visit.whole else ''}"
        f"{', on made-up rows' if visit.made_up else ''}"
    )


def duration(seconds: float) -> str:
    """Format seconds with a suitable unit.

    >>> duration(0.0123), duration(75), duration(7260)
    ('0.012 s', '1.2 min', '2.0 h')
    """
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
