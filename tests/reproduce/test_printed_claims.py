"""Claims of published tables, compared with the printed numbers."""

from collections.abc import Iterator

import pytest

from privssl.reproduce.pages import PRINTED, printed_accuracies
from privssl.reproduce.tables import Order, Table, TableFile
from tests.support.table_clone import shipped_tables

TABLES = {table.name: table for table in shipped_tables() if table.file.paper != "own"}
OURS = "(ours)"  # at the end of a claim that is not from a paper
DRAWN = {"FedMatch, without inter-client consistency"}  # rows of figures without numbers


def asked_in(file: TableFile, order: Order) -> tuple[str, ...]:
    """The columns of a claim."""
    columns = tuple(column.name for column in file.columns)
    return columns if order.columns == "all" else order.columns


def contradictions(file: TableFile, order: Order) -> Iterator[str]:
    """Where a printed number of the better row is not above that of another row."""
    columns = [column.name for column in file.columns]
    for column in asked_in(file, order):
        place = columns.index(column)
        printed = {row: values[place] for row, values in file.paper_values.items()}
        better = printed.get(order.better)
        for row in order.than:
            other = printed.get(row)
            if better is not None and other is not None and better <= other:
                yield f"{column}: {order.better} {better}, {row} {other}"


def left_out(table: Table, order: Order) -> Iterator[str]:
    """Columns in which the paper prints the better row above all others, but neither this claim nor
    another one uses them. A missing number in a row with numbers counts as below every number: its
    training diverged.
    """
    file = table.file
    if not file.paper_values.keys() >= {order.better, *order.than}:
        return
    for place, column in enumerate(column.name for column in file.columns):
        better = file.paper_values[order.better][place]
        others = [file.paper_values[row][place] for row in order.than]
        exist = all(table.cell(row, column) for row in order.than)
        if better is None or not exist or any(o is not None and better <= o for o in others):
            continue
        asked = {
            row
            for one in file.orders
            if one.better == order.better and column in asked_in(file, one)
            for row in one.than
        }
        if not asked >= {*order.than}:
            yield column


def not_printed(file: TableFile, order: Order) -> set[str]:
    """Rows of a paper's claim without printed numbers, in a table with numbers."""
    ours = order.claim.endswith(OURS) or not file.paper_values
    return set() if ours else {order.better, *order.than} - {*file.paper_values} - DRAWN


@pytest.mark.parametrize("name", TABLES)
def test_claims_of_a_paper_hold_in_its_printed_numbers(name: str) -> None:
    for order in TABLES[name].file.orders:
        assert not list(contradictions(TABLES[name].file, order)), order.claim


@pytest.mark.parametrize("name", TABLES)
def test_a_claim_uses_every_column_in_which_its_paper_prints_it(name: str) -> None:
    for order in TABLES[name].file.orders:
        assert not list(left_out(TABLES[name], order)), order.claim


@pytest.mark.parametrize("name", TABLES)
def test_a_claim_of_a_paper_compares_printed_rows_only(name: str) -> None:
    for order in TABLES[name].file.orders:
        assert not not_printed(TABLES[name].file, order), order.claim


def test_the_number_of_printed_accuracies_equals_that_of_the_papers_tables() -> None:
    counted = dict.fromkeys(PRINTED, 0)
    for table in TABLES.values():
        counted[table.file.paper] += len(printed_accuracies(table))
    assert counted == PRINTED


def test_control_diverged_training_shares_of_messages_and_quoted_numbers_do_not_count() -> None:
    cells = {name: len(table.cells) for name, table in TABLES.items()}
    counted = {name: len(printed_accuracies(table)) for name, table in TABLES.items()}
    # Table 4 of FedSSL has "-" in 12 of 30 places.
    assert (cells["fedssl-table-4"], counted["fedssl-table-4"]) == (30, 18)
    assert (cells["fedmatch-communication"], counted["fedmatch-communication"]) == (4, 0)
    assert (cells["fedtrinet-readings"], counted["fedtrinet-readings"]) == (12, 0)


def test_control_a_reversed_claim_contradicts_the_printed_numbers() -> None:
    file = TABLES["semifl-table-3"].file
    order = next(order for order in file.orders if order.claim.endswith("labels, non-IID"))
    turned = order.model_copy(update={"better": "FedAvg", "than": ("SemiFL",)})
    assert list(contradictions(file, turned)) == ["non-IID, K = 2: FedAvg 58.99, SemiFL 85.34"]


def test_control_a_claim_without_the_columns_of_diverged_baselines_leaves_them_out() -> None:
    table = TABLES["fedssl-table-4"]
    order = table.file.orders[0]
    few = order.model_copy(update={"columns": asked_in(table.file, order)[:2]})
    orders = (few, *table.file.orders[1:])
    former = Table(table.name, table.file.model_copy(update={"orders": orders}), table.cells)
    assert list(left_out(former, few)) == [
        "3 + 9, 150 labels", "1 + 3, 100 labels", "2 + 6, 100 labels", "3 + 9, 100 labels",
    ]  # fmt: skip


def test_control_a_claim_with_a_row_that_the_paper_lacks_is_named() -> None:
    file = TABLES["fedssl-table-3"].file
    order = file.orders[0].model_copy(update={"than": ("Supervise", "MixMatch")})
    assert not_printed(file, order) == {"MixMatch"}
