"""The plain-text and JSON status of a hive."""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bombus.cli import DEFAULT_NATS, URL_FILE, default_nats, hint_at_bus
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.collection import measures
from bombus.hive.events import Collection, Method
from bombus.hive.fold.evolve import evolve
from bombus.hive.state import Hive, Phase
from bombus.hive.status.data import engine_status, hive_status, status_dict
from bombus.hive.status.text import render_status
from tests.coordinator.groups_in_memory import GroupHarness
from tests.coordinator.operations_in_memory import MODEL, OperationHarness
from tests.overwatch.story import ENGINE, SECOND, Story, failed, operating, rolling


def test_rollout_groups_are_shown_with_their_environments_and_what_no_batch_can_take() -> None:
    harness = GroupHarness()
    harness.register(batch_size=4, starting_step=3)
    harness.ask()
    environment = harness.join("gsm", group_size=3)
    harness.push(harness.group(environment, sequences=3), harness.group(environment, sequences=3))
    text = render_status(harness.core.hive, "main")
    assert "2 rollout groups for batches of 4 sequences of an outside trainer" in text
    assert "outside trainer: step 3, batches of 4 sequences, 0 handed out" in text
    assert "  environment 0 gsm_0: 6 sequences, group_size 3, weight 1" in text
    assert "no selection of them has exactly 4 sequences. One more group of 1 or 4 sequences" in text
    (shown,) = hive_status(harness.core.hive).engines
    assert shown.rollout_groups is not None
    assert (shown.rollout_groups.groups, len(shown.rollout_groups.stranded)) == (2, 1)
    json.dumps(status_dict(harness.core.hive))


def hive_of(story: Story) -> Hive:
    hive = Hive()
    for event in story.events:
        evolve(hive, event)
    return hive


@pytest.fixture(scope="module")
def hive() -> Hive:
    return hive_of(rolling(4))


def test_the_text_shows_the_state_of_the_engine(hive: Hive) -> None:
    text = render_status(hive, ENGINE)
    assert text.startswith("engine main: ROLLING for ")
    assert "step 4, policy version 4" in text
    assert "* tasks            [###############.........] 5/8" in text
    assert "running episodes: 9" in text
    assert "replica-b http://10.0.0.5:8000 version 4" in text
    assert "last step: 4, " in text
    assert "held-out reward by policy version:" in text
    assert text.endswith("\n")


def test_calls_without_a_part_of_their_conversation_are_a_warning() -> None:
    hive = hive_of(rolling(4))
    assert "without a part" not in render_status(hive, ENGINE)
    hive.engine(ENGINE).counters.calls_incomplete = 3
    assert "\n  warning: 3 calls answered, each without a part of its conversation" in render_status(hive, ENGINE)


def test_how_long_the_sequences_of_a_replica_may_be_is_shown_where_it_says_so() -> None:
    story = rolling(1)
    loaded = ev.WeightsLoaded(
        **story.at, run=story.run, version=1, replica="replica-b", sequence_tokens=2048, constrains=True
    )
    story.tell(loaded)
    text = render_status(hive_of(story))
    assert "replica-b http://10.0.0.5:8000 version 1, sequences of up to 2048 tokens, structured output\n" in text
    assert text.count("sequences of up to") == 1


def test_how_far_a_replica_is_from_its_trainer_is_shown_or_that_it_was_not_compared() -> None:
    story = rolling(1)
    assert "canary" not in render_status(hive_of(story)), "this trainer computes none"
    canary = ev.Canary(logprobs=(-1.0,), dtype="float32")
    for version, apart in ((2, 3e-5), (3, 2e-6)):
        weights = ev.Weights(where=f"/v{version}")
        story.tell(ev.WeightsReady(**story.at, run=story.run, version=version, weights=weights, canary=canary))
        check = ev.CanaryCheck(difference=apart, limit=1e-4, way="in float64")
        story.tell(ev.WeightsLoaded(**story.at, run=story.run, version=version, replica="replica-b", canary=check))
    story.tell(ev.WeightsLoaded(**story.at, run=story.run, version=3, replica="replica-a"))
    text = render_status(hive_of(story))
    shown = "2.0e-06 nats from the trainer in float64; rounding explains 1.0e-04"
    assert f"    canary: {shown}\n" in text
    assert text.count("    canary: not checked\n") == 1
    by_name = {each.replica: each for each in engine_status(hive_of(story).engine(ENGINE), story.now_ns).replicas}
    assert (by_name["replica-b"].canary, by_name["replica-a"].unchecked) == (check, True)


