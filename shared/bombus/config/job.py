"""The configuration of a run: what an engine trains, and how. It is validated when it is created."""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from bombus.config.algorithms import Overlong
from bombus.config.groups import ConfigGroup, Float, Tree, allowed, bad_config, nearest, shown
from bombus.config.template_variables import VARIABLES_MAX, problem_of
from bombus.config.trainer import TrainerConfig
from bombus.hive.checkpoints import UNNAMED
from bombus.hive.events import Collection, Method
from bombus.hive.inbox import Configure
from bombus.hive.records import TEMPERATURE_MIN, digest

SHORT_METHOD_PREFIX = "rollout_until_"
METHODS = frozenset(method.value for method in Method)
IGNORED_MAX = 200  # the most keys without effect that a job records
LIST_MAX = 64
PARSED_MAX = 64  # the most jobs from the log that a process keeps in parsed form
NO_CHAT_TEMPLATE = "none"  # the value of model.chat_template that means no template
MAPPINGS = ("model.chat_template_kwargs",)  # the fields that accept a mapping of scalars


def _method(value: object) -> object:
    """Expand a short name: `enough_tasks` and `finish_enough_tasks` mean `rollout_until_finish_enough_tasks`."""
    if isinstance(value, str):
        for name in (value, SHORT_METHOD_PREFIX + value, f"{SHORT_METHOD_PREFIX}finish_{value}"):
            if name in METHODS:
                return name
    return value


CollectionMethod = Annotated[Method, BeforeValidator(_method)]


class ModelConfig(ConfigGroup):
    """The model of a run. `path` is `tiny`, `smollm2`, a folder, or a name on the hub. `tokenizer` has the same form,
    and is needed only if the model's folder has none.

    If `path` is the folder of a LoRA run (an export, another peft adapter, a version that a trainer has published, or
    the run's folder of versions), the model is the run's base with the adapter merged into it, in the base's precision
    unless `dtype` is `float32`.

    `seed` is the seed of fresh weights and of sampling. `chat_template` replaces the model's own template. It is the
    text of a template, or a file on the trainer's machine; `none` is for jobs that use only plain completions.

    `chat_template_kwargs` are variables for the template, such as `enable_thinking`. Requests may add or override
    variables if `rollout.allow_chat_template_kwargs` is set. `tools` is for models whose template does not render
    tools: `hermes` describes them in the text of messages.
    """

    path: str = Field(default="Qwen/Qwen2.5-7B-Instruct", min_length=1, max_length=1024)
    tokenizer: str = Field(default="", max_length=1024)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    seed: int = Field(default=0, ge=0, lt=2**63)
    chat_template: str = Field(default="", max_length=1 << 20)
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(
        default={}, max_length=VARIABLES_MAX, description=f"a mapping of up to {VARIABLES_MAX} names to scalars"
    )
    tools: Literal["template", "hermes"] = "template"

    @field_validator("chat_template_kwargs")
    @classmethod
    def _can_be_given(cls, given: dict[str, bool | int | float | str]) -> dict[str, bool | int | float | str]:
        problem = problem_of(given)
        if problem:
            raise ValueError(problem)
        return given


