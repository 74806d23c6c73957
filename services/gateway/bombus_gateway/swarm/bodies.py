"""The bodies of the swarm API's requests.

The swarm contract's bodies ignore unknown fields, so that newer clients can send them; our own bodies refuse unknown
fields by name.
"""

import json
import sys
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from bombus.errors import Code, Refused
from bombus.hive.episodes import reward_forms_of
from bombus.hive.failures import FailureKind
from bombus.hive.inbox import EpisodeResult
from bombus.sdk.reports import read_report
from bombus.sdk.types import ThrottlePolicy
from bombus_gateway import limits

Identifier = Annotated[str, Field(min_length=1, max_length=limits.ID_CHARACTERS)]
TaskId = Annotated[str, Field(max_length=limits.TASK_CHARACTERS)]
DataSet = Annotated[str, Field(max_length=limits.DATA_SET_CHARACTERS)]
Failure = Annotated[FailureKind | None, Field(strict=False)]  # by name, even in a body decoded by `json`
# Any value: `read_report` interprets it.
Verdict = Annotated[Any, WithJsonSchema({"type": ["boolean", "null"]})]
Metadata = Annotated[Any, WithJsonSchema({"type": "object"})]
Metrics = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"anyOf": [{"type": "number"}, {"type": "array", "items": {"type": "number"}}]},
        }
    ),
]
EpisodeKindBody = Literal["train", "eval"]


class ContractBody(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)