def test_an_engine_that_never_ran_has_been_offline_for_a_time_that_nobody_knows() -> None:
    story = Story()
    story.configure()
    assert "\nengine main: OFFLINE (" in "\n" + render_status(hive_of(story), now_ns=story.now_ns + 60 * SECOND)


def test_a_failure_is_shown_with_its_reason() -> None:
    text = render_status(hive_of(failed()))
    assert "engine main: OFFLINE for 0.0 s (the last run failed)" in text
    assert text.count("replica-a could not load version 0") == 1, text


def read(template: str, gateway: str) -> ev.ModelRead:
    found = ev.ConversationFormat(template=template, tool_calls="hermes", reasoning="<think>")
    return ev.ModelRead(engine=ENGINE, run=1, gateway=gateway, format=found)


def test_how_the_model_is_read_is_shown_until_the_next_run_starts() -> None:
    story = rolling(1)
    assert "template" not in render_status(hive_of(story))
    story.tell(read("3fa91c2e", "g1"))
    hive = hive_of(story)
    assert "\n  template 3fa91c2e, tool calls: hermes, reasoning: <think>\n" in render_status(hive)
    data = json.loads(json.dumps(status_dict(hive)))["engines"][0]
    assert data["formats"] == [
        {"gateway": "g1", "format": {"template": "3fa91c2e", "tool_calls": "hermes", "reasoning": "<think>"}}
    ]
    assert data["disagreement"] == ""
    story.tell(ev.EngineStarted(**story.at, run=2, config_digest="d"))
    assert "template" not in render_status(hive_of(story))


def test_gateways_that_read_the_model_differently_are_named_in_one_sentence() -> None:
    story = rolling(1)
    story.tell(read("3fa91c2e", "g1 (bombus 1.0)"))
    story.tell(read("77d0ab12", "g2\x1b (bombus 1.1)"))
    hive = hive_of(story)
    assert (
        "\n  warning: gateways have read the model of this run in 2 different ways: "
        "g1 (bombus 1.0) has template 3fa91c2e, tool calls: hermes, reasoning: <think>; "
        "g2  (bombus 1.1) has template 77d0ab12, tool calls: hermes, reasoning: <think>. "
        "Install the same versions of bombus, jinja2 and tokenizers for all of them, then restart the engine.\n"
    ) in render_status(hive)
    data = json.loads(json.dumps(status_dict(hive)))["engines"][0]
    assert data["disagreement"].startswith("gateways have read the model of this run in 2 different ways")


def test_an_unknown_engine_is_answered_with_the_known_ones(hive: Hive) -> None:
    assert render_status(hive, "mian") == "no engine 'mian' in this hive; known engines: main\n"
    assert render_status(Hive()) == "no engine yet\n"


def test_the_data_is_plain_json(hive: Hive) -> None:
    data = json.loads(json.dumps(status_dict(hive)))
    engine = data["engines"][0]
    assert engine["phase"] == "ENGINE.ROLLING"
    assert engine["global_step"] == 4
    assert [measure["name"] for measure in engine["progress"]] == ["episodes", "tasks", "non-dummy tasks"]
    assert len(engine["open_episodes"]) == 9
    assert engine["last_step"]["metrics"]["merged_share"] == 0.93


def test_a_number_that_is_not_finite_is_null_in_json() -> None:
    story = Story()
    story.boot()
    story.publish(0)
    done = ev.StepCompleted(
        engine=ENGINE, run=1, step=1, trainer_epoch=1, checkpoint="c", checkpoint_digest="d", metrics={"loss": math.nan}
    )
    story.tell(done)
    data = status_dict(hive_of(story))
    assert json.loads(json.dumps(data, allow_nan=False))["engines"][0]["last_step"]["metrics"] == {"loss": None}


