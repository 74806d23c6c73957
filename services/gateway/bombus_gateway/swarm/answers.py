"""The answers of the swarm API, for the OpenAPI document. The routes themselves build plain JSON."""

from typing import Any, Literal

from pydantic import BaseModel

from bombus.errors import STATUS, Code
from bombus.hive.events import Method
from bombus.hive.state import Phase
from bombus_gateway.schemas import answered, object_of, one_of


class SuccessAnswer(BaseModel):
    success: Literal[True]


class SwarmErrorAnswer(BaseModel):
    """A refusal: a stable code, and a sentence that says what to do next."""

    detail: str
    code: Code


class EngineStatusAnswer(BaseModel):
    """`global_step` counts optimizer steps. `failure` says why the last run ended, and `suspended` why this run is
    waiting.

    Calls are answered while `serving_replicas` is positive. `pool_episodes` counts the episodes that have ended but are
    not in a batch yet.
    """

    engine_status: Phase
    engine_status_detail: str
    global_step: int
    policy_version: int
    run: int
    failure: str
    suspended: str
    model: str
    serving_replicas: int
    pool_episodes: int


class ConfiguredAnswer(SuccessAnswer):
    """`ignored` lists the keys of the job that have no effect here."""

    config_digest: str
    ignored: list[str]


class SettingDifference(BaseModel):
    running: Any
    wanted: Any


class DifferencesAnswer(BaseModel):
    """The settings that differ, as `group.field`."""

    differences: dict[str, SettingDifference]


class StartedAnswer(SuccessAnswer):
    """`begun` names the checkpoint from which the run begins, or says why it begins without one. It is "" if there was
    no checkpoint."""

    pid: int
    run: int
    begun: str


class NotStartedAnswer(BaseModel):
    success: Literal[False]
    error: str
    code: Code


class CommandAnswer(SuccessAnswer):
    failure_reason: Literal[""]


class FailedCommandAnswer(BaseModel):
    success: Literal[False]
    failure_reason: str
    code: Code


class EpisodeAccess(BaseModel):
    """An episode's id, which only its client may know, and the URL and key for its agent."""

    episode_uuid: str
    openai_base_url: str
    openai_api_key: str


class ClaimTerms(BaseModel):
    """The terms of a claim. Times are in seconds since the epoch."""

    discard_at: float
    discard_episode_timeout: float
    key_expires_at: float
    policy_version: int
    model: str


class ClaimedEpisodeAnswer(EpisodeAccess, ClaimTerms):
    success: Literal[True]
    client_uuid: str
    fail_cause: Literal[""]


class ClaimFailure(BaseModel):
    success: Literal[False]
    client_uuid: str
    fail_cause: str
    code: Code
    engine_status: Phase
    suspended: str


class NoEpisodeAnswer(ClaimFailure):
    """A claim that was not granted. The episode fields are empty."""

    episode_uuid: Literal[""]
    openai_base_url: Literal[""]
    openai_api_key: Literal[""]


class ClaimedEpisodesAnswer(ClaimTerms):
    """A client that sends heartbeats is considered dead after `client_silence_s` seconds of silence."""

    success: Literal[True]
    client_uuid: str
    claim_id: str
    fail_cause: Literal[""]
    episodes: list[EpisodeAccess]
    client_silence_s: float


class NoEpisodesAnswer(ClaimFailure):
    claim_id: str
    episodes: list[EpisodeAccess]


class MultiModelEngineAnswer(BaseModel):
    policy_version: int
    model: str


class ClaimedMultiModelEpisodesAnswer(BaseModel):
    """Each multi-model episode maps its engines to their episodes. Times are in seconds since the epoch.

    `client_silence_s` has the same meaning as in `ClaimedEpisodesAnswer`, and is the shortest of these engines' values.
    """

    success: Literal[True]
    client_uuid: str
    claim_id: str
    fail_cause: Literal[""]
    multi_model_episodes: list[dict[str, EpisodeAccess]]
    engines: dict[str, MultiModelEngineAnswer]
    discard_at: float
    discard_episode_timeout: float
    client_silence_s: float
    key_expires_at: float


class NoMultiModelEpisodesAnswer(ClaimFailure):
    """`engine_status` and `suspended` describe one of the engines that the claim waits for."""

    claim_id: str
    multi_model_episodes: list[dict[str, EpisodeAccess]]


class CanContinueAnswer(BaseModel):
    can_continue: bool


class UsedAnswer(BaseModel):
    """The usage of an episode's recorded calls so far."""

    calls: int
    prompt_tokens: int
    completion_tokens: int


class TouchedAnswer(BaseModel):
    """`touched` lists those of the named episodes that the client has open, and `over` lists all others. `used` is the
    usage of the touched ones."""

    touched: list[str]
    over: list[str]
    used: dict[str, UsedAnswer]


class LearntSequenceAnswer(BaseModel):
    """A sequence, up to the last token that is to be trained on. The arrays are base64: int32, float32, int32 and
    bytes."""

    tokens: str
    logprobs: str
    calls: str
    mask: str


class EndedEpisodeAnswer(BaseModel):
    episode_uuid: str
    task_id: str
    reward: float
    calls: int
    sequences: list[LearntSequenceAnswer]
    sampler: str
    call_rewards: list[float] | None


class EndedEpisodesAnswer(BaseModel):
    """Ended episodes. Those in `left` did not fit into the answer, so ask for them again. Those in `gone` were already
    taken, aborted or dropped. Those in `lost` are no longer complete on the log, for the given reason."""

    episodes: list[EndedEpisodeAnswer]
    left: list[str]
    gone: list[str]
    lost: dict[str, str]


