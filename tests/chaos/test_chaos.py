"""The short form of `make chaos`: real processes, killed and stopped at random, and every guarantee checked."""

from pathlib import Path

from tests.chaos.run import run, summary

KILLS = 20


async def test_nothing_acknowledged_is_lost_and_nothing_is_trained_twice(tmp_path: Path) -> None:
    lines: list[str] = []
    outcome = await run(tmp_path, KILLS, seed=20, say=lines.append)
    report = outcome.report
    print("\n".join([*lines, summary(outcome)]))
    assert report.wrong == []
    assert report.calls_found == report.calls_acknowledged > 0
    assert report.episodes_trained_once > 0
    assert outcome.killer.kills.total() >= KILLS
    assert min(outcome.killer.kills.values()) >= 1
