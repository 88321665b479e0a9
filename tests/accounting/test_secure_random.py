"""The source of all noise: words are uniform, and no copy of a process repeats them.

Statistical tests have a level of one in a million.
"""

import ctypes
import os
import ssl
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import binomtest, chisquare

from accounting import secure_random
from accounting.secure_random import random_uint64
from tests.support.transports import in_a_fork

LEVEL = 1e-6
WORDS = 200_000
NEW_PROCESS_NUMBERS, NEW_USER = 0x20000000, 0x10000000  # CLONE_NEWPID, CLONE_NEWUSER of unshare(2)
NO_RIGHT = b"no right"

Draw = Callable[[], bytes]


def worst_bit(words: np.ndarray) -> float:
    """The smallest p-value of: each of 64 bits is set in half of the words; times 64."""
    bits = [int(np.count_nonzero(words >> np.uint64(bit) & np.uint64(1))) for bit in range(64)]
    return float(64 * min(binomtest(ones, len(words), 0.5).pvalue for ones in bits))


def test_bits_and_bytes_of_words_are_uniform() -> None:
    words = random_uint64(WORDS)
    assert words.shape == (WORDS,) and words.dtype == np.uint64
    assert worst_bit(words) > LEVEL
    bytes_ = np.bincount(words.view(np.uint8), minlength=256)
    assert chisquare(bytes_).pvalue > LEVEL
    # The controls: a bit that is set in 52 of 100 words, and a byte that never occurs.
    assert worst_bit(words | (np.arange(WORDS) % 25 == 0).astype(np.uint64) << np.uint64(9)) < LEVEL
    bytes_[7] = 0
    assert chisquare(bytes_).pvalue < LEVEL


@pytest.mark.parametrize("count", [0, 1, 3, 100_000])
def test_every_call_returns_the_requested_number_of_distinct_words(count: int) -> None:
    words = np.concatenate([random_uint64(count), random_uint64(count)])
    assert len(words) == len(np.unique(words)) == 2 * count  # probability of a repeat: 1e-9


def draw_in_two_copies(draw: Draw) -> tuple[bytes, bytes]:
    """Twice 16 bytes, drawn by a process that continues twice from one memory snapshot.

    A restored virtual machine does the same. Here it is a fork whose copy has the same process id,
    by which OpenSSL detects forks. This needs a right that some systems do not grant.
    """
    unshare = ctypes.CDLL(None).unshare

    def as_process_one(do: Draw) -> bytes:
        if unshare(NEW_PROCESS_NUMBERS) and unshare(NEW_USER | NEW_PROCESS_NUMBERS):
            return NO_RIGHT
        told = in_a_fork(do)
        assert told is not None
        return told

    def draw_twice() -> bytes:
        assert os.getpid() == 1
        ssl.RAND_bytes(1)  # initialise the generator before the copy
        return as_process_one(draw) + draw()

    # a fork: this process keeps its process ids
    told = in_a_fork(lambda: as_process_one(draw_twice))
    assert told is not None  # no process died
    if told.startswith(NO_RIGHT):
        pytest.skip("this system lets no process have process numbers of its own")
    assert len(told) == 32
    return told[:16], told[16:]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_process_restored_twice_from_one_snapshot_draws_different_words() -> None:
    one, other = draw_in_two_copies(lambda: random_uint64(2).tobytes())
    assert one != other
    # The negative control: OpenSSL by itself repeats its draws.
    one, other = draw_in_two_copies(lambda: ssl.RAND_bytes(16))
    assert one == other


def test_requests_above_the_chunk_size_return_distinct_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(secure_random, "_MAX_BYTES", 24)
    words = random_uint64(100)
    assert len(words) == len(np.unique(words)) == 100


def test_a_library_other_than_openssl_is_not_used_because_it_ignores_added_entropy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(secure_random, "_IS_OPENSSL", False)  # like LibreSSL, BoringSSL, AWS-LC
    monkeypatch.setattr(os, "urandom", lambda count: bytes(range(count)))
    assert random_uint64(2).tobytes() == bytes(range(16))


@pytest.mark.parametrize(("source", "name"), [(os, "urandom"), (ssl, "RAND_bytes")])
def test_an_error_of_a_random_source_is_raised(
    source: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(count: int) -> bytes:
        raise OSError("no coins")

    monkeypatch.setattr(source, name, failing)
    with pytest.raises(OSError, match="no coins"):
        random_uint64(1)
