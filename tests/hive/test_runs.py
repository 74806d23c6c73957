"""What may be done with a run follows from what it holds; logs of older releases named its kind as well."""

import pytest

from bombus.hive import events as ev
from bombus.hive.events import Collection, RunKind
from bombus.hive.fold.evolve import evolve
from bombus.hive.state import Hive

ENGINE = "main"
EPISODES = ev.EngineStarted(engine=ENGINE, run=1, config_digest="d", run_kind=RunKind.EPISODES)
OPERATIONS = ev.EngineStarted(engine=ENGINE, run=1, config_digest="d", run_kind=RunKind.OPERATIONS, base="org/model")
OUTSIDE = ev.EngineStarted(engine=ENGINE, run=1, config_digest="", run_kind=RunKind.TRAJECTORIES)
GROUPS = ev.EngineStarted(engine=ENGINE, run=1, config_digest="d", run_kind=RunKind.TRAJECTORIES)

PROPERTIES = (
    "serves_operations", "has_policy", "queues_groups", "groups_episodes", "makes_steps", "plays_episodes",
)  # fmt: skip


@pytest.mark.parametrize(
    ("started", "rules", "holds"),
    [
        (EPISODES, Collection(), {"has_policy", "makes_steps", "plays_episodes"}),
        (OPERATIONS, Collection(), {"serves_operations"}),
        (OUTSIDE, Collection(), {"queues_groups"}),
        (GROUPS, Collection(rollout_groups=True), {"has_policy", "queues_groups", "makes_steps"}),
        (
            GROUPS,
            Collection(episode_groups=True),
            {"has_policy", "queues_groups", "groups_episodes", "plays_episodes"},
        ),
        (
            GROUPS,
            Collection(rollout_groups=True, episode_groups=True),
            {"has_policy", "queues_groups", "groups_episodes", "makes_steps", "plays_episodes"},
        ),
    ],
)
def test_a_run_that_an_older_release_started_is_what_it_was(
    started: ev.EngineStarted, rules: Collection, holds: set[str]
) -> None:
    hive = Hive()
    evolve(hive, ev.EngineConfigured(engine=ENGINE, config="{}", config_digest="d", collection=rules, model="m"))
    evolve(hive, started)
    engine = hive.engines[ENGINE]
    assert {name for name in PROPERTIES if getattr(engine, name)} == holds
    evolve(hive, ev.EngineStopped(engine=ENGINE, run=1))
    assert not any(getattr(engine, name) for name in PROPERTIES), "a run that is over does nothing"
    assert engine.clients_take_episodes == (started is OPERATIONS)
    assert engine.batches_from_queue == ("queues_groups" in holds)