@pytest.mark.parametrize(
    ("method", "decides", "target"),
    [
        (Method.ENOUGH_EPISODES, "episodes", 32),
        (Method.ENOUGH_TASKS, "tasks", 8),
        (Method.ENOUGH_NON_DUMMY_TASKS, "non-dummy tasks", 8),
        (Method.ANY_CLIENT_AGREES, "clients agreed", 1),
        (Method.ALL_CLIENTS_AGREE, "clients agreed", 1),
    ],
)
def test_the_measure_that_the_method_waits_for_is_marked(method: Method, decides: str, target: int) -> None:
    hive = Hive()
    rules = Collection(method=method, batch_size=8, num_repeat=4)
    evolve(hive, ev.EngineConfigured(engine=ENGINE, config="", config_digest="", collection=rules, model="m"))
    found = [measure for measure in measures(hive.engine(ENGINE), 0) if measure.decides]
    assert [(measure.name, measure.target) for measure in found] == [(decides, target)]


def test_each_phase_says_what_it_waits_for() -> None:
    story = Story()
    hive = Hive()
    details: dict[Phase, str] = {}

    def fold_all() -> None:
        for event in story.events:
            evolve(hive, event)
            engine = hive.engines.get(ENGINE)
            if engine is not None:
                details[engine.phase] = engine_status(engine, story.now_ns).detail
        story.events.clear()

    story.configure()
    fold_all()
    assert details[Phase.OFFLINE] == "configured, waiting for start"
    story.boot()
    fold_all()
    assert details[Phase.BOOTING] == "replicas load"
    story.publish(0)
    story.claim(0, "t")
    fold_all()
    assert details[Phase.ROLLING] == "0 of 8 tasks"
    story.tell(ev.RollingClosed(at_ns=story.now_ns, engine=ENGINE, run=1))
    fold_all()
    assert details[Phase.ROLLING_POST] == "waiting for 1 running episodes to finish"
    story.tell(ev.SyncingStarted(at_ns=story.now_ns, engine=ENGINE, run=1))
    fold_all()
    assert details[Phase.WEIGHT_SYNCING] == "loading version 0: 2 of 2 replicas"


def test_the_time_is_the_callers_and_never_before_the_newest_event(hive: Hive) -> None:
    later = status_dict(hive, hive.now_ns + 10 * SECOND)
    assert later["now_ns"] == hive.now_ns + 10 * SECOND
    assert status_dict(hive, 0)["now_ns"] == hive.now_ns