class RolloutConfig(ConfigGroup):
    """How episodes are sampled. Lengths are in tokens. `temperature` is the default for calls that do not give one.

    `max_response_length` limits all answers in one conversation together, `max_response_length_in_one_turn` each
    answer. `max_prompt_length` limits the prompt before the first answer, `max_model_len` prompt and answers together.

    `history` matters if the model's chat template drops part of what was sampled, such as the reasoning in earlier
    turns: with `template` the next call begins a new training sequence, with `keep` everything stays in one sequence.

    `sampling` says what happens to parameters that would bias the gradient of a training episode (temperature 0, top_p,
    top_k, min_p, penalties, logit_bias): they are overridden by the job's values, refused, or obeyed anyway.
    `unsupported` says what happens to request fields that are not supported here, such as a server-side tool or an
    image: they are left out, or refused. `relax_parameters` leaves them out too, but refuses a part of a training
    episode's conversation, such as an image, which the model would not see. The response header `x-bombus-overridden`
    names what was overridden or left out.

    A forced tool call and a response format (JSON, or JSON that follows a schema) are obeyed in evaluation episodes if
    one of the engine's replicas supports structured output, as vLLM's do. Otherwise they are unsupported. In training
    episodes they are unsupported as well, unless `sampling` is `obey`: then the constraints are enforced, and the
    answers are not trained on.

    `auxiliary_calls` says what happens to calls that a harness makes for its own purposes with an episode's key, for
    example to get a title for the session, or a summary when its context is full: with `mask` they are recorded but not
    trained on, with `train` they are treated like all other calls.

    `allow_chat_template_kwargs` lets requests pass variables to the chat template: see docs/templates.md.
    """

    num_repeat: int = Field(default=4, ge=1, le=4096)
    max_env_worker: int = Field(default=128, ge=1, le=100_000)
    max_prompt_length: int = Field(default=3000, ge=1, le=1 << 22)
    max_response_length: int = Field(default=15000, ge=1, le=1 << 22)
    max_response_length_in_one_turn: int = Field(default=4096, ge=1, le=1 << 22)
    max_model_len: int = Field(default=18000, ge=2, le=1 << 23)
    temperature: Float = Field(default=1.0, ge=0, le=2)
    history: Literal["template", "keep"] = "template"
    sampling: Literal["override", "refuse", "obey"] = "override"
    unsupported: Literal["relax_parameters", "relax", "refuse"] = "relax_parameters"
    auxiliary_calls: Literal["mask", "train"] = "mask"
    allow_chat_template_kwargs: bool = False  # whether requests may set it

    @property
    def trains_auxiliary_calls(self) -> bool:
        return self.auxiliary_calls == "train"

    @field_validator("temperature")
    @classmethod
    def _can_be_sampled_at(cls, given: float) -> float:
        if 0 < given < TEMPERATURE_MIN:
            raise ValueError(f"it must be 0 (the most likely token), or at least {TEMPERATURE_MIN}")
        return given

    @model_validator(mode="after")
    def _lengths_fit(self) -> "RolloutConfig":
        if self.max_prompt_length + self.max_response_length > self.max_model_len:
            raise ValueError(
                f"max_prompt_length {self.max_prompt_length} + max_response_length "
                f"{self.max_response_length} exceeds max_model_len {self.max_model_len}"
            )
        if self.max_response_length_in_one_turn > self.max_response_length:
            raise ValueError(
                f"max_response_length_in_one_turn {self.max_response_length_in_one_turn} "
                f"exceeds max_response_length {self.max_response_length}"
            )
        return self


class CollectionConfig(ConfigGroup):
    """How episodes become batches. `batch_size` is in tasks, `*_s` in seconds, and staleness in policy versions.

    With `max_staleness` above 0, episodes continue while a step is computed (docs/asynchronous.md). With the methods in
    which clients agree to end a batch, syncing weights takes at least `agreed_sync_s`: a swarm client that has agreed
    polls for the syncing phase every 5 s, and would wait forever if it missed that phase. `client_silence_s` is for
    clients that send heartbeats, as bombus's own do: if the heartbeats stop for that long, for example because the
    process was killed, the client's episodes are aborted. A program stopped in a debugger is silent too. The calls in
    the newest `replay_steps` steps are kept for replay, or in fewer steps if the stream of calls is more than half
    full. With `rollout_groups` the job trains on groups that Atropos environments have scored. With `episode_groups`
    the job's episodes become rollout groups too: for its own trainer if `rollout_groups` is also set, otherwise for an
    outside trainer (docs/atropos.md).
    """

    method: CollectionMethod = Method.ENOUGH_TASKS
    batch_size: int = Field(default=32, ge=1, le=65_536)
    max_cached_episodes: int = Field(default=9999, ge=1, le=1_000_000)
    max_pool_bytes: int = Field(default=2 << 30, ge=1 << 16, le=1 << 40)
    max_staleness: int = Field(default=0, ge=0, le=64)
    max_carry_staleness: int = Field(default=1, ge=0, le=64)
    drain_s: Float = Field(default=300.0, gt=0, le=86_400)
    sync_s: Float = Field(default=600.0, gt=0, le=86_400)
    agreed_sync_s: Float = Field(default=6.0, ge=0, le=3600)
    client_silence_s: Float = Field(default=15.0, ge=3, le=86_400)
    boot_s: Float = Field(default=1800.0, gt=0, le=86_400)
    max_step_failures: int = Field(default=3, ge=1, le=100)
    replay_steps: int = Field(default=1000, ge=0, le=10_000)
    rollout_groups: bool = False
    episode_groups: bool = False


class ExperimentConfig(ConfigGroup):
    """The names of a run. `dir` is kept with the job but has no effect: `--data-dir` of `bombus up`, or `--folder` of a
    trainer, sets the folder of checkpoints."""

    project_name: str = Field(default="ajet_default_project", min_length=1, max_length=256)
    experiment_name: str = Field(default=UNNAMED, min_length=1, max_length=256)
    dir: str = Field(default="auto", min_length=1, max_length=4096)


