"""Faults that are planted one at a time, to see that a test notices each of them.

``python -m tests.planted_faults.run`` plants them; ``tests/test_planted_faults.py`` fails where the
product has changed and a fault no longer applies.
"""

from tests.planted_faults import (
    accounting,
    algorithms,
    audit,
    data,
    engines,
    outside,
    persons,
    plugins,
    private_training,
    reproduce,
    runs,
)
from tests.planted_faults.fault import Fault

FAULTS: tuple[Fault, ...] = tuple(
    fault
    for module in (
        *(private_training, accounting, runs, engines, data, audit, algorithms),
        *(outside, plugins, reproduce, persons),
    )
    for fault in module.FAULTS
)
