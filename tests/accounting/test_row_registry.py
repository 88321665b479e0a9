"""No row has two accounts: accounting/row_registry.py recognises rows without storing them.

Specification: privacy.md, section 5, test 16 (one data set under two ids).
"""

import fcntl
import hashlib
import multiprocessing
import os
import stat
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from accounting import row_registry
from accounting.errors import LedgerError, PlanError
from accounting.row_registry import claim, find_double_use, shared_rows

A, B, C, D = (letter.encode() * 40 for letter in "abcd")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "registry").glob("*"))}


def known_rows(folder: Path, agent: str) -> list[str]:
    return (folder / "registry" / f"{agent}.rows").read_text().split()


# Claims -----------------------------------------------------------------------------------------


def test_the_same_rows_under_the_same_id_are_accepted_again(tmp_path: Path) -> None:
    claim(tmp_path, {"s0": [A, B], "s1": [C]})
    before = contents(tmp_path)
    claim(tmp_path, {"s0": [B, A], "s1": [C]})
    claim(tmp_path, {"s1": [C]})
    assert contents(tmp_path) == before


def test_no_row_is_claimed_while_the_rows_of_another_agents_account_are_missing(
    tmp_path: Path,
) -> None:
    """s1 is not in a later run, and its rows must not get a second budget under s0."""
    claim(tmp_path, {"s0": [A], "s1": [B]})
    for agent in ("s0", "s1"):
        (tmp_path / f"{agent}.jsonl").touch()
    claim(tmp_path, {"s0": [A, C]})  # the control: nothing is missing
    lost = tmp_path / "registry" / "s1.rows"
    kept = lost.read_bytes()
    lost.unlink()
    before = contents(tmp_path)
    for holdings in ({"s0": [B]}, {}):
        with pytest.raises(LedgerError, match=r"s1\.rows: missing, though s1\.jsonl is there"):
            claim(tmp_path, holdings)
    assert contents(tmp_path) == before
    lost.write_bytes(kept)
    with pytest.raises(LedgerError, match="would be in the accounts of s0 and of s1"):
        claim(tmp_path, {"s0": [B]})


def test_rows_may_join_an_account_and_never_leave_it(tmp_path: Path) -> None:
    claim(tmp_path, {"s0": [A]})
    claim(tmp_path, {"s0": [B]})
    assert len(known_rows(tmp_path, "s0")) == 2
    with pytest.raises(LedgerError):  # A still belongs to s0, although the last run did not use it
        claim(tmp_path, {"s1": [A]})


def test_one_row_under_two_ids_is_refused_within_one_claim(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="1 rows would be in the accounts of s0 and of s1"):
        claim(tmp_path, {"s0": [A, B], "s1": [B, C]})
    assert not list(tmp_path.glob("registry/*.rows"))


def test_one_row_under_two_ids_is_refused_over_two_claims_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    claim(tmp_path, {"s0": [A, B]})
    before = contents(tmp_path)
    with pytest.raises(LedgerError, match=r"2 rows .* s0 and of s9.*data.split"):
        claim(tmp_path, {"s0": [A, C], "s9": [A, B, D]})
    assert contents(tmp_path) == before
    claim(tmp_path, {"s9": [C, D]})  # the refused run claimed neither C nor D


def test_a_row_that_differs_in_one_bit_is_another_row(tmp_path: Path) -> None:
    claim(tmp_path, {"s0": [A], "s1": [bytes([A[0] ^ 1]) + A[1:]]})


def test_an_agent_id_that_is_not_a_file_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be an agent id"):
        claim(tmp_path, {"../s0": [A]})
    assert not list(tmp_path.iterdir())


def test_rows_shared_by_two_agents_are_found_without_storing_anything() -> None:
    found = list(shared_rows({"s0": [A, B, B], "s1": [C, B, A], "s2": [D]}))
    assert found == [("s0", "s1", 2)]
    assert list(shared_rows({"s0": [A, A], "s1": [B]})) == []


# Unprotected rows -------------------------------------------------------------------------------


def test_a_row_of_an_account_cannot_be_used_without_protection_later(tmp_path: Path) -> None:
    claim(tmp_path, {"s0": [A, B]}, unprotected=[C])
    before = contents(tmp_path)
    with pytest.raises(LedgerError, match=r"2 rows in the account of s0 .*without.*data\.split"):
        claim(tmp_path, {"s1": [D]}, unprotected=[C, A, B, A])
    assert contents(tmp_path) == before
    claim(tmp_path, {"s1": [D]})  # the control: without the unprotected rows it is accepted