class Tracker(StrEnum):
    """The experiment trackers that steps can be written to. `jsonl` is a file in the folder of trackers."""

    JSONL = "jsonl"
    TENSORBOARD = "tensorboard"
    TRACKIO = "trackio"
    WANDB = "wandb"
    MLFLOW = "mlflow"
    SWANLAB = "swanlab"


def _trackers(value: object) -> object:
    """Accept one name for a list of one, and convert names: strict validation takes no others after a validator."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple):
        return value
    return tuple(Tracker(name) if name in list(Tracker) else name for name in names)


class LoggingConfig(ConfigGroup):
    """Which experiment trackers get the figures of each completed step (docs/trackers.md). They show the run by
    `experiment.project_name` and `experiment.experiment_name`. The environment of `bombus up` has their keys.

    With every `samples_every`th step, trackers that have tables also get some of the step's sampled answers; 0 means
    none.
    """

    trackers: Annotated[tuple[Tracker, ...], BeforeValidator(_trackers)] = Field(
        default=(), max_length=len(Tracker), description="a list of " + ", ".join(Tracker)
    )
    samples_every: int = Field(default=10, ge=0, le=1_000_000)


class RunConfig(ConfigGroup):
    """The whole configuration of a run. `ignored` lists the keys that were given but have no effect."""

    model: ModelConfig = ModelConfig()
    rollout: RolloutConfig = RolloutConfig()
    collection: CollectionConfig = CollectionConfig()
    trainer: TrainerConfig = TrainerConfig()
    experiment: ExperimentConfig = ExperimentConfig()
    logging: LoggingConfig = LoggingConfig()
    ignored: tuple[str, ...] = Field(default=(), exclude=True)

    def ignoring(self, keys: Sequence[str]) -> "RunConfig":
        """Return a copy that also lists these keys, up to `IGNORED_MAX` in all."""
        return self.model_copy(update={"ignored": (*self.ignored, *keys)[:IGNORED_MAX]})

    @model_validator(mode="after")
    def _overlong_buffer_fits(self) -> "RunConfig":
        turn, buffer = self.rollout.max_response_length_in_one_turn, self.trainer.overlong_buffer
        if self.trainer.overlong == Overlong.PENALTY and buffer > turn:
            raise ValueError(
                f"bombus.trainer.overlong_buffer {buffer} exceeds bombus.rollout.max_response_length_in_one_turn {turn}"
            )
        return self

    @model_validator(mode="after")
    def _rollout_groups_are_ours(self) -> "RunConfig":
        if self.collection.rollout_groups and self.trainer.backend != "torch":
            raise ValueError(
                f"bombus.trainer.backend is {self.trainer.backend}, but only the torch backend trains on rollout "
                "groups: set it to torch, or bombus.collection.rollout_groups to false"
            )
        return self

    @model_validator(mode="after")
    def _groups_of_episodes_have_no_age(self) -> "RunConfig":
        if self.collection.episode_groups and self.collection.max_staleness > 0:
            raise ValueError(
                f"bombus.collection.max_staleness is {self.collection.max_staleness}, but a rollout group does not say "
                "how old its tokens are: set it to 0, or bombus.collection.episode_groups to false"
            )
        return self

    def to_collection(self) -> Collection:
        """Return the settings in this job that the coordinator needs."""
        rules = self.collection
        return Collection(
            method=rules.method,
            batch_size=rules.batch_size,
            num_repeat=self.rollout.num_repeat,
            max_open_claims=self.rollout.max_env_worker,
            max_pool_episodes=rules.max_cached_episodes,
            max_pool_bytes=rules.max_pool_bytes,
            max_staleness=rules.max_staleness,
            max_carry_staleness=rules.max_carry_staleness,
            drain_s=rules.drain_s,
            boot_s=rules.boot_s,
            sync_s=rules.sync_s,
            agreed_sync_s=rules.agreed_sync_s,
            client_silence_s=rules.client_silence_s,
            max_step_failures=rules.max_step_failures,
            replay_steps=rules.replay_steps,
            rollout_groups=rules.rollout_groups,
            episode_groups=rules.episode_groups,
            resume=self.trainer.resume,
            checkpoints_kept=self.trainer.checkpoints_kept,
        )

    def to_command(self, command: str, engine: str, by: str = "") -> Configure:
        """Return the command that gives an engine this job. `command` is the command's id, and `by` its sender."""
        return Configure(
            id=command,
            engine=engine,
            config=self.to_json(),
            config_digest=self.digest,
            collection=self.to_collection(),
            model=self.model.path,
            by=by,
        )

    def to_yaml_mapping(self) -> Tree:
        """Return a document that `parse_job` reads back as an equal configuration."""
        return {"bombus": self.model_dump(mode="json")}

    def to_json(self) -> str:
        """Return canonical JSON, as in `engine.configured`: keys sorted, no spaces."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    def settings(self) -> dict[str, Any]:
        """Return all settings by names such as `trainer.lr`."""
        groups: dict[str, dict[str, Any]] = self.model_dump(mode="json")
        return {f"{group}.{field}": value for group, fields in groups.items() for field, value in fields.items()}

    @staticmethod
    def from_json(text: str) -> "RunConfig":
        """Parse the result of `to_json`, even from an earlier version. Raises `Refused(BAD_CONFIG)`.

        A process parses each text only once, so the job may be read from its event whenever it is needed. The fold
        keeps only the text, and a `Collection` with what the fold itself needs: it must not depend on how a release
        parses a job.
        """
        return _parsed(text)

    @property
    def digest(self) -> str:
        return digest(self.to_json().encode()).hex()


GROUPS = tuple(name for name in RunConfig.model_fields if name != "ignored")


def validated(given: Tree, names: Mapping[str, str]) -> RunConfig:
    """Validate a configuration given as nested groups. Raises `Refused(BAD_CONFIG)`.

    `names` maps our paths to the names that the document uses for them, if they differ.
    """
    for group, fields in given.items():
        for field, value in fields.items() if isinstance(fields, Mapping) else ():
            path = f"{group}.{field}"
            items = list(value.values()) if path in MAPPINGS and isinstance(value, Mapping) else value
            _check_plain(_name(path, names), items)
    return _validated_json(json.dumps(given), names)


@lru_cache(PARSED_MAX)
def _parsed(text: str) -> RunConfig:
    return _validated_json(in_todays_fields(text), {})


def _validated_json(text: str, names: Mapping[str, str]) -> RunConfig:
    try:
        return RunConfig.model_validate_json(text)
    except ValidationError as error:
        raise bad_config(_sentence(error, names)) from error


# Fields of jobs on older logs, with their current names.
_RENAMED = {("collection", "scored_groups"): "rollout_groups", ("rollout", "side_calls"): "auxiliary_calls"}


def in_todays_fields(text: str) -> str:
    """Return a job from the log with its fields renamed to their current names."""
    if not any(f'"{name}"' in text for name in ("allow_biased_sampling", *(name for _, name in _RENAMED))):
        return text
    job = json.loads(text)
    for (group, before), now in _RENAMED.items():
        if before in job.get(group, {}):
            job[group][now] = job[group].pop(before)
    biased = job.get("rollout", {}).pop("allow_biased_sampling", None)
    if biased is not None:
        job["rollout"]["sampling"] = "obey" if biased else "refuse"
    return json.dumps(job)


def _check_plain(name: str, value: object) -> None:
    """Raise `Refused` for anything but scalars and short lists of scalars: nested aliases can expand without limit."""
    items = value if isinstance(value, list) else [value]
    plain = all(item is None or isinstance(item, bool | int | float | str) for item in items)
    if not plain or len(items) > LIST_MAX:
        raise bad_config(f"{name} must be a plain value, not {shown(value)}")


def _sentence(error: ValidationError, names: Mapping[str, str]) -> str:
    # If a field is wrong, the defaults that depend on that field are not further mistakes.
    found = [each for each in error.errors(include_url=False) if each["type"] != "default_factory_not_called"]
    sentences = []
    for problem in found[:3]:
        ours = ".".join(str(part) for part in problem["loc"][:2])
        name = _name(ours, names)
        field = _field(ours)
        if problem["type"] == "extra_forbidden":
            meant = nearest(ours, [f"{group}.{field}" for group in GROUPS for field in _group(group).model_fields])
            sentences.append(f"{name} is unknown" + (f"; did you mean bombus.{meant}?" if meant else ""))
        elif field is None:
            sentences.append(f"{name}: {problem['msg'].removeprefix('Value error, ')}".removeprefix(": "))
        elif problem["type"] == "value_error":
            why = problem["msg"].removeprefix("Value error, ")
            sentences.append(f"{name} = {shown(problem['input'])} is refused: {why}")
        else:
            sentences.append(f"{name} = {shown(problem['input'])} is refused: {allowed(field)}")
    more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
    return "; ".join(sentences) + more


def _name(ours: str, names: Mapping[str, str]) -> str:
    """Return the document's name for one of our paths."""
    return names.get(ours, f"bombus.{ours}" if ours else "")


def _group(name: str) -> type[ConfigGroup]:
    return cast(type[ConfigGroup], RunConfig.model_fields[name].annotation)


def _field(path: str) -> FieldInfo | None:
    group, _, name = path.partition(".")
    return _group(group).model_fields.get(name) if group in GROUPS else None