class OwnBody(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


# ---- the swarm contract ------------------------------------------------------------------------------------


class SyncTrainConfig(ContractBody):
    yaml_as_string: str


class ThrottlePolicyBody(ContractBody):
    """Limits one client's share of a batch. The gateway enforces this limit itself, because its views do not show
    clients' ids."""

    ratio: Annotated[float, Field(gt=0)] = 1.5
    expected_batch_size: Annotated[int, Field(ge=0)] = 0
    expected_num_repeat: Annotated[int, Field(ge=1)] = 1
    current_task_id: TaskId | None = None


class ClaimEpisode(ContractBody):
    client_uuid: Identifier
    episode_type: EpisodeKindBody = "train"
    discard_episode_timeout: float | None = None  # if None, the server derives it from how long steps take
    throttle_policy: ThrottlePolicyBody | None = None


class WorkflowOutputBody(ContractBody):
    """`reward` is one number, a list with one number for each completed call in order, or an object that maps each
    call's id (the answer's `id`, without `chatcmpl-`) to one number. Auxiliary calls that the job masks get no reward.

    A metric may be a list, in which case its mean counts. Any other value that the log cannot store is left out, with a
    warning in the gateway's log.
    """

    reward: Annotated[
        float
        | Annotated[list[float], Field(max_length=limits.REWARDS)]
        | Annotated[dict[str, float], Field(max_length=limits.REWARDS)]
        | None,
        BeforeValidator(reward_forms_of),
    ] = None
    is_success: Verdict = None
    metadata: Metadata = {}
    log_metrics: Metrics = {}


class NamedEpisode(ContractBody):
    """An episode, named by the `episode_uuid` that its claim returned to this client."""

    client_uuid: Identifier
    episode_uuid: Identifier


class EndEpisode(NamedEpisode):
    task_id: TaskId = ""
    workflow_output: WorkflowOutputBody
    declare_client_active: bool = True


class AgreeSyncWeight(ContractBody):
    client_uuid: Identifier


class PushVerboseLog(ContractBody):
    tag: str = ""
    message: str = ""


class ReplayLatestCall(ContractBody):
    """The episode whose latest call is requested. An empty id means any of the engine's episodes, and requires the
    admin key."""

    episode_uuid: Annotated[str, Field(max_length=128)] = ""


# ---- our own ------------------------------------------------------------------------------------------------


class StopEpisode(OwnBody):
    """An episode, by its name in the log, without the secret of its claim."""

    episode: Identifier


class CompareTrainConfig(OwnBody):
    yaml_as_string: str


class OwnClaim(OwnBody):
    client_uuid: Identifier
    claim_id: Identifier
    count: Annotated[int, Field(ge=1, le=limits.EPISODES)] = 1
    episode_type: EpisodeKindBody = "train"
    discard_episode_timeout: float | None = None  # if None, the server derives it from how long steps take
    wait_s: Annotated[float, Field(ge=0, le=limits.WAIT_S)] = 20.0
    # How long this claim_id has waited so far. The claim that has waited longest is served first.
    waited_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    task_id: TaskId = ""
    touches: bool = False


class ClaimEpisodes(OwnClaim):
    """Claims `count` episodes, all or none. Repeating a claim under its `claim_id` returns the same episodes.

    In a run of training operations, `sampler` is the path of the saved model that the episodes' calls sample from, or
    `base`. With `touches`, the client sends /touch_client every few seconds while it holds any episode. It is then
    considered dead after a silence of `client_silence_s`, a field of the reply.
    """

    sampler: Annotated[str, Field(max_length=limits.SAMPLER_CHARACTERS)] = ""


class ClaimMultiModelEpisodes(OwnClaim):
    """Claims `count` multi-model episodes, all or none. Each consists of one episode on each of these engines.

    For `touches`, see `ClaimEpisodes`.
    """

    engines: Annotated[list[Identifier], Field(min_length=2, max_length=limits.MULTI_MODEL_ENGINES)]


class OwnWorkflowOutputBody(OwnBody, WorkflowOutputBody):
    model_config = OwnBody.model_config


class EpisodeEndBody(OwnBody):
    """The result of an episode. Evaluations are counted by `data_set`, the name of the task's data set.

    `failure` is the budget that the episode used up, if any: `time`, `tokens` or `turns`.
    """

    episode_uuid: Identifier
    task_id: TaskId = ""
    workflow_output: OwnWorkflowOutputBody
    data_set: DataSet = ""
    failure: Failure = None


class EndEpisodes(OwnBody):
    """Ends all of these episodes, or none."""

    client_uuid: Identifier
    episodes: Annotated[list[EpisodeEndBody], Field(min_length=1, max_length=limits.EPISODES)]


class EndMultiModelEpisodes(OwnBody):
    """Ends all of these multi-model episodes, or none. Each is given as the list of its episodes, in any order."""

    client_uuid: Identifier
    multi_model_episodes: Annotated[
        list[Annotated[list[EpisodeEndBody], Field(min_length=2, max_length=limits.MULTI_MODEL_ENGINES)]],
        Field(min_length=1, max_length=limits.EPISODES),
    ]


class NamedEpisodes(OwnBody):
    """Episodes, named by the ids that their claims returned to this client."""

    client_uuid: Identifier
    episode_uuids: Annotated[list[Identifier], Field(min_length=1, max_length=limits.EPISODES)]


class AbortEpisodes(NamedEpisodes):
    """Aborts episodes. `failure` is the kind of failure, if any. If there is no `failure`, `infra` says that no model
    is to blame, so the episodes do not count in their groups' statistics."""

    infra: bool = False
    detail: Annotated[str, Field(max_length=1000)] = ""
    failure: Failure = None


class TouchClient(OwnBody):
    client_uuid: Identifier


# ---- reading them --------------------------------------------------------------------------------------------

B = TypeVar("B", bound=BaseModel)


def parse(model: type[B], body: bytes) -> B:
    """Parse a body as `model`. Raises `Refused` MALFORMED, UNKNOWN_FIELD or BAD_REWARD, naming the fields."""
    try:
        return _validated(model, body or b"{}")
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
    code = Code.MALFORMED
    if any("reward" in problem["loc"] for problem in problems):
        code = Code.BAD_REWARD
    elif any(problem["type"] == "extra_forbidden" for problem in problems):
        code = Code.UNKNOWN_FIELD
    places = [f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}" for problem in problems[:5]]
    raise Refused(code, "; ".join(places))


def _validated(model: type[B], body: bytes) -> B:
    """Validate a body as `model`. Raises `ValidationError` if the body is invalid.

    A report's metadata may contain lone surrogates, deep nesting and integers with thousands of digits, which pydantic
    cannot read. Such a body is decoded by `json` first.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        try:
            read = json.loads(body, parse_int=_integer) if error.errors()[0]["type"] == "json_invalid" else None
        except (ValueError, RecursionError):
            read = None
        if read is None:
            raise
    return model.model_validate(read)


def _integer(digits: str) -> int | float:
    """Parse an integer. If it has more digits than Python can parse, return infinity."""
    return int(digits) if len(digits) <= sys.int_info.default_max_str_digits else float(digits)


def throttle_policy(wanted: ThrottlePolicyBody) -> ThrottlePolicy | None:
    """Return a client's policy, or None if it gives no task or no batch size."""
    if not wanted.current_task_id or not wanted.expected_batch_size:
        return None
    return ThrottlePolicy(
        ratio=wanted.ratio,
        expected_batch_size=wanted.expected_batch_size,
        expected_num_repeat=wanted.expected_num_repeat,
        current_task_id=wanted.current_task_id,
    )


def result_of_end(episode: str, end: EpisodeEndBody) -> EpisodeResult:
    """Return the result of an episode, including what only our own clients report."""
    result = result_of(episode, end.task_id, end.workflow_output)
    return msgspec.structs.replace(result, data_set=end.data_set, failure=end.failure)


def result_of(episode: str, task: str, output: WorkflowOutputBody) -> EpisodeResult:
    """Return the result of an episode in the coordinator's format."""
    reward = output.reward
    report = read_report(output.metadata, output.log_metrics, output.is_success)
    return EpisodeResult(
        episode=episode,
        task=task,
        reward=reward if not isinstance(reward, list | dict) else None,
        call_rewards=tuple(reward) if isinstance(reward, list) else None,
        rewards_by_call=reward if isinstance(reward, dict) else None,
        is_success=report.is_success,
        metadata=report.metadata,
        log_metrics=report.log_metrics,
    )