def test_a_row_used_without_protection_cannot_get_an_account_later(
    tmp_path: Path,
) -> None:
    claim(tmp_path, {"s0": [A]}, unprotected=[B])
    # B stays recorded, although this run does not use it
    claim(tmp_path, {"s0": [A]}, unprotected=[C])
    before = contents(tmp_path)
    for row in (B, C):
        with pytest.raises(LedgerError, match=r"1 rows in the account of s0 .*have been"):
            claim(tmp_path, {"s0": [A, row]})
    assert contents(tmp_path) == before
    claim(tmp_path / "other", {"s0": [A]})
    # the control: B and C were not recorded as unprotected
    claim(tmp_path / "other", {"s0": [A, B, C]})


def test_a_row_cannot_be_protected_and_unprotected_within_one_claim(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="1 rows in the account of s1 would be used"):
        claim(tmp_path, {"s0": [A], "s1": [B]}, unprotected=[C, B])
    assert not list(tmp_path.glob("registry/*.rows"))
    assert not (tmp_path / "registry" / "unprotected").exists()


def test_claiming_the_same_split_again_changes_nothing(tmp_path: Path) -> None:
    claim(tmp_path, {"s0": [A], "s1": [B]}, unprotected=[C, D])
    before = contents(tmp_path)
    claim(tmp_path, {"s0": [A], "s1": [B]}, unprotected=[D, C])
    assert contents(tmp_path) == before
    assert len(before["unprotected"].split()) == 2


def test_a_check_records_no_unprotected_row(tmp_path: Path) -> None:
    claim(tmp_path, {"s0": [A]}, unprotected=[B], only_check=True)
    assert set(contents(tmp_path)) == {"key", "lock"}
    with pytest.raises(LedgerError, match="without protection"):
        claim(tmp_path, {"s0": [A]}, unprotected=[A], only_check=True)


def test_rows_of_a_run_that_are_also_unprotected_are_found_without_storing_anything() -> None:
    found = list(find_double_use({"s0": [A, B, B], "s1": [C]}, iter([B, A, D])))
    assert found == [("s0", 2)]
    assert list(find_double_use({"s0": [A], "s1": [C]}, [B, D])) == []


# What the files reveal --------------------------------------------------------------------------


def test_files_and_folder_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    former = os.umask(0)
    try:
        claim(tmp_path / "new" / "ledger", {"s0": [A]})
    finally:
        os.umask(former)
    folder = tmp_path / "new" / "ledger"
    for place in (folder, folder / "registry"):
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
    names = {path.name for path in (folder / "registry").iterdir()}
    assert names == {"key", "lock", "unprotected", "s0.rows"}
    for path in (folder / "registry").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_every_folder_has_its_own_key(tmp_path: Path) -> None:
    for name in ("one", "other"):
        claim(tmp_path / name, {"s0": [A]})
    one, other = (contents(tmp_path / name) for name in ("one", "other"))
    assert len(one["key"]) == 32
    assert one["key"] != other["key"]
    assert one["s0.rows"] != other["s0.rows"]  # the same row: two registries cannot be linked


def test_a_fingerprint_cannot_be_tested_without_the_key(tmp_path: Path) -> None:
    claim(tmp_path, {"s0": [A]})
    [fingerprint] = known_rows(tmp_path, "s0")
    assert len(fingerprint) == 32  # 128 bits in hex
    guesses = {
        hashlib.new(name, row).hexdigest()[:32]
        for name in ("sha256", "sha1", "md5", "sha512")
        for row in (A, A.hex().encode())
    }
    assert fingerprint not in guesses


def test_rows_are_stored_in_sorted_order(tmp_path: Path) -> None:
    unprotected = [number.to_bytes(2, "big") for number in range(8)]
    claim(tmp_path, {"s0": [D, A, C, B]}, unprotected=unprotected)
    assert known_rows(tmp_path, "s0") == sorted(known_rows(tmp_path, "s0"))
    unprotected = contents(tmp_path)["unprotected"].split()
    assert unprotected == sorted(unprotected)
    assert {len(line) for line in unprotected} == {32}


