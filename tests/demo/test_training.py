"""The training loop of the demo."""

from bombus.demo.games import GameTask, Played
from bombus.demo.training import still_to_play

DONE = Played(reward=1.0, exact=True)


def test_an_episode_that_was_lost_is_played_again_with_its_own_task() -> None:
    """With another task in its place, one group lacked an episode and the batch was not complete."""
    a, b, c = (GameTask(id=name, prompt=name, answer=name) for name in "abc")
    assert still_to_play([a, a, b, b, c, c], [DONE, None, None, DONE]) == [a, b, c, c]
    assert still_to_play([a, b], [DONE, DONE]) == []
