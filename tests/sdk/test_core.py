"""The client's operations without a network: what they send, how long they wait, and what they make of each reply."""

import asyncio
import json
import math
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from bombus.errors import Code
from bombus.hive.failures import FailureKind
from bombus.sdk.claimed import ClaimedEpisodes
from bombus.sdk.core import BACKOFF_MAX_S, CLAIM_WAIT_S, ClientCore, finished
from bombus.sdk.errors import (
    BadConfig,
    BadRequest,
    BadReward,
    EngineOffline,
    EpisodeGone,
    NoEpisode,
    NotYourEpisode,
    OtherModel,
    OtherOutcome,
    ServerBusy,
    ServerFault,
    ServerUnreachable,
    SwarmError,
    Unauthorized,
    WrongPhase,
    error_for,
)
from bombus.sdk.requests import NoReply, ServerReply, ServerRequest
from bombus.sdk.types import PoolInformation, Task, ThrottlePolicy, WorkflowOutput

EPISODE = {"episode_uuid": "e1", "openai_base_url": "http://inside:1/e/main/v1", "openai_api_key": "sk-1"}
GRANTED = {"success": True, "episodes": [EPISODE], "model": "tiny"}
FULL = {
    "success": False,
    "fail_cause": "No available episodes to claim.",
    "code": "no_episodes",
    "engine_status": "ENGINE.ROLLING",
}
SYNCING = {"success": False, "fail_cause": "Engine is syncing weights", "engine_status": "ENGINE.WEIGHT_SYNCING"}
OFFLINE = {"success": False, "fail_cause": "it is off", "engine_status": "ENGINE.OFFLINE"}


def ok(body: object) -> ServerReply:
    return ServerReply(status=200, body=json.dumps(body).encode())


def no(status: int, code: str, detail: str = "why", retry_after_s: float = 0.0) -> ServerReply:
    return ServerReply(
        status=status, body=json.dumps({"detail": detail, "code": code}).encode(), retry_after_s=retry_after_s
    )


class Driver:
    """An exchange that replies from a list, on a clock that moves only while the client sleeps or the server waits.

    The reply None does not come.
    """

    def __init__(
        self,
        replies: Iterable[ServerReply | NoReply | BaseException | None],
        server_waits: bool = True,
        at: str = "http://hive:10086",
        kind: type[ClientCore] = ClientCore,
        **options: Any,
    ) -> None:
        self.now = 1000.0
        self.claimed = ClaimedEpisodes(at, lambda: self.now, "c1")
        self.core = kind(at, self, self.claimed, lambda: 0.0, verbose=False, **options)
        self.replies = list(replies)
        self.sent: list[ServerRequest] = []
        self.slept: list[float] = []
        self._server_waits = server_waits

    def run(self, operation: Coroutine[Any, Any, Any]) -> Any:
        return finished(operation)

    async def send(self, request: ServerRequest) -> ServerReply | NoReply:
        self.sent.append(request)
        reply = self.replies.pop(0)
        while reply is None:
            await asyncio.sleep(0)
        if isinstance(reply, BaseException):
            raise reply
        if (
            self._server_waits
            and request.path == "/claim_episodes"
            and b'"success": false' in getattr(reply, "body", b"")
        ):
            self.now += self.body(-1)["wait_s"]
        return reply

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def check(self) -> None: ...

    def note_claimed(self, episodes: Sequence[str]) -> None: ...

    def body(self, index: int) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.sent[index].body)
        return body


def test_a_data_set_is_named_at_the_end_of_an_episode_only_where_a_task_has_one() -> None:
    driver = Driver([ok({"success": True}), ok({"success": True})])
    for task in (Task(task_id="t1", data_set="legs"), Task(task_id="t1")):
        driver.run(driver.core.end_episodes([(task, "e1", WorkflowOutput(reward=1.0))]))
    assert [driver.body(index)["episodes"][0].get("data_set") for index in (0, 1)] == ["legs", None]


