"""The rows of accounts: of one unit, at one place, protected wherever they are used, and as many as
a census counts."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from accounting import row_registry
from accounting.budget import Unit
from privssl.core.agents import Agent, LabelledRows, UnlabelledRows
from privssl.data import FederatedDataset
from privssl.data.canonical import as_loaded_of, contents_of
from privssl.data.encoded import select
from privssl.data.persons import find_shared_person
from privssl.errors import PrivacyError
from privssl.privacy.label_histogram import CensusPlan
from privssl.privacy.persons import choose_few_of_each
from privssl.privacy.plan import Plan


def limit_rows(plan: Plan, agents: Iterable[Agent]) -> None:
    """Keep as many labelled rows of each person as a census counts, chosen by a hash."""
    for agent in agents:
        rows = agent.held_labelled
        if not isinstance(plan, CensusPlan) or rows is None or rows.persons is None:
            continue
        kept = choose_few_of_each(rows.persons, plan.rows_per_person)
        agent.held_labelled = LabelledRows(
            rows.x[kept], rows.y[kept], rows.ids[kept],
            None if rows.origin is None else select(rows.origin, kept),
            tuple(rows.persons[row] for row in kept.tolist()),
        )  # fmt: skip


def refuse_other_unit(
    unit: Unit, agents: Iterable[Agent], validation: LabelledRows | None, *, named: bool
) -> None:
    """Refuse rows that name persons, unless the unit is a person, and rows that name none if it is;
    and a person with labelled rows at one place and rows at another. ``named``: whether they do."""
    if unit == "person" and not named:
        raise PrivacyError(
            "privacy.unit is person, and the rows name no persons. Give data.person (csv), "
            "person_train in the npz file (of a site: person_labelled), or persons= from Python; "
            "or set privacy.unit: record"
        )
    if unit == "record" and named:
        raise PrivacyError(
            "the rows name persons, and privacy.unit is record: the guarantee would be for a "
            "single record of a person. Set privacy.unit: person, or leave the persons out"
        )
    if shared := find_shared_person(agents, validation):
        raise PrivacyError(
            f"{shared[0]} and {shared[1]} have rows of one person, who would have two budgets or "
            "none. Give all rows of a person to one place, or leave data.split out"
        )


def refuse_shared_rows(agents: Sequence[Agent], federated_data: FederatedDataset) -> None:
    """Refuse a record with two accounts, or one that is also used without protection."""
    labelled = {agent.id: list(contents_of(agent.labelled)) for agent in agents}
    for one, other, rows in row_registry.shared_rows(labelled):
        raise PrivacyError(
            f"{rows} labelled rows of {one} are rows of {other} as well, so that one record would "
            f"have two budgets. Remove doubled rows from the data"
        )
    unprotected = chain.from_iterable(
        contents_of(rows) for rows in find_unprotected_rows(federated_data)
    )
    for name, rows in row_registry.find_double_use(labelled, unprotected):
        raise PrivacyError(
            f"{rows} labelled rows of {name} are unlabelled or validation rows as well, and would "
            f"be used there without protection. Remove doubled rows from the data"
        )


def find_unprotected_rows(
    federated_data: FederatedDataset,
) -> Iterator[LabelledRows | UnlabelledRows]:
    """Yield the rows that a run uses without protection: unlabelled and validation rows."""
    for agent in federated_data.agents:
        if agent.held_unlabelled is not None:
            yield agent.held_unlabelled
    if federated_data.validation is not None:
        yield federated_data.validation


def claim_rows(
    ledger: Path,
    holders: Iterable[Agent],
    unprotected: Iterable[LabelledRows | UnlabelledRows],
    *,
    only_check: bool = False,
) -> None:
    """Register the labelled rows of agents under their accounts in folder ``ledger``, or only
    check.

    ``unprotected``: the rows that the run uses without protection.

    Raises:
        accounting.errors.LedgerError: a row has another account, or is used without protection.
    """
    agents, unprotected_rows = list(holders), list(unprotected)
    # First by the form of version 0.1, so that its refusals still hold.
    for contents, check in ((as_loaded_of, True), (contents_of, only_check)):
        labelled = {agent.id: contents(agent.labelled) for agent in agents}
        others = chain.from_iterable(contents(rows) for rows in unprotected_rows)
        row_registry.claim(ledger, labelled, unprotected=others, only_check=check)
