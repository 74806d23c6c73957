"""What is said of an episode that a log does not have."""

import pytest

from bombus.hive.events import EpisodeClaimed
from bombus.replay.source import NotOnLog
from bombus.replay.tally import EpisodesSeen


def seen(runs: int) -> EpisodesSeen:
    episodes = EpisodesSeen()
    for run in range(1, runs + 1):
        claimed = (f"main-{run}-1", f"main-{run}-2")
        episodes.note(EpisodeClaimed(at_ns=run, engine="main", run=run, claim="c", client="a", episodes=claimed))
    return episodes


def test_episodes_of_runs_that_are_not_named_are_not_denied() -> None:
    with pytest.raises(NotOnLog, match=r"there are main-3-1 to main-3-2, .*, main-8-1 to main-8-2, and older ones$"):
        seen(8).check("nonsense")
    with pytest.raises(NotOnLog, match=r"there are main-1-1 to main-1-2, .*, main-6-1 to main-6-2$"):
        seen(6).check("nonsense")
    with pytest.raises(NotOnLog, match=r"there are main-8-1 to main-8-2$"):
        seen(8).check("main-8-3")
