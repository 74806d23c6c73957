"""The short form of `make chaos`: real processes, killed and stopped at random, and every guarantee checked."""

from pathlib import Path

from tests.chaos.engines import LEFT
from tests.chaos.run import run, summary
from tests.effort import long_only

KILLS = 12


@long_only
async def test_nothing_acknowledged_is_lost_and_nothing_is_trained_twice(tmp_path: Path) -> None:
    lines: list[str] = []
    outcome = await run(tmp_path, KILLS, seed=20, say=lines.append, broken_replica=True)
    report = outcome.report
    print("\n".join([*lines, summary(outcome)]))
    assert report.wrong == []
    assert report.verified
    assert outcome.multi.ended > 0
    for engine in report.engines.values():
        assert engine.calls_found == engine.calls_acknowledged > 0
        assert engine.episodes_trained_once > 0
        assert engine.steps_after >= 1
        assert engine.trained_again
    assert report.engines[LEFT.name].replicas_quarantined >= 1
    assert outcome.killer.kills.total() >= KILLS
    assert min(outcome.killer.kills.values()) >= 1
    assert outcome.restarted > len(outcome.killer.kills)
