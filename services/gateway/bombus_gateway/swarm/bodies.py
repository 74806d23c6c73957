"""The bodies of the swarm API's requests.

Those of the swarm contract ignore unknown fields, for newer clients; our own refuse them by name.
"""

import json
import sys
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from bombus.errors import Code, Refused
from bombus.hive.episodes import reward_forms_of
from bombus.hive.inbox import EpisodeResult
from bombus.sdk.reports import read_report
from bombus.sdk.types import ThrottlePolicy
from bombus_gateway import limits

Identifier = Annotated[str, Field(min_length=1, max_length=limits.ID_CHARACTERS)]
TaskId = Annotated[str, Field(max_length=limits.TASK_CHARACTERS)]
DataSet = Annotated[str, Field(max_length=limits.DATA_SET_CHARACTERS)]
# What `read_report` makes sense of, whatever it is.
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
    """Limits one client's share of a batch. The gateway applies it, because its views do not tell clients apart."""

    ratio: Annotated[float, Field(gt=0)] = 1.5
    expected_batch_size: Annotated[int, Field(ge=0)] = 0
    expected_num_repeat: Annotated[int, Field(ge=1)] = 1
    current_task_id: TaskId | None = None


class ClaimEpisode(ContractBody):
    client_uuid: Identifier
    episode_type: EpisodeKindBody = "train"
    discard_episode_timeout: float | None = None  # None: the server knows how long steps take
    throttle_policy: ThrottlePolicyBody | None = None


class WorkflowOutputBody(ContractBody):
    """`reward` is one number, or one for each completed call in order, without auxiliary calls that the job masks, or
    by the ids of these calls (the answer's `id`, without `chatcmpl-`).

    A metric may be a list: its mean counts. What the log cannot have of the rest is left out, with a warning in the
    gateway's log.
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
    """An episode, by the `episode_uuid` that its claim returned to this client."""

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
    """The episode whose latest call is wanted; empty: any of the engine's, for whoever has the admin key."""

    episode_uuid: Annotated[str, Field(max_length=128)] = ""


# ---- our own ------------------------------------------------------------------------------------------------


class CompareTrainConfig(OwnBody):
    yaml_as_string: str


class OwnClaim(OwnBody):
    client_uuid: Identifier
    claim_id: Identifier
    count: Annotated[int, Field(ge=1, le=limits.EPISODES)] = 1
    episode_type: EpisodeKindBody = "train"
    discard_episode_timeout: float | None = None  # None: the server knows how long steps take
    wait_s: Annotated[float, Field(ge=0, le=limits.WAIT_S)] = 20.0
    # So far, under this claim_id: the longest wait is served first.
    waited_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    task_id: TaskId = ""
    touches: bool = False


class ClaimEpisodes(OwnClaim):
    """Claims `count` episodes, all or none. A claim that is repeated under its `claim_id` gets the same episodes.

    In a run of training operations `sampler` is the path of the saved model that their calls sample from, or `base`.
    With `touches` the client sends /touch_client every few seconds while it holds any, and is taken for dead when it is
    silent for as long as the reply says.
    """

    sampler: Annotated[str, Field(max_length=limits.SAMPLER_CHARACTERS)] = ""


class ClaimMultiModelEpisodes(OwnClaim):
    """Claims `count` multi-model episodes, all or none: each is one episode on every one of these engines.

    For `touches` see `ClaimEpisodes`.
    """

    engines: Annotated[list[Identifier], Field(min_length=2, max_length=limits.MULTI_MODEL_ENGINES)]


class OwnWorkflowOutputBody(OwnBody, WorkflowOutputBody):
    model_config = OwnBody.model_config


class EpisodeEndBody(OwnBody):
    """How an episode went. Evaluation is counted by `data_set`, the name of the set that the task is of."""

    episode_uuid: Identifier
    task_id: TaskId = ""
    workflow_output: OwnWorkflowOutputBody
    data_set: DataSet = ""


class EndEpisodes(OwnBody):
    """Ends all of these episodes, or none."""

    client_uuid: Identifier
    episodes: Annotated[list[EpisodeEndBody], Field(min_length=1, max_length=limits.EPISODES)]


class EndMultiModelEpisodes(OwnBody):
    """Ends all of these multi-model episodes, or none. Each is the list of its episodes, in any order."""

    client_uuid: Identifier
    multi_model_episodes: Annotated[
        list[Annotated[list[EpisodeEndBody], Field(min_length=2, max_length=limits.MULTI_MODEL_ENGINES)]],
        Field(min_length=1, max_length=limits.EPISODES),
    ]


class NamedEpisodes(OwnBody):
    """Episodes, by the ids that their claims returned to this client."""

    client_uuid: Identifier
    episode_uuids: Annotated[list[Identifier], Field(min_length=1, max_length=limits.EPISODES)]


class AbortEpisodes(NamedEpisodes):
    """Aborts episodes. `infra`: no model is to blame, so they do not count in the statistics of their groups."""

    infra: bool = False
    detail: Annotated[str, Field(max_length=1000)] = ""


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
    """Raises `ValidationError`.

    Halves of characters, deep nesting and integers of thousands of digits are what pydantic cannot read; a report may
    have them in its metadata.
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
    """Parse an integer. One that has more digits than Python parses is infinite."""
    return int(digits) if len(digits) <= sys.int_info.default_max_str_digits else float(digits)


def throttle_policy(wanted: ThrottlePolicyBody) -> ThrottlePolicy | None:
    """Return a client's policy; None where it names no task or no size of a batch."""
    if not wanted.current_task_id or not wanted.expected_batch_size:
        return None
    return ThrottlePolicy(
        ratio=wanted.ratio,
        expected_batch_size=wanted.expected_batch_size,
        expected_num_repeat=wanted.expected_num_repeat,
        current_task_id=wanted.current_task_id,
    )


def result_of(episode: str, task: str, output: WorkflowOutputBody, data_set: str = "") -> EpisodeResult:
    """Return the end of an episode as the coordinator takes it."""
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
        data_set=data_set,
    )