def test_a_kind_of_failure_is_left_out_for_an_older_hive_which_learns_only_whether_no_model_is_to_blame() -> None:
    older = no(400, "unknown_field", "failure: Extra inputs are not permitted")
    driver = Driver([older, ok({"success": True}), older, ok({"success": True})])
    driver.run(driver.core.abort_episodes(["e1"], failure=FailureKind.GRADER))
    output = WorkflowOutput(reward=1.0, failure=FailureKind.TURNS)
    driver.run(driver.core.end_episodes([(Task(task_id="t1"), "e2", output)]))
    assert [driver.body(index).get("failure") for index in (0, 1)] == ["grader", None]
    assert [driver.body(index)["infra"] for index in (0, 1)] == [True, True]
    assert [driver.body(index)["episodes"][0].get("failure") for index in (2, 3)] == ["turns", None]


def test_another_field_that_a_hive_does_not_know_is_refused_as_before() -> None:
    driver = Driver([no(400, "unknown_field", "detail: Extra inputs are not permitted")])
    with pytest.raises(BadRequest):
        driver.run(driver.core.abort_episodes(["e1"]))


def test_an_operation_that_waits_for_an_event_loop_where_there_is_none_is_a_mistake() -> None:
    driver = Driver([None])
    with pytest.raises(RuntimeError, match=r"abort_episodes.* needs a running event loop"):
        driver.run(driver.core.abort_episodes(["e1"]))


# ---- requests -------------------------------------------------------------------------------------------------


def test_a_request_without_a_reply_is_sent_again_with_the_same_id() -> None:
    driver = Driver([NoReply("reset"), no(503, "bus_down"), ok({"success": True})])
    driver.run(driver.core.abort_episodes(["e1"]))
    assert len({request.headers["Idempotency-Key"] for request in driver.sent}) == 1
    assert len(driver.sent) == 3


@pytest.mark.parametrize(
    "reply",
    [
        NoReply("reset"),
        no(502, ""),
        no(503, "bus_down"),
        no(504, ""),
        ServerReply(status=500, body=b"Internal Server Error"),
    ],
)
def test_a_server_that_is_away_for_now_is_asked_again_and_the_client_knows_when_it_was(
    reply: ServerReply | NoReply,
) -> None:
    driver = Driver([ok({"success": True}), reply, ok({"success": True})])
    driver.run(driver.core.abort_episodes(["e1"]))
    assert driver.core.missed_at == -math.inf
    driver.now += 5.0
    driver.run(driver.core.abort_episodes(["e1"]))
    assert driver.core.missed_at == 1005.0
    assert len({request.headers["Idempotency-Key"] for request in driver.sent[1:]}) == 1


@pytest.mark.parametrize(("reply", "is_retried"), [(no(500, "internal"), False), (no(429, "overloaded"), True)])
def test_a_server_that_fails_or_is_busy_is_not_away(reply: ServerReply, is_retried: bool) -> None:
    driver = Driver([reply, ok({"success": True})])
    with nullcontext() if is_retried else pytest.raises(ServerFault):
        driver.run(driver.core.abort_episodes(["e1"]))
    assert driver.core.missed_at == -math.inf
    assert len(driver.slept) == int(is_retried)


