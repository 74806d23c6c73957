"""Each harness, unmodified, plays an episode: its task is done, and each token that was sampled is trained once."""

from pathlib import Path

import pytest

from tests.harnesses.arena import Arena
from tests.harnesses.cases import case
from tests.harnesses.catalogue import HARNESSES, Harness
from tests.harnesses.results import remember

CASES = [case(harness, way) for harness in HARNESSES for way in harness.ways]


@pytest.mark.parametrize(("harness", "way"), CASES)
async def test_an_episode_is_finished_and_each_token_is_trained_once(
    arena: Arena, harness: Harness, way: str, tmp_path: Path
) -> None:
    played = await arena.play(harness, way, tmp_path)
    evidence = played.evidence
    remember(harness, way, played)
    assert played.is_finished, played
    assert set(played.hosts) <= set(harness.asks), played
    assert [each.status for each in played.exchanges if each.is_call] == [200] * harness.calls, played
    assert evidence.calls == len(played.sampled) == harness.calls, played
    assert not evidence.lost, played
    assert not evidence.twice, played
    assert evidence.sequences == harness.sequences, played
    assert len(evidence.rewrites) == harness.sequences - 1, played
