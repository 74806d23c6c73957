"""The training loop of the demo."""

from bombus.demo.games import GameTask, Played
from bombus.demo.training import Curve, Measured, Stepped, TrainingPlan, is_over, still_to_play

DONE = Played(reward=1.0, exact=True)


def test_an_episode_that_was_lost_is_played_again_with_its_own_task() -> None:
    """With another task in its place, one group lacked an episode and the batch was not complete."""
    a, b, c = (GameTask(id=name, prompt=name, answer=name) for name in "abc")
    assert still_to_play([a, a, b, b, c, c], [DONE, None, None, DONE]) == [a, b, c, c]
    assert still_to_play([a, b], [DONE, DONE]) == []


def stepped(version: int, reward: float = 0.0) -> Stepped:
    return Stepped(version=version, training_s=version + 1.0, wall_s=0.0, reward=reward, exact=0.0, episodes=8)


def test_a_curve_forgets_what_was_played_but_not_trained_before_its_hive_was_stopped() -> None:
    points = [Measured(version=version, training_s=version, reward=0.0, exact=0.0) for version in (0, 5)]
    curve = Curve(steps=[stepped(version) for version in range(5)], measured=points)
    curve.cut(3)
    assert [step.version for step in curve.steps] == [0, 1, 2]
    assert [point.version for point in curve.measured] == [0]
    assert curve.trained_s() == 3.0


def test_a_training_is_over_when_its_time_or_its_steps_are_used_up_or_its_goal_is_reached() -> None:
    plan = TrainingPlan(batch_size=1, num_repeat=1, steps=20, train_s=60.0, stop_at=0.9)
    assert not is_over(plan, Curve(), 0.0)
    assert is_over(plan, Curve(), 60.0)
    assert is_over(plan, Curve(steps=[stepped(version) for version in range(20)]), 0.0)
    assert is_over(plan, Curve(steps=[stepped(version, 0.95) for version in range(10)]), 0.0)