def test_the_first_wait_for_a_hive_is_logged_at_once_and_only_once(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver([NoReply("refused")] * 50, retry_s=60.0)
    with pytest.raises(ServerUnreachable, match=r"refused\. Start a hive with `bombus up`"):
        driver.run(driver.core.auto_sync_train_config_and_start_engine({}))
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["waiting for http://hive:10086, up to 60 s: start it with `bombus up`"]


def test_a_hive_that_goes_away_is_logged_each_time(caplog: pytest.LogCaptureFixture) -> None:
    done = ok({"success": True})
    driver = Driver([done, NoReply("x"), NoReply("x"), done, NoReply("x"), done])
    for _ in range(3):
        driver.run(driver.core.abort_episodes(["e1"]))
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == ["is it still running?"] * 2


def test_two_commands_have_two_ids() -> None:
    driver = Driver([ok({"success": True})] * 2)
    driver.run(driver.core.abort_episodes(["e1"]))
    driver.run(driver.core.abort_episodes(["e1"]))
    assert len({request.headers["Idempotency-Key"] for request in driver.sent}) == 2


def test_backoff_grows_to_a_limit_and_honours_retry_after() -> None:
    driver = Driver([NoReply("x")] * 8 + [no(503, "overloaded", retry_after_s=30.0), ok({"success": True})])
    driver.run(driver.core.abort_episodes(["e1"]))
    assert driver.slept[:7] == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, BACKOFF_MAX_S]
    assert driver.slept[-1] == 30.0


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (NoReply("x"), ServerUnreachable),
        (no(503, "bus_down"), ServerBusy),
        (ServerReply(status=500, body=b"oops"), ServerFault),
    ],
)
def test_an_operation_gives_up_when_its_time_is_over(reply: ServerReply | NoReply, kind: type[SwarmError]) -> None:
    driver = Driver([reply] * 100, retry_s=10.0)
    with pytest.raises(kind):
        driver.run(driver.core.abort_episodes(["e1"]))
    assert sum(driver.slept) <= 10.0


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, Code.BAD_CONFIG, BadConfig),
        (400, Code.BAD_REWARD, BadReward),
        (401, Code.BAD_KEY, Unauthorized),
        (400, Code.WRONG_PHASE, WrongPhase),
        (400, Code.UNKNOWN_EPISODE, EpisodeGone),
        (404, Code.NOT_YOUR_EPISODE, NotYourEpisode),
        (409, Code.OTHER_OUTCOME, OtherOutcome),
        (500, Code.INTERNAL, ServerFault),
        (502, "", ServerBusy),
    ],
)
def test_each_refusal_has_its_class_code_and_sentence(status: int, code: str, kind: type[SwarmError]) -> None:
    error = error_for(status, code, "a sentence")
    assert type(error) is kind
    assert (error.status, error.code, error.why) == (status, code, "a sentence")


def test_a_refusal_is_not_retried() -> None:
    driver = Driver([no(409, "other_outcome", "it ended otherwise")])
    with pytest.raises(OtherOutcome, match="ended otherwise"):
        driver.run(driver.core.end_episodes([(Task(task_id="t"), "e1", WorkflowOutput(reward=1.0))]))
    assert driver.slept == []


def test_a_reply_that_is_not_json_is_a_server_fault() -> None:
    driver = Driver([ServerReply(status=200, body=b"<html>")])
    with pytest.raises(ServerFault):
        driver.run(driver.core.get_rollout_stat())


# ---- claiming -------------------------------------------------------------------------------------------------


def test_credentials_have_the_servers_path_after_our_address() -> None:
    driver = Driver([ok(GRANTED)])
    episode, credentials = driver.run(driver.core.begin_episode())
    assert episode == credentials.episode_uuid == "e1"
    assert credentials.base_url == "http://hive:10086/e/main/v1"
    assert (credentials.api_key, credentials.model) == ("sk-1", "tiny")


def test_a_claim_keeps_its_id_and_reports_how_long_it_has_waited() -> None:
    driver = Driver([ok(FULL), NoReply("x"), ok(SYNCING), ok(GRANTED)])
    driver.run(driver.core.begin_episode())
    bodies = [driver.body(index) for index in range(4)]
    assert len({body["claim_id"] for body in bodies}) == 1
    assert bodies[0]["waited_s"] == 0
    assert bodies[3]["waited_s"] > 2 * CLAIM_WAIT_S
    assert driver.slept == [0.25]  # only for the lost reply: the server did the waiting


def test_a_server_that_does_not_wait_is_not_flooded_with_claims() -> None:
    driver = Driver([ok(FULL), ok(GRANTED)], server_waits=False)
    driver.run(driver.core.begin_episode())
    assert driver.slept == [1.0]


def test_a_claim_whose_episodes_were_taken_back_gets_a_new_id() -> None:
    driver = Driver([no(409, "other_claim"), ok(GRANTED)])
    driver.run(driver.core.begin_episode())
    assert driver.body(0)["claim_id"] != driver.body(1)["claim_id"]


def test_a_client_that_touches_says_so_in_its_claims_and_learns_how_long_it_may_be_silent() -> None:
    told: list[float] = []
    driver = Driver([ok(FULL), ok(GRANTED | {"client_silence_s": 15.0})], on_claimed=told.append)
    driver.run(driver.core.begin_episode())
    assert [driver.body(index)["touches"] for index in (0, 1)] == [True, True]
    assert told == [15.0]


