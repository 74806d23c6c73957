"""Writes the list of rules and tests at the end of docs/log.md: `python -m tests.log_rules`.

A test of rule N is named `test_rN_...`. `OTHERS` lists tests of another name that hold a rule too.
"""

import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "log.md"
MARK = "<!-- rules -->\n"
RULES = range(1, 21)

PACED = "coordinator/test_core_asynchronous.py::"
PRESSED = "system/test_backpressure.py::"
OTHERS: dict[int, tuple[str, ...]] = {
    2: ("bus/test_flight.py::test_no_event_of_a_deposed_coordinator_lands_wherever_the_log_ends",),
    12: (
        "coordinator/test_retention.py::test_no_call_is_ever_needed_that_lay_below_a_floor_before",
        "coordinator/test_retention.py::test_what_only_replay_wants_goes_when_the_stream_is_over_half_full",
        "replay/test_upkeep.py::test_compacting_keeps_two_snapshots_and_everything_after_the_older",
    ),
    13: (
        "coordinator/test_core.py::test_claims_are_fair_between_a_greedy_client_and_a_modest_one",
        "coordinator/test_core.py::test_a_grant_that_reaches_nobody_goes_back_after_five_seconds",
    ),
    14: (
        f"{PACED}test_the_bound_is_the_number_of_batches_that_may_come_before",
        f"{PACED}test_what_dawdled_over_the_bound_is_dropped_by_an_event_and_never_trained",
    ),
    20: (f"{PRESSED}test_a_stream_that_is_nearly_full_takes_no_new_work_but_what_is_under_way_ends",),
}
NOT_BUILT = {
    13: "sets of episodes over several engines",
    15: "pinned versions, NCCL",
    16: "the whole rule",
    17: "the whole rule",
}
OTHER_R3 = "bus/test_cluster.py"  # its R3 are streams with three replicas


def tests() -> Iterator[str]:
    """Yield every test as `folder/file.py::name`."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for name in re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(), re.MULTILINE):
            yield f"{path.relative_to(TESTS).as_posix()}::{name}"


def held_by() -> dict[int, list[str]]:
    """Return the tests of each rule."""
    found: dict[int, list[str]] = {rule: [] for rule in RULES}
    for test in tests():
        named = re.search(r"::test_r(\d+)_", test)
        if named and not test.startswith(OTHER_R3):
            found[int(named[1])].append(test)
    for rule, others in OTHERS.items():
        found[rule] += others
    return found


def listing() -> str:
    lines = []
    for rule, found in held_by().items():
        lines.append(f"- **R{rule}**" + (f" (not built yet: {NOT_BUILT[rule]})" if rule in NOT_BUILT else ""))
        lines += [f"  - `{test}`" for test in found]
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return docs/log.md with the list that the sources give."""
    return PAGE.read_text().partition(MARK)[0] + MARK + listing()


if __name__ == "__main__":
    PAGE.write_text(page())
