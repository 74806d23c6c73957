"""What is said of real runs of the demo, from the figures that were recorded of them."""

import pytest
from bench.diagnose.__main__ import is_learned
from bench.diagnose.real import RUNS, Recorded, load

from bombus.config.job import RunConfig
from bombus.replay.diagnosis.diagnose import diagnose
from bombus.replay.diagnosis.findings import FaultKind, RunFinding

RECORDED = load()


def said_of(each: Recorded) -> list[RunFinding]:
    return diagnose(each.steps, RunConfig.from_json(each.job))


@pytest.mark.parametrize("each", [each for each in RECORDED if RUNS[each.name].is_healthy], ids=lambda each: each.name)
def test_a_healthy_run_has_no_finding_but_that_its_tasks_are_learned(each: Recorded) -> None:
    assert all(is_learned(finding, each.steps) for finding in said_of(each))


def test_a_run_that_converges_gives_equal_answers_and_is_healthy() -> None:
    converged = next(each for each in RECORDED if each.name == "letters, seed 0")
    assert len(converged.steps[-1].answers.duplicates) > 0.9 * converged.steps[-1].answers.count
    assert [finding.kind for finding in said_of(converged)] == [FaultKind.TOO_EASY]