def test_a_client_of_an_older_hive_claims_without_touches_and_sends_none() -> None:
    told: list[float] = []
    older = no(400, "unknown_field", "touches: Extra inputs are not permitted")
    driver = Driver([older, ok(GRANTED), ok(GRANTED)], on_claimed=told.append)
    driver.run(driver.core.begin_episode())
    driver.run(driver.core.begin_episode())
    assert ["touches" in driver.body(index) for index in range(3)] == [True, False, False]
    assert driver.slept == []
    assert told == []


def test_very_many_open_episodes_are_given_up_in_several_requests() -> None:
    driver = Driver([ok({}), ok({}), NoReply("x")])
    driver.run(driver.claimed.give_up([f"e{number}" for number in range(2500)], driver.send))
    assert [len(driver.body(index)["episode_uuids"]) for index in range(3)] == [1024, 1024, 452]


def test_a_claim_on_an_engine_that_is_offline_raises_with_the_reason() -> None:
    driver = Driver([ok(OFFLINE)])
    with pytest.raises(EngineOffline, match="it is off"):
        driver.run(driver.core.begin_episode())


def test_a_claim_waits_at_most_max_wait_s() -> None:
    driver = Driver([ok(FULL)] * 3)
    with pytest.raises(NoEpisode, match="No available episodes"):
        driver.run(driver.core.begin_episodes(2, max_wait_s=30.0))
    assert [driver.body(index)["wait_s"] for index in range(2)] == [20.0, 10.0]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), asyncio.CancelledError()])
def test_an_interrupted_claim_is_asked_for_again_and_what_it_was_granted_is_aborted(
    interruption: BaseException,
) -> None:
    driver = Driver([ok(FULL), interruption, ok(GRANTED), ok({})])
    with pytest.raises(type(interruption)):
        driver.run(driver.core.begin_episode())
    assert [request.path for request in driver.sent] == ["/claim_episodes"] * 3 + ["/abort_episodes"]
    assert driver.body(2) == driver.body(1) | {"wait_s": 0, "waited_s": 0}
    assert driver.body(3)["episode_uuids"] == ["e1"]


@pytest.mark.parametrize("reply", [ok(FULL), ok(OFFLINE), no(503, "storage_full"), NoReply("x"), ok({}), ok([])])
def test_an_interruption_is_raised_whatever_is_replied_when_its_claim_is_asked_for(
    reply: ServerReply | NoReply,
) -> None:
    driver = Driver([KeyboardInterrupt(), reply])
    with pytest.raises(KeyboardInterrupt):
        driver.run(driver.core.begin_episode())
    assert len(driver.sent) == 2


# ---- ending ---------------------------------------------------------------------------------------------------


def ended(driver: Driver, episode: str = "e1") -> None:
    driver.run(driver.core.end_episodes([(Task(task_id="t"), episode, WorkflowOutput(reward=1.0))]))


def test_a_report_carries_the_task_in_its_metadata_too() -> None:
    driver = Driver([ok({"success": True})])
    output = WorkflowOutput(reward=[1.0, 0.5], metadata={"a": 1})
    driver.run(driver.core.end_episodes([(Task(task_id="t7"), "e1", output)]))
    (end,) = driver.body(0)["episodes"]
    assert end["task_id"] == "t7"
    assert end["workflow_output"]["metadata"] == {"a": 1, "task_id": "t7"}
    assert end["workflow_output"]["reward"] == [1.0, 0.5]
    assert output.metadata == {"a": 1}


def test_a_task_without_an_id_is_refused_before_anything_is_sent() -> None:
    driver = Driver([])
    with pytest.raises(ValueError, match="task_id"):
        driver.run(driver.core.end_episodes([(Task(), "e1", WorkflowOutput(reward=1.0))]))


def test_an_episode_that_lasted_too_long_is_aborted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver([ok(GRANTED), ok({"success": True})])
    driver.run(driver.core.begin_episode(discard_episode_timeout=60.0))
    driver.now += 121.0
    ended(driver)
    assert driver.sent[-1].path == "/abort_episodes"
    assert "max_episode_time" in caplog.text


def test_an_episode_that_is_in_time_is_ended() -> None:
    driver = Driver([ok(GRANTED), ok({"success": True})])
    driver.run(driver.core.begin_episode(discard_episode_timeout=60.0))
    driver.now += 119.0
    ended(driver)
    assert driver.sent[-1].path == "/end_episodes"