class BufferedEpisode(BaseModel):
    """An open episode, without its id, its client's id and its key."""

    episode_uuid: str
    episode_status: Literal["claimed"]
    episode_type: Literal["train", "eval"]
    openai_base_url: str
    openai_api_key: Literal[""]
    client_uuid: Literal[""]
    zmq_listen_result_addr: Literal[""]
    latest_activity_timestamp: float
    discard_episode_timeout: float
    llm_call_count: int
    debug_log: list[str]
    optional_task_id: str


class BufferAnswer(BaseModel):
    buffer: list[BufferedEpisode]


class RunningEpisode(BaseModel):
    """An open episode, with its figures as text for clients of the swarm contract to print."""

    episode_status: Literal["claimed"]
    time_since_last_activity: str
    discard_episode_timeout: str
    llm_call_count: str
    client_uuid: str
    optional_task_id: str


class PoolAnswer(BaseModel):
    """The progress of the next batch. Episodes, and clients other than the caller, are numbered."""

    sample_collection_method: Method
    completed_episodes: int
    completed_episode_target: int
    completed_tasks: int
    completed_task_target: int
    completed_non_dummy_tasks: int
    completed_non_dummy_task_target: int
    task_expected_num_repeat: int
    completed_tasks_details: dict[str, list[str]]
    completed_tasks_rewards: dict[str, list[float]]
    completed_tasks_client_uuids: dict[str, list[str]]
    running_episode_details: dict[str, RunningEpisode] | None
    engine_status: Phase
    global_step: int
    booting_start_time: float | None


class ReplayedRequest(BaseModel):
    model: str
    messages: list[dict[str, Any]]
    temperature: float
    max_tokens: int
    n: int
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None


class ReplayedChoice(BaseModel):
    index: int
    message: dict[str, Any]
    finish_reason: str


class ReplayedUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ReplayedCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ReplayedChoice]
    usage: ReplayedUsage


class ReplayedCallAnswer(BaseModel):
    """A recorded call with its earlier turns, in the format of OpenAI's chat completions."""

    input: ReplayedRequest
    output: ReplayedCompletion


class ExperimentFolderAnswer(BaseModel):
    server_experiment_dir: str | None


class LoggedAnswer(BaseModel):
    """`success` is false for a line that was dropped because too many were sent in one second."""

    success: bool


_EVENT = object_of(
    "event",
    "id",
    event=one_of("begin", "position"),
    id=str,
    data={"type": "string", "contentMediaType": "application/json"},
)  # an event of the log has no name, and its position as `id`
EVENTS = {"description": "Server-sent events, without end", "content": {"text/event-stream": {"itemSchema": _EVENT}}}
RECORD = {"description": "The record of a call, in MessagePack", "content": {"application/octet-stream": {}}}
# The answer of each path: its type, or how other bytes are described, or None if every request is refused.
ANSWERS: dict[str, Any] = {
    "/get_engine_status": EngineStatusAnswer,
    "/sync_train_config": ConfiguredAnswer,
    "/compare_train_config": DifferencesAnswer,
    "/start_engine": StartedAnswer | NotStartedAnswer,
    "/stop_engine": CommandAnswer | FailedCommandAnswer,
    "/resume_engine": CommandAnswer | FailedCommandAnswer,
    "/stop_episode": SuccessAnswer,
    "/claim_episode": ClaimedEpisodeAnswer | NoEpisodeAnswer,
    "/end_episode": SuccessAnswer,
    "/abort_episode": SuccessAnswer,
    "/can_continue_episode": CanContinueAnswer,
    "/get_episode_buffer": BufferAnswer,
    "/get_current_batch_rollout_pool_information": PoolAnswer,
    "/replay_latest_llm_call": ReplayedCallAnswer,
    "/agree_sync_weight": CommandAnswer | FailedCommandAnswer,
    "/get_server_experiment_dir": ExperimentFolderAnswer,
    "/sync_train_code": None,
    "/push_verbose_log": LoggedAnswer,
    "/claim_episodes": ClaimedEpisodesAnswer | NoEpisodesAnswer,
    "/end_episodes": SuccessAnswer,
    "/abort_episodes": SuccessAnswer,
    "/touch_episodes": TouchedAnswer,
    "/touch_client": SuccessAnswer,
    "/read_ended_episodes": EndedEpisodesAnswer,
    "/take_ended_episodes": SuccessAnswer,
    "/events": EVENTS,
    "/call_record": RECORD,
    "/claim_multi_model_episodes": ClaimedMultiModelEpisodesAnswer | NoMultiModelEpisodesAnswer,
    "/end_multi_model_episodes": SuccessAnswer,
    "/abort_multi_model_episodes": SuccessAnswer,
    "/touch_multi_model_episodes": TouchedAnswer,
}

# The refusals of all routes, by status. 500, for bugs, is left out. Only the first refusal names the model, and the
# others refer to its schema, because FastAPI builds a validator for each model that is named, which takes a while.
_FIRST, *_OTHERS = sorted({*STATUS.values()} - {500})
REFUSALS: dict[int | str, dict[str, Any]] = {
    _FIRST: {"description": "A refusal", "model": SwarmErrorAnswer},
    **dict.fromkeys(_OTHERS, answered("A refusal", SwarmErrorAnswer.__name__)),
}
