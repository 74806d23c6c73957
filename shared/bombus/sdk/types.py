"""The types used by a client: tasks, outcomes, and the credentials of an episode."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SkipValidation

from bombus.hive.episodes import reward_forms_of, without_secret
from bombus.hive.failures import FailureKind

EpisodeKind = Literal["train", "eval"]


class Task(BaseModel):
    """One thing for an agent to do. Episodes with the same `task_id` are compared with each other.

    Evaluation results are counted by `data_set`, the name of the set that the task belongs to. Anything that has no
    field of its own goes into `metadata`.
    """

    model_config = ConfigDict(extra="forbid")

    main_query: str = ""
    init_messages: list[dict[str, Any]] = []
    task_id: str = ""
    env_type: str = ""
    metadata: dict[str, Any] = Field(default_factory=dict)
    data_set: str = ""


class WorkflowOutput(BaseModel):
    """The outcome of an episode. `reward` is one number, or one for each completed model call, in order or by call id.

    A call's id is the id of the answer to the call, without `chatcmpl-`. A harness's auxiliary calls have no reward
    unless the job trains on them. `failure` is the budget that the episode used up, if any; an episode with any other
    failure is aborted and has no reward. The other fields may contain anything: values that JSON lacks, such as NumPy
    numbers, are converted when the episode is ended, and values that cannot be converted are left out with a warning.
    """

    model_config = ConfigDict(extra="forbid")

    reward: Annotated[float | list[float] | dict[str, float] | None, BeforeValidator(reward_forms_of)] = None
    is_success: SkipValidation[bool | None] = None
    metadata: SkipValidation[dict[str, Any]] = Field(default_factory=dict)
    log_metrics: SkipValidation[dict[str, float | list[float]]] = Field(default_factory=dict)
    failure: FailureKind | None = None


class Credentials(BaseModel):
    """What an agent needs to call the model in this episode, and what the agent's client needs to end the episode.

    `episode_uuid` contains the secret of the claim, with which the episode is ended, aborted, touched and replayed.
    Agents do not need it. `episode` is the episode's name on the log, and safe to show. `policy_version` is the version
    at the time of the claim, or None if the server did not give it.
    """

    model_config = ConfigDict(frozen=True)

    base_url: str
    api_key: str = Field(repr=False)
    model: str
    episode_uuid: str = Field(repr=False)
    policy_version: int | None = None

    @property
    def episode(self) -> str:
        return without_secret(self.episode_uuid)


class MultiModelEpisode(BaseModel):
    """One episode on each of several engines, with one outcome: `credentials` contains each role's credentials.

    `engines` maps each role to the engine whose model plays it.
    """

    model_config = ConfigDict(frozen=True)

    engines: dict[str, str]
    credentials: dict[str, Credentials]

    def __getitem__(self, role: str) -> Credentials:
        return self.credentials[role]

    @property
    def episode_uuids(self) -> list[str]:
        return [one.episode_uuid for one in self.credentials.values()]

    @property
    def episode(self) -> str:
        """Return the names of its episodes on the log, which are safe to show."""
        return " + ".join(one.episode for one in self.credentials.values())


class EpisodeUsage(BaseModel):
    """The usage of an episode's model calls so far. Tokens are summed over all calls."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class ThrottlePolicy(BaseModel):
    """Limits one client's share of a batch.

    The client starts no new task while `ratio` x `expected_batch_size` of its own tasks are running or done.
    """

    ratio: float = Field(default=1.5, gt=0)
    expected_batch_size: int = Field(ge=1)
    expected_num_repeat: int = Field(default=1, ge=1)
    current_task_id: str = Field(min_length=1)


class PoolInformation(BaseModel):
    """The progress of the next batch."""

    model_config = ConfigDict(extra="ignore")

    sample_collection_method: str = ""
    completed_episodes: int = 0
    completed_episode_target: int = 0
    completed_tasks: int = 0
    completed_task_target: int = 0
    completed_non_dummy_tasks: int = 0
    completed_non_dummy_task_target: int = 0
    task_expected_num_repeat: int = 0
    completed_tasks_details: dict[str, list[str]] = {}
    completed_tasks_rewards: dict[str, list[float]] = {}
    completed_tasks_client_uuids: dict[str, list[str]] = {}
    running_episode_details: dict[str, dict[str, str]] | None = None
    engine_status: str | None = None
    global_step: int | None = None
    booting_start_time: float | None = None