@pytest.mark.parametrize(("done_s", "path"), [(119.0, "/end_episodes"), (121.0, "/abort_episodes")])
def test_an_episode_whose_agent_was_done_in_time_may_wait_for_the_rest_of_its_group(done_s: float, path: str) -> None:
    driver = Driver([ok(GRANTED), ok({"success": True})])
    episode, _ = driver.run(driver.core.begin_episode(discard_episode_timeout=60.0))
    driver.now += done_s
    driver.claimed.finished(episode)
    driver.now += 1000.0
    driver.run(driver.core.end_episodes([(Task(task_id="t7"), episode, WorkflowOutput(reward=1.0))]))
    assert driver.sent[-1].path == path


def test_the_longest_time_of_an_episode_can_be_set() -> None:
    driver = Driver([ok(GRANTED), ok({"success": True})])
    driver.run(driver.core.begin_episode(discard_episode_timeout=60.0, max_episode_time=1000.0))
    driver.now += 900.0
    ended(driver)
    assert driver.sent[-1].path == "/end_episodes"


# ---- the engine -----------------------------------------------------------------------------------------------


def status(phase: str, **more: object) -> ServerReply:
    return ok({"engine_status": phase, "engine_status_detail": "", "global_step": 0, **more})


SAME = ok({"differences": {}})
COMPARED = "/compare_train_config"


def other(**settings: tuple[object, object]) -> ServerReply:
    """The reply of an engine that runs another job, with (its value, ours) for each setting that differs."""
    named = {name.replace("__", "."): {"running": ran, "wanted": ours} for name, (ran, ours) in settings.items()}
    return ok({"differences": named})