# Damage -----------------------------------------------------------------------------------------


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "registry" / name).write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "key cut": (write("key", b"short"), "key: damaged"),
    "key empty": (write("key", b""), "key: damaged"),
    "key gone": (lambda folder: (folder / "registry" / "key").unlink(), "key: missing"),
    "rows of no hex": (write("s0.rows", b"no hex at all\n"), r"s0\.rows: damaged"),
    "rows of binary": (write("s0.rows", b"\xff\xfe\n"), r"s0\.rows: damaged"),
    "unprotected gone": (
        lambda folder: (folder / "registry" / "unprotected").unlink(),
        "unprotected: missing",
    ),
    "unprotected of no hex": (write("unprotected", b"no hex\n"), "unprotected: damaged"),
    "a line cut": (write("s0.rows", b"ab" * 16 + b"\nabab\n"), r"s0\.rows: damaged"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_registry_is_refused_with_a_clear_error(tmp_path: Path, what: str) -> None:
    claim(tmp_path, {"s0": [A]})
    damage, words = DAMAGE[what]
    damage(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(LedgerError, match=f"{words}.*put the true"):
        claim(tmp_path, {"s1": [A]})
    assert contents(tmp_path) == before


def test_a_symbolic_link_in_place_of_the_key_is_not_followed(tmp_path: Path) -> None:
    claim(tmp_path, {"s0": [A]})
    key = tmp_path / "registry" / "key"
    (tmp_path / "elsewhere").write_bytes(bytes(32))
    key.unlink()
    key.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LedgerError, match="cannot be read or written"):
        claim(tmp_path, {"s1": [A]})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission_is_refused_with_a_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(LedgerError, match="cannot be read or written"):
        claim(tmp_path, {"s0": [A]})


def test_a_read_only_file_system_is_refused_with_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(LedgerError, match=r"cannot be read or written \(Read-only file system\)"):
        claim(tmp_path, {"s0": [A]})


# Two processes ----------------------------------------------------------------------------------


def compete(folder: Path, agent: str, rows: list[bytes], start: Any, won: Any) -> None:
    start.wait()
    try:
        claim(folder, {agent: rows})
    except LedgerError:
        won.put((agent, False))
    else:
        won.put((agent, True))


def winners(folder: Path, holdings: Mapping[str, list[bytes]]) -> list[str]:
    """The agents that got their rows when all claim at the same moment, each in its own process."""
    context = multiprocessing.get_context("fork")
    start, won = context.Barrier(len(holdings)), context.Queue()
    children = [
        context.Process(target=compete, args=(folder, agent, rows, start, won))
        for agent, rows in holdings.items()
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a warning about threads beside a fork
        for child in children:
            child.start()
    results = [won.get(timeout=300) for _ in children]
    for child in children:
        child.join(300)
    return sorted(agent for agent, success in results if success)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("attempt", range(5))
def test_of_two_processes_that_claim_an_overlapping_row_only_one_gets_it(
    tmp_path: Path, attempt: int
) -> None:
    many = [number.to_bytes(8, "big") for number in range(2000)]  # so that a claim takes a while
    holdings = {"s0": many[:1200], "s1": many[1100:]}
    assert len(winners(tmp_path, holdings)) == 1


def test_two_processes_without_a_common_row_both_get_their_rows(tmp_path: Path) -> None:
    assert winners(tmp_path, {"s0": [A, B], "s1": [C, D]}) == ["s0", "s1"]
    assert list(shared_rows({"s0": [A, B], "s1": [C, D]})) == []


def test_control_without_the_lock_both_processes_get_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both read the registry before either has written: the control of the two tests above.
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    meeting = multiprocessing.get_context("fork").Barrier(2)
    refuse = row_registry._refuse_overlap

    def and_wait(*given: Any) -> None:
        refuse(*given)
        meeting.wait(300)

    (tmp_path / "registry").mkdir()
    (tmp_path / "registry" / "key").write_bytes(bytes(32))
    (tmp_path / "registry" / "unprotected").touch()  # or both would make it, and one would fail
    monkeypatch.setattr(row_registry, "_refuse_overlap", and_wait)
    assert winners(tmp_path, {"s0": [A], "s1": [A]}) == ["s0", "s1"]
