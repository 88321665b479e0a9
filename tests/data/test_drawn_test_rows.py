"""Test rows drawn from all rows (``data.test``), and rows in stream order (``data.order``)."""

from pathlib import Path

import numpy as np
import pytest
import torch

from privssl.data import FederatedDataset, build, class_counts_of
from privssl.data.datasets import Dataset, load_dataset, redraw_test_rows
from privssl.data.npz import NO_LABEL
from privssl.errors import ConfigError, DataError, PrivacyError
from privssl.experiment.config import load_config
from privssl.experiment.prepare import prepare
from privssl.runtime.randomness import stream
from privssl.settings.schema import AgentSettings, DataSettings
from tests.support.toy_worlds import TOY

PRIVATE = """\
data: {name: toy, labelled: 40, unlabelled: 40}
agents: {support: 2, query: 2}
model: {name: small_cnn, width: 4}
algorithm: {name: fedavg, rounds: 1}
privacy: {epsilon: 8.0, sample_rate: 0.5, steps: 1}
"""
ROWS = len(TOY.y_train) + len(TOY.y_test)  # 1,000 + 200


def drawn(seed: int = 0, **settings: object) -> FederatedDataset:
    data = DataSettings(name="toy", labels="labels-at-server", labelled=20, **settings)  # type: ignore[arg-type]
    return build(data, AgentSettings(query=3), seed, TOY)


def rows_of(found: FederatedDataset) -> list[bytes]:
    """Every row that an agent holds, or that is used for validation or testing."""
    held = [part.x for a in found.agents for part in (a.held_labelled, a.held_unlabelled) if part]
    assert found.validation is not None
    every = torch.cat([*held, found.validation.x, found.dataset.x_test])
    return sorted(x.numpy().tobytes() for x in every)


def test_every_row_is_used_once_for_training_validation_or_testing() -> None:
    found = drawn(test=300, validation=100)
    assert len(found.dataset.y_test) == 300 and found.validation is not None
    assert len(found.validation) == 100
    assert sum(len(a.unlabelled) for a in found.agents if a.id != "server") == ROWS - 420
    everything = torch.cat([TOY.x_train, TOY.x_test])
    assert rows_of(found) == sorted(x.numpy().tobytes() for x in everything)
    published = drawn(validation=100)  # the control: the published test rows
    assert torch.equal(published.dataset.x_test, TOY.x_test)


def test_labels_stay_with_their_rows() -> None:
    label = {
        x.numpy().tobytes(): int(y)
        for dataset in ((TOY.x_train, TOY.y_train), (TOY.x_test, TOY.y_test))
        for x, y in zip(*dataset, strict=True)
    }
    again = redraw_test_rows(TOY, 300, stream(0, 0, "test", "rows"))
    for xs, ys in ((again.x_train, again.y_train), (again.x_test, again.y_test)):
        assert [label[x.numpy().tobytes()] for x in xs] == ys.tolist()


def test_the_draw_depends_on_the_seed() -> None:
    one, same, other = drawn(0, test=300), drawn(0, test=300), drawn(1, test=300)
    assert one.manifest.hash == same.manifest.hash
    assert torch.equal(one.dataset.x_test, same.dataset.x_test)
    assert not torch.equal(one.dataset.x_test, other.dataset.x_test)


def test_a_row_without_a_label_is_never_a_test_row() -> None:
    y = TOY.y_train.clone()
    y[:900] = NO_LABEL
    dataset = Dataset(TOY.name, TOY.x_train, y, TOY.x_test, TOY.y_test, TOY.class_names)
    again = redraw_test_rows(dataset, 299, stream(0, 0, "test", "rows"))
    assert (again.y_test != NO_LABEL).all() and (again.y_train != NO_LABEL).sum() == 1
    with pytest.raises(DataError, match=r"data.test is 300, but toy has 300 rows with a label"):
        redraw_test_rows(dataset, 300, stream(0, 0, "test", "rows"))


@pytest.mark.parametrize("key", ["encoder", "split"])
def test_drawn_test_rows_are_refused_beside_an_encoder_or_a_fixed_split(key: str) -> None:
    value = {"encoder": "efficientnet_lite0", "split": "split.json"}[key]
    settings = DataSettings(name="toy", test=10, **{key: value})  # type: ignore[arg-type]
    assert [problem.key for problem in settings.problems()] == ["test"]


# Order -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("partition", "slices"), [("imbalanced", 10), ("iid", 4)])
def test_every_slice_of_a_stream_has_the_class_shares_of_the_whole(
    partition: str, slices: int
) -> None:
    found = drawn(order="by-class", partition=partition)
    unlike = 0.0
    for agent, rows in found.manifest.agents.items():
        ids = rows.unlabelled
        if agent == "server":
            continue
        whole = class_counts_of(found, ids)
        for part in np.array_split(np.array(ids), slices):
            assert np.abs(class_counts_of(found, part.tolist()) - whole / slices).max() <= 1.5
        for part in np.array_split(np.array(sorted(ids)), slices):  # the control: as stored
            unlike = max(
                unlike, np.abs(class_counts_of(found, part.tolist()) - whole / slices).max()
            )
    assert unlike > 1.5 or partition == "iid"  # toy rows alternate, so iid is balanced in any order


def test_order_by_class_changes_only_the_order_of_rows() -> None:
    stored, spread = drawn(), drawn(order="by-class")
    assert stored.manifest.hash != spread.manifest.hash
    for agent, rows in stored.manifest.agents.items():
        assert sorted(spread.manifest.agents[agent].unlabelled) == list(rows.unlabelled)
        assert sorted(spread.manifest.agents[agent].labelled) == list(rows.labelled)
    held = next(a for a in spread.agents if a.id == "q0").unlabelled
    assert held.ids.tolist() == list(spread.manifest.agents["q0"].unlabelled)
    assert torch.equal(held.x, load_dataset(DataSettings(name="toy")).x_train[held.ids])


def test_a_private_run_refuses_an_order_that_depends_on_labels(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(PRIVATE)
    with pytest.raises(
        ConfigError, match=r"data\.order +by-class puts an agent's rows in an order"
    ):
        load_config(path, ["data.order=by-class"])
    drawn_before = build(
        DataSettings(name="toy", labelled=40, unlabelled=40, order="by-class"),
        AgentSettings(support=2, query=2), 0,
    )  # fmt: skip
    drawn_before.manifest.write(tmp_path / "spread.json")
    with pytest.raises(PrivacyError, match="was drawn with"):
        prepare(load_config(path, [f"data.split={tmp_path / 'spread.json'}"]))
    stored = build(
        DataSettings(name="toy", labelled=40, unlabelled=40), AgentSettings(support=2, query=2), 0
    )
    stored.manifest.write(tmp_path / "stored.json")
    prepare(load_config(path, [f"data.split={tmp_path / 'stored.json'}"]))  # the control


def test_a_split_without_the_new_settings_keeps_its_hash() -> None:
    assert {"test", "order"}.isdisjoint(drawn().manifest.settings)
    assert drawn(test=300).manifest.settings["test"] == 300