@pytest.mark.parametrize("phase", ["ENGINE.ROLLING", "ENGINE.ROLLING_POST"])
def test_an_engine_that_runs_the_same_job_is_joined_without_a_warning(
    phase: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver([status(phase), SAME])
    driver.run(driver.core.auto_sync_train_config_and_start_engine({"bombus": {"model": {"path": "tiny"}}}))
    assert [request.path for request in driver.sent] == ["/get_engine_status", COMPARED]
    assert json.loads(driver.body(1)["yaml_as_string"]) == {"bombus": {"model": {"path": "tiny"}}}
    assert caplog.text == ""


def test_a_program_that_joins_a_run_is_told_where_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    running = {
        "engine_status": "ENGINE.ROLLING",
        "engine_status_detail": "",
        "global_step": 7,
        "pool_episodes": 12,
        "run": 3,
    }
    driver = Driver([ok(running), SAME])
    driver.run(driver.core.auto_sync_train_config_and_start_engine({}))
    assert "continues its run 3 after step 7, and the next batch begins with 12 ended episodes" in caplog.text


def test_what_a_job_has_that_means_nothing_here_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver([ok({"success": True, "ignored": ["ajet.trainer_common.n_gpus_per_node"]})])
    driver.run(driver.core.sync_train_config({}))
    assert "ajet.trainer_common.n_gpus_per_node of the job has no effect: in the cluster file" in caplog.text


def test_an_engine_that_trains_another_model_is_not_joined() -> None:
    differs = other(trainer__lr=(0.1, 0.2), model__path=("tiny", "smollm2"))
    driver = Driver([status("ENGINE.ROLLING"), differs])
    with pytest.raises(OtherModel) as caught:
        driver.run(driver.core.auto_sync_train_config_and_start_engine({}))
    assert str(caught.value) == (
        "The engine at http://hive:10086 keeps running its current job, which differs from yours: model.path is "
        "'tiny', not 'smollm2'; trainer.lr is 0.1, not 0.2. To train yours, stop the engine first, with "
        "client.stop_engine() or `bombus stop`."
    )


def test_another_job_of_the_same_model_is_joined_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    many = other(**{f"trainer__x{n}": (n, -n) for n in range(1, 9)})
    driver = Driver([status("ENGINE.ROLLING"), many])
    driver.run(driver.core.auto_sync_train_config_and_start_engine({}))
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "trainer.x1 is 1, not -1" in warning
    assert "and 2 more" in warning
    assert "`bombus stop`" in warning


def test_a_forced_restart_stops_the_other_job() -> None:
    done = ok({"success": True})
    off, on = status("ENGINE.OFFLINE"), status("ENGINE.ROLLING")
    driver = Driver([done, off, off, done, done, on, SAME])
    driver.run(driver.core.auto_sync_train_config_and_start_engine({}, force_restart=True))
    assert [request.path for request in driver.sent if request.method == "POST"] == [
        "/stop_engine", "/sync_train_config", "/start_engine", COMPARED
    ]  # fmt: skip


@pytest.mark.parametrize("phase", ["ENGINE.BOOTING", "ENGINE.WEIGHT_SYNCING"])
def test_the_client_waits_for_an_engine_that_is_starting_or_syncing(phase: str) -> None:
    driver = Driver([status(phase), status(phase), status("ENGINE.ROLLING"), SAME])
    driver.run(driver.core.auto_sync_train_config_and_start_engine({}))
    assert {request.path for request in driver.sent} == {"/get_engine_status", COMPARED}


def test_an_engine_that_is_offline_is_configured_and_started() -> None:
    done = ok({"success": True})
    driver = Driver([status("ENGINE.OFFLINE"), done, done, status("ENGINE.BOOTING"), status("ENGINE.ROLLING"), SAME])
    driver.run(driver.core.auto_sync_train_config_and_start_engine({"ajet": {"model": {"path": "tiny"}}}))
    assert [request.path for request in driver.sent[:3]] == [
        "/get_engine_status",
        "/sync_train_config",
        "/start_engine",
    ]
    assert json.loads(driver.body(1)["yaml_as_string"]) == {"ajet": {"model": {"path": "tiny"}}}


def test_a_start_that_the_job_is_refused_for_is_not_taken_for_the_start_of_another_client() -> None:
    why = "This experiment has already begun, but the checkpoint of version 2 of run 1 belongs to another job"
    refused = ok({"success": False, "error": why, "code": "bad_config"})
    driver = Driver([status("ENGINE.OFFLINE"), ok({"success": True}), refused])
    with pytest.raises(BadConfig, match=why):
        driver.run(driver.core.auto_sync_train_config_and_start_engine({}))


def test_a_client_is_told_where_the_run_that_it_started_begins(caplog: pytest.LogCaptureFixture) -> None:
    started = ok({"success": True, "run": 2, "begun": "at the checkpoint of step 3 of run 1"})
    driver = Driver([started, status("ENGINE.ROLLING")])
    driver.run(driver.core.start_engine())
    assert "run 2 begins at the checkpoint of step 3 of run 1" in caplog.text


def test_a_client_that_waits_for_a_suspended_run_is_told_once_why_and_how_it_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    booting, why = "ENGINE.BOOTING", "the model could not be loaded 9 times: CUDA out of memory"
    driver = Driver([*[status(booting, suspended=why)] * 2, status(booting, suspended=""), status("ENGINE.ROLLING")])
    driver.run(driver.core.wait_for_status("ENGINE.ROLLING"))
    assert [record.getMessage() for record in caplog.records] == [
        f"the run is suspended: {why}",
        "once the cause is gone, client.resume_engine() or `bombus resume` lets it continue",
    ]


def test_a_client_that_claims_of_a_suspended_run_is_told_and_goes_on_waiting(caplog: pytest.LogCaptureFixture) -> None:
    none = ok({"success": False, "fail_cause": "No available episodes to claim.", "suspended": "a full disk"})
    driver = Driver([none, none, ok(GRANTED)])
    driver.run(driver.core.begin_episode())
    assert caplog.text.count("the run is suspended: a full disk") == 1


def test_resuming_an_engine_that_runs_no_job_is_refused() -> None:
    driver = Driver([ok({"success": False, "failure_reason": "It has no run to resume; start one."})])
    with pytest.raises(WrongPhase, match="no run to resume"):
        driver.run(driver.core.resume_engine())
    assert driver.sent[0].path == "/resume_engine"


def test_a_client_that_comes_second_waits_for_the_engine_and_learns_which_job_it_runs() -> None:
    refused = no(400, "wrong_phase", "ENGINE.BOOTING")
    first = [status("ENGINE.OFFLINE"), refused, status("ENGINE.BOOTING"), status("ENGINE.ROLLING")]
    driver = Driver([*first, other(model__path=("tiny", "smollm2"))])
    with pytest.raises(OtherModel):
        driver.run(driver.core.auto_sync_train_config_and_start_engine({}))


def test_an_engine_that_fails_while_it_boots_raises_with_the_reason() -> None:
    done = ok({"success": True})
    failed = status("ENGINE.OFFLINE", failure="no such model")
    driver = Driver([status("ENGINE.OFFLINE"), done, done, status("ENGINE.BOOTING"), failed])
    with pytest.raises(EngineOffline, match="no such model"):
        driver.run(driver.core.auto_sync_train_config_and_start_engine({}))


def test_a_server_that_does_not_reply_has_a_status_of_its_own() -> None:
    driver = Driver([NoReply("refused")] * 50, retry_s=1.0)
    assert driver.run(driver.core.get_engine_status())[0] == "ENGINE.CANNOT_CONNECT"


# ---- throttling -----------------------------------------------------------------------------------------------


def running(**tasks: str) -> PoolInformation:
    details = {f"e{i}": {"optional_task_id": task, "client_uuid": who} for i, (task, who) in enumerate(tasks.items())}
    return PoolInformation(running_episode_details=details)


def test_a_client_with_its_share_of_tasks_waits_before_it_starts_another() -> None:
    policy = ThrottlePolicy(ratio=0.5, expected_batch_size=4, expected_num_repeat=2, current_task_id="t3")
    full, free = running(t1="c1", t2="c1"), running(t1="c1")
    driver = Driver([ok(full.model_dump()), ok(free.model_dump()), ok(GRANTED)])
    driver.run(driver.core.begin_episode(throttle_policy=policy))
    assert driver.slept == [2.0]
    assert driver.body(-1)["task_id"] == "t3"
    assert driver.sent[0].path.endswith("?client_uuid=c1"), "it finds its own tasks by its id"


def test_a_task_that_is_under_way_may_continue() -> None:
    policy = ThrottlePolicy(ratio=0.5, expected_batch_size=2, current_task_id="t1")
    driver = Driver([ok(running(t1="c1", t2="c1").model_dump()), ok(GRANTED)])
    driver.run(driver.core.begin_episode(throttle_policy=policy))
    assert driver.slept == []


def test_tasks_of_other_clients_do_not_count() -> None:
    policy = ThrottlePolicy(ratio=0.5, expected_batch_size=2, current_task_id="t3")
    driver = Driver([ok(running(t1="c2", t2="c2").model_dump()), ok(GRANTED)])
    driver.run(driver.core.begin_episode(throttle_policy=policy))
    assert driver.slept == []


def using(*calls: int) -> list[ServerReply | NoReply]:
    """Return replies to touches, in each of which an episode has made so many calls; below 0: it is over."""
    return [ok({"used": {"e1": {"calls": made, "completion_tokens": 5 * made}} if made >= 0 else {}}) for made in calls]


def test_what_an_episode_has_used_is_known_when_it_no_longer_grows() -> None:
    driver = Driver(using(0, 1, 2, 2))
    used = driver.run(driver.core.episode_usage("e1"))
    assert (used.calls, used.completion_tokens) == (2, 10)
    assert driver.slept == [0.2] * 3
    assert driver.sent[0].path == "/touch_episodes"


def test_an_episode_without_calls_is_looked_at_for_longer_and_one_that_is_over_has_no_usage() -> None:
    driver = Driver(using(*[0] * 20))
    assert driver.run(driver.core.episode_usage("e1")).calls == 0
    assert sum(driver.slept) == pytest.approx(2.0, abs=0.3)
    driver = Driver(using(1, -1))
    assert driver.run(driver.core.episode_usage("e1")) is None


def test_a_hive_that_does_not_say_what_episodes_have_used_is_older() -> None:
    driver = Driver([ok({"touched": ["e1"], "over": []})])
    with pytest.raises(ServerFault, match="The hive is older than this client"):
        driver.run(driver.core.watch_episodes(["e1"]))


# ---- what was learnt -------------------------------------------------------------------------------------------

LEARNT = {
    "episode_uuid": "e1",
    "task_id": "t",
    "reward": 1.0,
    "calls": 1,
    "sequences": [{"tokens": "AQAAAAIAAAA=", "logprobs": "AAAAAAAAgL8=", "calls": "/////wAAAAA=", "mask": "AAE="}],
    "sampler": "tinker://m/sampler_weights/one",
    "call_rewards": None,
}  # tokens 1 and 2, of which the second was sampled, with the logprob -1
READ = {"episodes": [LEARNT], "left": [], "gone": [], "lost": {}}
ENDED = (Task(task_id="t"), "e1", WorkflowOutput(reward=1.0))


def test_what_this_client_has_begun_with_a_sampler_and_ended_is_taken_once() -> None:
    driver = Driver([ok(GRANTED), ok({"success": True}), ok(READ), ok({"success": True})])
    assert driver.run(driver.core.take_datums()) == [], "nothing has ended"
    driver.run(driver.core.begin_episode(sampler="base"))
    assert driver.body(0)["sampler"] == "base"
    assert driver.run(driver.core.take_datums()) == []
    driver.run(driver.core.end_episodes([ENDED]))
    (datum,) = driver.run(driver.core.take_datums())
    assert (datum.episode, datum.tokens, datum.target_tokens, datum.logprobs) == ("e1", [1], [2], [-1.0])
    assert [request.path for request in driver.sent[2:]] == ["/read_ended_episodes", "/take_ended_episodes"]
    assert driver.body(3) == {"client_uuid": "c1", "episode_uuids": ["e1"]}
    assert driver.run(driver.core.take_datums()) == []
    assert len(driver.sent) == 4


def test_of_two_calls_at_once_each_episode_is_taken_by_one_and_after_a_failure_by_the_next() -> None:
    driver = Driver([ok(GRANTED), ok({"success": True}), None, ok(READ), ok({"success": True})])
    driver.run(driver.core.begin_episode(sampler="base"))
    driver.run(driver.core.end_episodes([ENDED]))
    first = driver.core.take_datums()
    first.send(None)
    assert driver.run(driver.core.take_datums()) == [], "the first call has it"
    first.close()
    assert len(driver.run(driver.core.take_datums())) == 1
    assert driver.run(driver.core.take_datums()) == []


def test_episodes_of_a_job_and_those_without_a_sampler_are_not_asked_for() -> None:
    driver = Driver([ok(GRANTED), ok({"success": True})])
    driver.run(driver.core.begin_episode())
    assert "sampler" not in driver.body(0), "hives of older versions do not know it"
    driver.run(driver.core.end_episodes([ENDED]))
    assert driver.run(driver.core.take_datums()) == []


def test_data_that_were_read_are_returned_even_if_the_server_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver([ok(READ), *[NoReply("gone")] * 20], retry_s=1.0)
    assert len(driver.run(driver.core.take_datums(["e1"]))) == 1
    assert "stay on the server until they expire" in caplog.text


def test_those_that_are_left_are_read_next_and_those_that_give_none_are_named(caplog: pytest.LogCaptureFixture) -> None:
    left = READ | {"left": ["e3"], "gone": ["e2"]}
    rest = {"episodes": [], "left": [], "gone": [], "lost": {"e3": "call c is not there"}}
    driver = Driver([ok(left), ok(rest), ok({"success": True})])
    assert [datum.episode for datum in driver.run(driver.core.take_datums(["e1", "e2", "e3"]))] == ["e1"]
    assert driver.body(1)["episode_uuids"] == ["e3"]
    assert driver.body(2)["episode_uuids"] == ["e1", "e3"], "nobody will ever read what is lost"
    assert "the data of episode e2 is not available: it is gone" in caplog.text
    assert "the data of episode e3 is not available: call c is not there" in caplog.text


@pytest.mark.parametrize("reply", [{}, READ | {"episodes": [{}]}, READ | {"episodes": [], "left": ["e1"]}])
def test_a_reply_without_ended_episodes_is_a_fault_of_the_server(reply: dict[str, Any]) -> None:
    driver = Driver([ok(reply)])
    with pytest.raises(ServerFault):
        driver.run(driver.core.take_datums(["e1"]))


def test_an_estimator_that_cannot_be_used_is_refused_before_anything_is_read() -> None:
    driver = Driver([])
    with pytest.raises(ValueError, match="whole batch"):
        driver.run(driver.core.take_datums(["e1"], estimator="reinforce_plus_plus"))
    with pytest.raises(ValueError, match="'gae' is not a valid Estimator"):
        driver.run(driver.core.take_datums(["e1"], estimator="gae"))
