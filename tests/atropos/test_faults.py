"""The list of Atropos's faults names tests that exist."""

from tests import log_rules
from tests.atropos.faults import FAULTS


def test_each_fault_on_the_list_has_tests() -> None:
    there = set(log_rules.tests())
    assert len(FAULTS) == 13
    for fault in FAULTS:
        assert fault.tests
        assert set(fault.tests) <= there, fault.there
