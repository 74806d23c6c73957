"""Groups of episodes by hand: what they take from agents, how they end, and what they tell the hive meanwhile."""

import math
from functools import partial
from typing import Any

import pytest

from bombus import InfraError, Task, WorkflowOutput
from bombus.sdk import running
from bombus.sdk.errors import BadReward, EpisodeGone
from bombus.sdk.groups import MultiModelGroup, SingleGroup
from tests.sdk.test_core import EPISODE, no, ok
from tests.sdk.test_core import GRANTED as GRANTED_ONE
from tests.sdk.test_multi_model import GRANTED, ROLES, MultiModelDriver

TASK = Task(task_id="t1")
TWO = {"success": True, "episodes": [EPISODE, EPISODE | {"episode_uuid": "e2"}], "model": "tiny"}


def group_of_two(driver: MultiModelDriver, idle_s: float | None = None, replace_infra: int = 0) -> SingleGroup:
    claim = partial(driver.multi.begin_episodes, discard_episode_timeout=idle_s)
    return SingleGroup(driver.multi, TASK, claim, driver.run(claim(2)), replace_infra)


@pytest.mark.parametrize("reward", [1e10, -1e10, math.nan, math.inf, None, [0.5, math.nan], {"a": 1e10}])
def test_a_reward_that_the_hive_would_refuse_is_found_where_its_agent_returns_it(reward: Any) -> None:
    group = group_of_two(MultiModelDriver([ok(TWO)]))
    with pytest.raises(BadReward):
        group.succeeded(0, WorkflowOutput(reward=reward))
    assert group.results == [None, None]


def test_a_metric_that_is_not_finite_is_left_out_and_costs_no_episode(caplog: pytest.LogCaptureFixture) -> None:
    driver = MultiModelDriver([ok(TWO), ok({})])
    group = group_of_two(driver)
    metrics: dict[str, float | list[float]] = {
        "mean_s": math.nan,
        "lengths": [1.0, math.inf],
        "turns": 2.0,
        "each": [1.0, 2.0],
    }
    for place in (0, 1):
        group.begin(place)
        group.succeeded(place, WorkflowOutput(reward=1.0, log_metrics=metrics))
    driver.run(group.end())
    for episode in driver.body(1)["episodes"]:
        assert episode["workflow_output"]["log_metrics"] == {"turns": 2.0, "each": 1.5}
    assert caplog.text.count("log_metrics.mean_s is left out") == 1


def test_a_reward_of_one_role_that_the_hive_would_refuse_is_found_there_too() -> None:
    driver = MultiModelDriver([ok(GRANTED)])
    claim = partial(driver.multi.begin_multi_model_episodes, engines=ROLES)
    group = MultiModelGroup(driver.multi, TASK, claim, driver.run(claim(1)))
    with pytest.raises(BadReward):
        group.succeeded(0, {"planner": 1.0, "worker": 1e10})


def test_an_agent_that_took_too_long_is_lost_and_no_success() -> None:
    driver = MultiModelDriver([ok(TWO)])
    group = group_of_two(driver, idle_s=5.0)
    driver.now += 9
    group.succeeded(0, 1.0)
    driver.now += 2  # 11 s are over twice the idle limit
    with pytest.raises(EpisodeGone, match=r"lasted longer than max_episode_time.*longer discard_episode_timeout"):
        group.succeeded(1, 1.0)
    assert [one and one.reward for one in group.results] == [1.0, None]


def test_an_agent_that_was_in_time_may_wait_for_the_others_of_its_group() -> None:
    driver = MultiModelDriver([ok(TWO), ok({}), ok({})])
    group = group_of_two(driver, idle_s=5.0)
    group.succeeded(0, 1.0)
    group.failed(1, ValueError("a bug"))
    driver.now += 1000
    driver.run(group.end())
    assert driver.paths()[1:] == ["/end_episodes", "/abort_episodes"]


def test_what_waits_for_a_worker_is_kept_and_has_all_of_its_time_from_its_beginning() -> None:
    driver = MultiModelDriver([ok(TWO), ok({"over": []}), ok({"over": []})])
    group = group_of_two(driver, idle_s=5.0)
    assert group.begin(0).episode_uuid == "e1"
    driver.run(group.keep())
    assert driver.body(1)["episode_uuids"] == ["e2"], "an agent that plays keeps its own"
    driver.now += 100
    assert group.begin(1).episode_uuid == "e2"
    driver.now += 9
    group.succeeded(1, 1.0)
    driver.run(group.keep())
    assert driver.body(2)["episode_uuids"] == ["e2"]


def test_an_agent_that_waited_for_a_worker_may_take_too_long_all_the_same() -> None:
    driver = MultiModelDriver([ok(TWO)])
    group = group_of_two(driver, idle_s=5.0)
    driver.now += 100
    group.begin(1)
    driver.now += 11
    with pytest.raises(EpisodeGone):
        group.succeeded(1, 1.0)


