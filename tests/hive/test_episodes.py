"""Episodes in the fold."""

from bombus.hive.events import CallsNoted, EpisodeClaimed, EpisodeEnded, NotedCall, Outcome
from bombus.hive.fold.evolve import evolve
from bombus.hive.records import CallRef
from bombus.hive.state import Hive


def test_an_episode_that_the_log_ends_twice_keeps_its_calls_and_the_last_reward() -> None:
    hive = Hive()
    call = CallRef(7, "call", b"digest")
    evolve(hive, EpisodeClaimed(engine="main", run=1, claim="k", client="c", episodes=("main-1-1",)))
    evolve(hive, CallsNoted(engine="main", run=1, calls=(NotedCall("main-1-1", call, 10, 5, 0, 0),)))
    for reward in (0.0, 1.0):
        outcome = Outcome(episode="main-1-1", task="t", reward=reward, digest=b"")
        evolve(hive, EpisodeEnded(engine="main", run=1, client="c", outcomes=(outcome,)))
    completed = hive.engine("main").pool["main-1-1"]
    assert (completed.calls, completed.reward) == ((call,), 1.0)
    assert hive.engine("main").pool_bytes == completed.bytes
