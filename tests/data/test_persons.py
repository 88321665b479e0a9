"""Persons of rows: where readers find them, and splits that keep each in one place."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import privssl
from privssl import data
from privssl.data.csv_rows import read_table, read_texts
from privssl.data.datasets import Dataset, checksum, load_dataset, persons_checksum
from privssl.data.npz import read_npz, read_rows
from privssl.data.persons import check_names
from privssl.errors import DataError, UserError
from privssl.settings.schema import AgentSettings, DataSettings

ROWS, TESTS = 60, 6
X = np.arange(ROWS * 4, dtype=np.uint8).reshape(ROWS, 4)
Y = np.arange(ROWS) % 3
PERSONS = np.arange(ROWS) // 4  # 15 persons of 4 rows, of two or three classes each


def write_npz(path: Path, **arrays: Any) -> Path:
    rows: dict[str, Any] = {
        "x_test": X[:TESTS] + 1,
        "y_test": Y[:TESTS],
        "x_train": X,
        "y_train": Y,
    }
    np.savez(path, **(rows | arrays))
    return path


def write_csv(folder: Path, person: str = "who", names: str = "ann ann bob cy") -> Path:
    lines = [f"{w},{n},t{n},{'ab'[n % 2]}" for n, w in enumerate(names.split(" "))]
    (folder / "train.csv").write_text("\n".join([f"{person},size,said,label", *lines]) + "\n")
    (folder / "test.csv").write_text("size,said,label\n1,x,a\n2,y,b\n")
    return folder


def in_memory(**changes: Any) -> Dataset:
    given = {"persons": PERSONS} | changes
    return privssl.Dataset.from_arrays(X, Y, X[:TESTS] + 1, Y[:TESTS], **given).rows


# Readers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names", [PERSONS, PERSONS.astype(str), np.char.add("p ", PERSONS.astype(str))]
)
def test_an_npz_file_names_the_person_of_each_row(names: Any, tmp_path: Path) -> None:
    found = read_npz(write_npz(tmp_path / "rows.npz", person_train=names))
    assert found.persons == tuple(map(str, names.tolist()))
    assert read_npz(write_npz(tmp_path / "plain.npz")).persons is None


def test_persons_of_rows_without_a_label_follow_those_with_one(tmp_path: Path) -> None:
    more: dict[str, Any] = {"x_unlabelled": X[:2] + 2, "person_unlabelled": ["x", "y"]}
    found = read_npz(write_npz(tmp_path / "rows.npz", person_train=PERSONS, **more))
    assert found.persons is not None and found.persons[-3:] == ("14", "x", "y")
    assert len(found.persons) == len(found.x_train)


def test_persons_in_memory_are_of_training_rows_and_then_of_those_without_a_label() -> None:
    names = [*map(str, PERSONS), "x", "y"]
    given = privssl.Dataset.from_arrays(
        X, Y, X[:3] + 1, Y[:3], x_unlabelled=X[:2] + 2, persons=names
    )
    assert given.rows.persons == tuple(names)
    with pytest.raises(UserError, match=r"person_unlabelled is .* for each of the 2 rows"):
        privssl.Dataset.from_arrays(X, Y, X[:3], Y[:3], x_unlabelled=X[:2], persons=names[:60])


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"person_train": PERSONS[:-1]}, r"person_train is int64 of shape \(59,\).* 60 rows"),
        ({"person_train": PERSONS / 2}, "person_train is float64"),
        ({"person_train": [""] + ["a"] * (ROWS - 1)}, r"row 0 \(from 0\) has no person"),
        ({"person_train": PERSONS, "x_unlabelled": X[:2] + 2}, "need person_train, person_unlab"),
        ({"person_unlabelled": ["x"]}, "has person_unlabelled, where its rows need person_train"),
    ],
)
def test_persons_that_do_not_fit_the_rows_are_refused(
    arrays: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=why):
        read_npz(write_npz(tmp_path / "rows.npz", **arrays))


def test_a_sites_file_names_persons_of_both_kinds_of_rows(tmp_path: Path) -> None:
    path, names = tmp_path / "site.npz", np.array(["a", "a", "b"])
    arrays: dict[str, Any] = {"x_labelled": X[:3], "y_labelled": Y[:3], "x_unlabelled": X[3:5]}
    np.savez(path, person_labelled=names, person_unlabelled=np.array([7, 8]), **arrays)
    found = read_rows(path, labelled=True, unlabelled=True)
    assert (found.persons, found.unlabelled_persons) == (("a", "a", "b"), ("7", "8"))
    assert read_rows(path, labelled=True, unlabelled=False).persons == ("a", "a", "b")
    np.savez(path, person_labelled=names, **arrays)
    with pytest.raises(DataError, match="need person_labelled, person_unlabelled"):
        read_rows(path, labelled=True, unlabelled=True)


def test_one_person_may_be_spelt_in_several_ways(tmp_path: Path) -> None:
    spelt = read_table(
        write_csv(tmp_path, names="Ann ann 7 7.0"), label="label", columns=None, person="who"
    )
    assert spelt.persons == ("ann", "ann", "7", "7")
    path = tmp_path / "rows.npz"
    names = np.array([" Ann", "7.0"] * (ROWS // 2))
    assert set(read_npz(write_npz(path, person_train=names)).persons or ()) == {"ann", "7"}


def test_the_column_of_persons_is_no_feature_and_needs_a_value_in_each_row(tmp_path: Path) -> None:
    found = read_table(write_csv(tmp_path), label="label", columns=None, person="who")
    assert found.persons == ("ann", "ann", "bob", "cy")
    assert found.scales is not None and "who" not in found.scales
    texts = read_texts(tmp_path, text="said", label="label", person="who")
    assert texts.persons == found.persons
    with pytest.raises(DataError, match=r"no column whom; it has .* Correct data\.person"):
        read_table(tmp_path, label="label", columns=None, person="whom")
    with pytest.raises(DataError, match=r"row 1 \(from 0\) has no person"):
        read_table(write_csv(tmp_path, names="ann  bob"), label="label", columns=None, person="who")
    (tmp_path / "columns.yaml").write_text("size: [0, 9]\nwho: [ann, bob]\n")
    with pytest.raises(DataError, match=r"columns.yaml has who, which data.person names"):
        read_table(tmp_path, label="label", columns=tmp_path / "columns.yaml", person="who")


def test_a_frame_names_persons_and_identifies_records_as_its_csv_file_does(tmp_path: Path) -> None:
    frame = {"who": ["ann", "ann", "bob", "cy"], "size": ["0", "1", "2", "3"],
             "said": ["t0", "t1", "t2", "t3"], "label": ["a", "b", "a", "b"]}  # fmt: skip
    test = {"size": ["1"], "said": ["t1"], "label": ["a"]}
    found = privssl.Dataset.from_frame(frame, test=test, person="who").rows
    table = read_table(write_csv(tmp_path), label="label", columns=None, person="who")
    assert found.persons == table.persons and found.records == table.records
    assert found.scales is not None and "who" not in found.scales
    with pytest.raises(UserError, match="test rows drawn at random would be of persons who train"):
        privssl.Dataset.from_frame(frame, test=0.5, person="who")
    with pytest.raises(UserError, match="person is 'label', which is no column"):
        privssl.Dataset.from_frame(frame, test=test, person="label")


def test_agents_with_rows_of_their_own_name_their_persons() -> None:
    agents: dict[str, Any] = {"s0": (X[:6], Y[:6]), "q0": X[6:9]}
    names: dict[str, Any] = {"s0": list("aabbcc"), "q0": [1, 1, 2]}
    given = privssl.Dataset.federated(agents, (X[:3], Y[:3]), persons=names)
    assert given.rows.persons == ("1", "1", "2", *"aabbcc")  # q0 first
    assert (given.settings["data.labelled"], given.settings["data.unlabelled"]) == (3, 2)
    with pytest.raises(
        UserError, match=r"persons is a list\. Give those of each agent by its name"
    ):
        privssl.Dataset.federated(agents, (X[:3], Y[:3]), persons=names["s0"])
    with pytest.raises(UserError, match="has person_s0, where its rows need person_q0, person_s0"):
        privssl.Dataset.federated(agents, (X[:3], Y[:3]), persons={"s0": names["s0"]})


def test_persons_have_a_checksum_beside_that_of_the_rows() -> None:
    other = PERSONS.copy()
    other[0] = 14
    found = [in_memory(persons=names) for names in (None, PERSONS, other)]
    assert len({checksum(rows) for rows in found}) == 1  # warm starts compare rows by it
    assert len({persons_checksum(rows) for rows in found}) == 3


@pytest.mark.parametrize(
    "name",
    [
        "Jose\u0301 Ma",
        "JOS\u00c9  MA",
        "jos\u00e9\u00a0ma",
        " jos\u00e9 \uff4d\uff41",
        "jos\u00e9 ma\u200b",
    ],
)
def test_a_name_has_one_form_in_unicode(name: str) -> None:
    assert check_names("here", [name]) == ("jos\u00e9 ma",)


def test_whole_numbers_of_many_digits_are_different_persons() -> None:
    large = [str(2**62), str(2**62 + 1), "9" * 5000, "1.1", "1.10", "007e907", "5e400", "inf"]
    assert len(set(check_names("here", large))) == len(large)


@pytest.mark.parametrize("names", [np.ma.array(PERSONS, mask=PERSONS == 3), "abc", 7])
def test_persons_in_memory_that_are_no_list_are_refused(names: Any) -> None:
    with pytest.raises(UserError, match="Give a list of names, one for each row"):
        in_memory(persons=names)


def test_persons_in_memory_may_be_objects_as_a_frame_has_them() -> None:
    names = np.array(["a", "b"] * (ROWS // 2), dtype=object)
    assert in_memory(persons=names).persons == tuple(names)
    names[3] = None
    with pytest.raises(UserError, match=r"row 3 \(from 0\) has no person"):
        in_memory(persons=names)


def test_test_rows_are_not_drawn_from_rows_of_persons() -> None:
    settings = DataSettings(name="arrays", labelled=5, test=10)
    with pytest.raises(DataError, match=r"data\.test is 10"):
        data.build(settings, AgentSettings(support=1, query=1), 0, in_memory())


# Splits ---------------------------------------------------------------------------------------


def places(federated: data.FederatedDataset) -> dict[str, list[tuple[int, ...]]]:
    """The row ids at each place, by the person of the rows."""
    found = [federated.manifest.validation]
    for holding in federated.manifest.agents.values():
        found += [holding.labelled, holding.unlabelled]
    by_person: dict[str, list[tuple[int, ...]]] = {}
    for ids in found:
        for person in {str(PERSONS[row]) for row in ids}:
            by_person.setdefault(person, []).append(ids)
    return by_person


@pytest.mark.parametrize("rule", ["iid", "dirichlet", "round_robin", "shards"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_split_has_every_person_in_one_place_with_all_its_rows(rule: Any, seed: int) -> None:
    numbers: dict[str, Any] = {"alpha": 0.5} if rule == "dirichlet" else {}
    numbers |= {"k": 3} if rule == "shards" else {}
    settings = DataSettings(
        name="arrays", labelled=6, unlabelled=5, validation=2, partition=rule, **numbers
    )
    agents = AgentSettings(support=2, query=2)
    federated = data.build(settings, agents, seed, in_memory())
    found = places(federated)
    assert len(found) == 6 + 5 + 2
    assert all(len(holding) == 1 for holding in found.values())
    for person, [ids] in found.items():
        assert sum(str(PERSONS[row]) == person for row in ids) == 4
    for agent in federated.agents:
        rows = agent.held_labelled or agent.held_unlabelled
        assert rows is not None and rows.persons == tuple(str(PERSONS[i]) for i in rows.ids)
    # The control: split row by row, persons are in several places.
    by_row = data.build(settings, agents, seed, in_memory(persons=None))
    assert max(map(len, places(by_row).values())) > 1


def test_rows_without_a_label_of_a_labelled_person_are_used_nowhere() -> None:
    y = np.where(np.arange(ROWS) % 4 == 0, -1, Y)
    rows = privssl.Dataset.from_arrays(X, y, X[:3], Y[:3], persons=PERSONS).rows
    settings = DataSettings(name="arrays", labelled=15)
    federated = data.build(settings, AgentSettings(support=1), 0, rows)
    assert federated.agents[0].labelled.ids.tolist() == [i for i in range(ROWS) if i % 4]


def test_more_persons_than_there_are_is_said_with_their_number() -> None:
    settings = DataSettings(name="arrays", labelled=16)
    with pytest.raises(DataError, match="has 15 training persons"):
        data.build(settings, AgentSettings(support=1, query=1), 0, in_memory())


def test_a_replayed_split_counts_persons(tmp_path: Path) -> None:
    def settings(split: str = "", labelled: int = 6) -> DataSettings:
        return DataSettings(
            name="arrays", labelled=labelled, unlabelled=5, validation=2, split=split
        )

    agents = AgentSettings(support=2, query=2)
    drawn = data.build(settings(), agents, 0, in_memory())
    drawn.manifest.write(tmp_path / "split.json")
    again = data.build(settings(split=str(tmp_path / "split.json")), agents, 5, in_memory())
    assert again.manifest.agents == drawn.manifest.agents
    with pytest.raises(DataError, match=r"has 6 labelled persons, but data\.labelled"):
        data.build(settings(split=str(tmp_path / "split.json"), labelled=7), agents, 0, in_memory())
    with pytest.raises(DataError, match="with other persons, or without them"):
        other = in_memory(persons=PERSONS[::-1])
        data.build(settings(split=str(tmp_path / "split.json")), agents, 0, other)


def test_a_config_reads_the_column_of_persons(tmp_path: Path) -> None:
    settings = DataSettings(name="csv", root=str(write_csv(tmp_path)), person="who", labelled=2)
    assert load_dataset(settings).persons == ("ann", "ann", "bob", "cy")
    assert [p.key for p in DataSettings(name="digits", person="who").problems()] == ["person"]
    clash = DataSettings(name="csv", root="x", person="label")
    assert [p.text for p in clash.problems()] == ["label is the column of labels or texts already"]