def test_the_status_needs_no_terminal_library() -> None:
    code = (
        "import sys, bombus.hive.status.text; "
        "sys.exit(any(name in sys.modules for name in ('textual', 'rich', 'torch', 'nats')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_without_a_bus_the_error_says_where_its_address_is() -> None:
    assert hint_at_bus(argparse.Namespace(nats="nats://me:secret@elsewhere:4222")) == ()
    for address in (DEFAULT_NATS, "nats://127.0.0.1:43321"):  # which `bombus up` prints without its password
        (hint,) = hint_at_bus(argparse.Namespace(nats=address))
        assert "set $BOMBUS_NATS to the address of its bus, which is in the file `nats-url` in its data folder" in hint


def test_an_empty_variable_does_not_hide_the_hive_of_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BOMBUS_NATS", "")
    assert default_nats() == DEFAULT_NATS
    URL_FILE.parent.mkdir()
    URL_FILE.write_text("nats://127.0.0.1:43321\n")
    assert default_nats() == "nats://127.0.0.1:43321"


def test_a_stopped_run_of_an_outside_trainer_shows_nothing_of_a_trainer_or_replicas_of_ours() -> None:
    harness = GroupHarness()
    harness.register()
    harness.request(inbox.Stop(id=harness.id(), engine=ENGINE))
    text = render_status(harness.core.hive, ENGINE)
    assert "OFFLINE" in text
    assert not [line for line in ("collection:", "replicas:", "trainer:", "running episodes:") if line in text], text


def test_a_run_of_operations_shows_its_models_and_what_waits() -> None:
    harness = OperationHarness()
    assert status_dict(harness.core.hive)["engines"] == []
    harness.serving()
    harness.operate("1")
    harness.operate("2")
    harness.done("1", step=1)
    (engine,) = hive_status(harness.core.hive, harness.now_ns + 4 * SECOND).engines
    assert (engine.clients_take_episodes, engine.detail) == (True, "serving 1 model, 1 operation waiting")
    assert engine.operations is not None
    assert (engine.operations.accepted, engine.operations.executed, engine.operations.failed) == (3, 2, 0)
    (model,) = engine.operations.models
    assert (model.model, model.waiting, model.executed, model.checkpointed, model.step) == (MODEL, 1, 2, 0, 1)
    assert model.adapter is not None
    text = render_status(harness.core.hive, now_ns=harness.now_ns + 4 * SECOND)
    assert "operations: 1 waiting, 2 executed, 0 failed; 1 session, 0 saved models\n" in text
    assert (
        "  s:train:0                    rank 8       step      1     1 waiting       2 executed, idle 4.0 s\n" in text
    )
    assert "collection:" not in text


def test_a_run_of_operations_shows_what_they_computed_and_its_episodes() -> None:
    story = operating(3)
    text = render_status(hive_of(story))
    assert "(serving 2 models, 1 operation waiting, 4 episodes running)" in text
    assert "    loss 1.25 per token over 600 tokens, gradient norm 1.7\n" in text
    assert "episodes: 4 running, 0 ended, waiting to be taken (0 B), 24 taken\n" in text
    assert "main-1-28            ann-laptop" in text
    assert "collection:" not in text
    last = story.events[-1]
    assert isinstance(last, ev.OperationAccepted)
    fields = {"model": last.model, "number": last.number, "key": last.key, "op": last.op, "result": last.body}
    story.tell(ev.OperationCompleted(**story.at, run=1, trainer_epoch=1, failed=True, **fields))  # type: ignore[arg-type]
    assert "    forward_backward failed\n" in render_status(hive_of(story))


def test_an_engine_that_never_had_an_operation_says_nothing_of_them(hive: Hive) -> None:
    assert all(engine.operations is None for engine in hive_status(hive).engines)
    assert "operations" not in render_status(hive)


def test_what_episodes_have_reported_is_shown_by_step() -> None:
    hive = hive_of(rolling(4))
    engine = hive.engine(ENGINE)
    evolve(hive, ev.BatchReady(engine=ENGINE, run=engine.run, step=5, groups=(), config_digest=""))
    reported = [(None, {"turns": 5.0}), (False, {"reward/format": 1.0}), (True, {"reward/format": 2.0})]
    outcomes = tuple(
        ev.Outcome(episode=f"main-1-9{n}", task="t", reward=n, digest=b"", is_success=success, log_metrics=metrics)
        for n, (success, metrics) in enumerate(reported)
    )
    evolve(
        hive,
        ev.EpisodeEnded(
            engine=ENGINE,
            run=engine.run,
            client="c",
            type=ev.EpisodeType.TRAIN,
            version=4,
            outcomes=outcomes,
        ),
    )
    evolve(hive, ev.BatchReady(engine=ENGINE, run=engine.run, step=6, groups=(), config_digest=""))
    newest = engine_status(engine, 6).rollouts[-1]
    assert (newest.step, newest.success_rate, newest.metrics["reward/format"]) == (6, 0.5, 1.5)
    text = render_status(hive, ENGINE)
    assert "episodes of step 6: 3, mean reward 1, 50% successes" in text
    assert "  reward/format 1.5\n" in text


def test_three_steps_in_which_no_group_had_a_signal_are_warned_of() -> None:
    hive = hive_of(rolling(4))
    engine = hive.engine(ENGINE)
    group = ev.BatchGroup(task="t", episodes=(ev.BatchEpisode(episode="e", reward=1.0),))

    def train(step: int, silent: float) -> str:
        evolve(hive, ev.BatchReady(engine=ENGINE, run=engine.run, step=step, groups=(group,), config_digest=""))
        assert engine.step_done is not None
        metrics = {"groups_without_signal": silent}
        evolve(hive, msgspec.structs.replace(engine.step_done, step=step, metrics=metrics))
        return engine_status(engine, step).silent

    assert [bool(train(5 + number, 1.0)) for number in range(3)] == [False, False, True]
    assert "warning: nothing was learned in the last 3 steps" in render_status(hive, ENGINE)
    assert not train(8, 0.0)
