"""Tests that your own algorithm keeps the promises that privssl relies on.

from privssl.testing import check_algorithm

def test_my_method_keeps_its_promises():
    check_algorithm(MyMethod, {"local_epochs": 1})
"""

from privssl.testing.check import check_algorithm as check_algorithm
from privssl.testing.promises import BrokenPromise as BrokenPromise
