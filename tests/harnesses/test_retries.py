"""Calls that fail on their way: what a harness sends again is neither lost nor trained twice."""

from pathlib import Path

import pytest

from tests.harnesses.arena import Arena
from tests.harnesses.cases import case
from tests.harnesses.catalogue import HARNESSES, Harness
from tests.harnesses.relay import Failure

TRIED = [case(harness, harness.ways[-1]) for harness in HARNESSES if harness.own_retries]


@pytest.mark.parametrize(("harness", "way"), TRIED)
async def test_calls_that_fail_are_sampled_once_and_an_answer_that_gets_lost_only_where_its_retry_is_marked(
    arena: Arena, harness: Harness, way: str, tmp_path: Path
) -> None:
    """The replica fails in the first call, the second is answered 503 twice, and the answer to the third gets lost."""
    arena.model.faults = 1
    played = await arena.play(harness, way, tmp_path, {1: Failure.BUSY, 2: Failure.BUSY, 4: Failure.LOST})
    evidence = played.evidence
    assert played.is_finished, played
    assert len(played.sampled) == evidence.calls, played
    assert not evidence.lost, played
    assert not evidence.twice, played
    # Without a mark it is another request with the same bytes: sampled again, and a line of its own.
    again = 0 if harness.marks_retries else 1
    assert evidence.calls == harness.calls + again, played
    assert evidence.sequences == harness.sequences + again, played
