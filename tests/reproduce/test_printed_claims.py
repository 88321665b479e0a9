"""Claims of published tables beside the numbers that the papers print."""

from collections.abc import Iterator

import pytest

from privssl.reproduce.tables import Order, TableFile
from tests.support.table_clone import shipped_tables

FILES = {table.name: table.file for table in shipped_tables() if table.file.paper != "own"}


def contradictions(file: TableFile, order: Order) -> Iterator[str]:
    """Where a paper prints a number for the better row that is not above another row's."""
    columns = [column.name for column in file.columns]
    for column in columns if order.columns == "all" else order.columns:
        place = columns.index(column)
        printed = {row: values[place] for row, values in file.paper_values.items()}
        better = printed.get(order.better)
        for row in order.than:
            other = printed.get(row)
            if better is not None and other is not None and better <= other:
                yield f"{column}: {order.better} {better}, {row} {other}"


@pytest.mark.parametrize("name", FILES)
def test_what_a_paper_claims_holds_in_the_numbers_that_it_prints(name: str) -> None:
    for order in FILES[name].orders:
        assert not list(contradictions(FILES[name], order)), order.claim


def test_the_control_a_claim_turned_round_contradicts_the_print() -> None:
    file = FILES["semifl-table-3"]
    order = next(order for order in file.orders if order.claim.endswith("labels, non-IID"))
    turned = order.model_copy(update={"better": "FedAvg", "than": ("SemiFL",)})
    assert list(contradictions(file, turned)) == ["non-IID, K = 2: FedAvg 58.99, SemiFL 85.34"]
