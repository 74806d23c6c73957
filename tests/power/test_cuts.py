from pathlib import Path

from tests.effort import effort
from tests.power.cuts import run


async def test_r6_a_power_cut_loses_and_doubles_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    outcome = await run(tmp_path, cuts=effort(8, 100), seed=0)
    assert outcome.wrong == []
    assert outcome.acknowledged > 10