@pytest.mark.parametrize(("idle_s", "every_s"), [(None, 30.0), (300.0, 30.0), (6.0, 2.0), (0.01, 0.1)])
def test_what_is_done_is_kept_within_its_idle_limit(idle_s: float | None, every_s: float) -> None:
    assert running.KEEP_FINISHED_S == 30.0
    assert group_of_two(MultiModelDriver([ok(TWO)]), idle_s).keep_every_s == every_s


def test_an_idle_limit_that_only_the_hive_knows_counts_as_well() -> None:
    assert group_of_two(MultiModelDriver([ok(TWO | {"discard_episode_timeout": 9.0})])).keep_every_s == 3.0


def test_an_end_that_is_refused_for_an_episode_that_nobody_names_is_tried_one_by_one() -> None:
    gone = no(403, "episode_over")
    driver = MultiModelDriver([ok(TWO), gone, ok({"over": []}), ok({}), gone, ok({})])
    group = group_of_two(driver)
    group.succeeded(0, 1.0)
    group.succeeded(1, 0.5)
    assert driver.run(group.end()) == []
    assert driver.paths()[1:] == [
        "/end_episodes",
        "/touch_episodes",
        "/end_episodes",
        "/end_episodes",
        "/abort_episodes",
    ]
    assert [one and one.reward for one in group.outcome()] == [1.0, None]
    assert group.lost == {"EpisodeGone": 1}


def test_a_group_of_errors_is_infrastructures_where_all_of_them_are() -> None:
    driver = MultiModelDriver([ok(TWO), ok({}), ok(GRANTED_ONE)])
    group = group_of_two(driver, replace_infra=2)
    group.failed(0, ExceptionGroup("two tasks", [InfraError("a"), ExceptionGroup("more", [InfraError("b")])]))
    group.failed(1, ExceptionGroup("two tasks", [InfraError("a"), ValueError("a bug")]))
    assert driver.run(group.replace(0))
    assert driver.body(1)["infra"] is True
    assert not driver.run(group.replace(1))
    assert group.lost == {"InfraError": 1, "ExceptionGroup": 1}


def test_an_abort_that_fails_costs_nothing_of_what_has_ended() -> None:
    driver = MultiModelDriver([ok(TWO), ok({}), no(500, "internal")])
    group = group_of_two(driver)
    group.succeeded(0, 1.0)
    group.failed(1, ValueError("a bug"))
    assert driver.run(group.end()) == []
    assert [one and one.reward for one in group.outcome()] == [1.0, None]


def test_what_has_ended_is_not_kept_any_more() -> None:
    driver = MultiModelDriver([ok(TWO), ok({"over": []}), ok({})])
    group = group_of_two(driver)
    for place in (0, 1):
        group.begin(place)
        group.succeeded(place, 1.0)
    driver.run(group.keep())
    assert driver.body(1)["episode_uuids"] == ["e1", "e2"]
    driver.run(group.end())
    driver.run(group.keep())
    assert len(driver.sent) == 3


def test_one_that_was_lost_after_it_was_done_is_not_ended() -> None:
    driver = MultiModelDriver([ok(TWO), ok({}), ok({})])
    group = group_of_two(driver)
    group.succeeded(0, 1.0)
    group.succeeded(1, 1.0)
    group.failed(1, EpisodeGone("it was idle"))
    driver.run(group.end())
    assert [end["episode_uuid"] for end in driver.body(1)["episodes"]] == ["e1"]


@pytest.mark.parametrize("is_multi_model", [False, True])
def test_what_replaces_an_episode_is_claimed_as_the_group_was_and_infrastructure_is_to_blame(
    is_multi_model: bool,
) -> None:
    granted = GRANTED if is_multi_model else GRANTED_ONE
    driver = MultiModelDriver([ok(granted), ok({}), ok(granted)])
    core = driver.multi
    group: MultiModelGroup | SingleGroup
    if is_multi_model:
        multi = partial(
            core.begin_multi_model_episodes,
            engines=ROLES,
            discard_episode_timeout=50.0,
            episode_type="eval",
            task_id="t1",
        )
        group = MultiModelGroup(core, TASK, multi, driver.run(multi(1)), replace_infra=1)
    else:
        single = partial(
            core.begin_episodes, discard_episode_timeout=50.0, episode_type="eval", task_id="t1", sampler="s"
        )
        group = SingleGroup(core, TASK, single, driver.run(single(1)), replace_infra=1)
    group.failed(0, InfraError("the sandbox is gone"))
    assert driver.run(group.replace(0))
    first, aborted, again = (driver.body(number) for number in range(3))
    assert aborted["infra"] is True
    assert {"claim_id", "waited_s", "wait_s"} >= {name for name in first if first[name] != again[name]}
    assert (again["episode_type"], again["task_id"], again["discard_episode_timeout"]) == ("eval", "t1", 50.0)
