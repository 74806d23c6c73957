"""The options of `bombus slime`, which have slime's names, and the `args` with which hook files are called."""

from argparse import Namespace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from bombus.config.flags import Flag
from bombus.slime.rewards import refusal_of
from bombus.weights.models import SMOLLM2, TINY, loadable_name

# slime's other arguments that hook files read, with values that mean that the feature is not used.
OTHERS: dict[str, object] = {
    "ci_test": False,
    "context_parallel_size": 1,
    "eval_max_context_len": None,
    "mask_offpolicy_in_partial_rollout": False,
    "partial_rollout": False,
    "rollout_global_dataset": True,
    "rollout_num_engines": 1,
    "rollout_num_gpus": 1,
    "rollout_num_gpus_per_engine": 1,
    "rollout_stop_token_ids": None,
    "router_policy": None,
    "sglang_dp_size": 1,
    "sglang_enable_deterministic_inference": False,
    "sglang_model_routers": None,
    "sglang_speculative_algorithm": None,
    "use_distributed_post": False,
    "use_rollout_routing_replay": False,
}
Text = Annotated[str, Flag(metavar="NAME")]
FunctionPath = Annotated[str | None, Flag(metavar="PATH")]


class HookArguments(Namespace):
    """The `args` passed to hook files. Reading a missing argument raises an error that says what to do."""

    def __getattr__(self, name: str) -> Any:
        given = name in SlimeOptions.model_fields
        hint = (
            f"give --{name.replace('_', '-')}" if given else "docs/slime.md says which of slime's arguments exist here"
        )
        raise AttributeError(f"args.{name} has no value here: {hint}")


class SlimeOptions(BaseModel):
    """The command line of `bombus slime`. Functions are given as `package.module.function` or `file.py:function`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    server_url: Annotated[str, Flag(metavar="URL")] = Field(
        default="http://127.0.0.1:10086", description="the address of the hive"
    )
    engine: Annotated[str | None, Flag(metavar="NAME", default="the hive's first")] = Field(
        default=None, description="the engine whose episodes are played"
    )
    job: Annotated[Path | None, Flag(metavar="FILE")] = Field(
        default=None, description="start the engine with this job, and with the sizes and corrections given here"
    )
    hf_checkpoint: Annotated[str, Flag(metavar="MODEL")] = Field(
        default="", description="the model's folder, or tiny or smollm2: hook files use its tokenizer"
    )
    prompt_data: Annotated[Path | None, Flag(metavar="FILE")] = Field(
        default=None, description="the prompts, a JSON object on each line"
    )
    input_key: Text = Field(default="input", description="the field with the prompt")
    label_key: Annotated[str | None, Flag(metavar="NAME")] = Field(default=None, description="the field with the label")
    metadata_key: Text = Field(default="metadata", description="the field with the metadata")
    tool_key: Text = Field(default="tools", description="the field with the tools, which become part of the metadata")
    apply_chat_template: bool = Field(default=False, description="turn a prompt of messages into one text")
    apply_chat_template_kwargs: Annotated[str, Flag(metavar="JSON")] = Field(
        default="{}", description="extra arguments for the chat template"
    )
    rollout_shuffle: bool = Field(default=False, description="draw prompts in a random order")
    rollout_seed: int = Field(default=42, ge=0, description="the seed of that order")
    num_rollout: Annotated[int | None, Flag(default="as many as the epochs need")] = Field(
        default=None, ge=1, le=10_000_000, description="how many rollouts are made"
    )
    num_epoch: int = Field(
        default=1, ge=1, le=100_000, description="how many times all prompts are played, without --num-rollout"
    )
    rollout_batch_size: int = Field(default=32, ge=1, le=65_536, description="how many prompts a rollout has")
    n_samples_per_prompt: int = Field(
        default=4, ge=1, le=1024, description="how many samples of each prompt to compare with each other"
    )
    over_sampling_batch_size: Annotated[int | None, Flag(default="as many as a rollout has")] = Field(
        default=None, ge=1, le=65_536, description="how many prompts are begun at a time"
    )
    rollout_max_response_len: int = Field(
        default=8192, ge=1, le=10_000_000, description="how many tokens an answer may have"
    )
    rollout_max_context_len: int | None = Field(
        default=None, ge=1, le=10_000_000, description="how many tokens a conversation may have, if hook files read it"
    )
    max_tokens_per_gpu: int | None = Field(
        default=None, ge=1, le=10_000_000, description="the same, for hook files that read this argument instead"
    )
    rollout_temperature: Annotated[float, Flag(metavar="T")] = Field(
        default=1.0, ge=0, le=100, description="the temperature of sampling"
    )
    rollout_top_p: Annotated[float, Flag(metavar="P")] = Field(default=1.0, gt=0, le=1, description="top_p")
    rollout_top_k: int = Field(default=-1, ge=-1, description="top_k, -1 for all")
    rollout_stop: Annotated[tuple[str, ...], Flag(metavar="TEXT")] = Field(
        default=(), description="a text at which an answer ends; may be given several times"
    )
    rollout_skip_special_tokens: bool = Field(default=False, description="leave special tokens out of texts")
    sglang_server_concurrency: int = Field(
        default=512, ge=1, le=65_536, description="how many samples run at the same time"
    )
    custom_generate_function_path: FunctionPath = Field(default=None, description="generate(args, sample, params)")
    custom_rm_path: FunctionPath = Field(
        default=None, description="reward_func(args, sample), with a list of samples if --group-rm"
    )
    rm_type: Annotated[str | None, Flag(metavar="NAME")] = Field(default=None, description="only remote_rm")
    rm_url: Annotated[str | None, Flag(metavar="URL")] = Field(default=None, description="the server of remote_rm")
    group_rm: bool = Field(default=False, description="reward the samples of a prompt together")
    reward_key: Annotated[str | None, Flag(metavar="NAME")] = Field(
        default=None, description="which value of a reward to use, if it has several"
    )
    dynamic_sampling_filter_path: FunctionPath = Field(default=None, description="chooses the groups to keep")
    rollout_sample_filter_path: FunctionPath = Field(default=None, description="marks samples not to train on")
    rollout_all_samples_process_path: FunctionPath = Field(
        default=None, description="is called with all groups of a rollout, including dropped ones"
    )
    use_tis: bool = Field(default=False, description="correct for the sampler's logprobs, with --job")
    tis_clip: Annotated[float | None, Flag(metavar="C")] = Field(
        default=None, gt=0, description="the bound of that correction, with --job"
    )
    save_debug_rollout_data: Annotated[str | None, Flag(metavar="FILE")] = Field(
        default=None, description="write each rollout to this .pt or .jsonl file; {rollout_id} stands for its number"
    )
    load_debug_rollout_data: Annotated[str | None, Flag(metavar="FILE")] = Field(
        default=None, description="train on rollouts that were saved in such files, and sample nothing"
    )
    debug_rollout_only: bool = Field(default=False, description="play and score without training")

    search_port: Annotated[int | None, Flag(metavar="PORT")] = Field(
        default=None, ge=1, le=65535, description="serve /retrieve on this port of this machine, for a search_url"
    )
    search_documents: Annotated[Path | None, Flag(metavar="FILE", default="those of the `search` tasks")] = Field(
        default=None, description="the documents to search, a JSON object with title and text on each line"
    )

    @field_validator("server_url")
    @classmethod
    def _is_url(cls, given: str) -> str:
        if not given.startswith(("http://", "https://")):
            raise ValueError(f"{given!r} is not the address of a hive, such as http://127.0.0.1:10086")
        return given

    @field_validator("apply_chat_template_kwargs")
    @classmethod
    def _is_object(cls, given: str) -> str:
        try:
            msgspec.json.decode(given, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ValueError(f"{given!r} is not a JSON object, such as {{}}") from error
        return given

    @model_validator(mode="after")
    def _fits(self) -> "SlimeOptions":
        if self.load_debug_rollout_data:
            return self
        if self.prompt_data is None or not self.hf_checkpoint:
            raise ValueError("there is nothing to play: give --prompt-data FILE and --hf-checkpoint MODEL")
        if (self.use_tis or self.tis_clip is not None) and self.job is None:
            why = "--use-tis and --tis-clip are settings of the trainer: give --job FILE, or write them into the job"
            raise ValueError(f"{why} that runs")
        if self.rm_type not in (None, "remote_rm") or (self.rm_type and not self.rm_url):
            raise ValueError(refusal_of(self.rm_type or ""))
        return self

    @property
    def chat_template_arguments(self) -> dict[str, Any]:
        return msgspec.json.decode(self.apply_chat_template_kwargs, type=dict[str, Any])

    @property
    def over_sampling(self) -> int:
        return self.over_sampling_batch_size or self.rollout_batch_size

    @property
    def job_overrides(self) -> dict[str, dict[str, Any]]:
        """Return the job settings that the options override, by group."""
        tis = {"use_tis": self.use_tis or None, "tis_clip": self.tis_clip}
        trainer = {name: value for name, value in tis.items() if value is not None}
        return {"trainer": trainer} if trainer else {}

    def namespace(self) -> Namespace:
        """Return the `args` for hook files: the options, and slime's other arguments that hook files may read."""
        own = self.model_dump()
        if self.hf_checkpoint in (TINY, SMOLLM2):  # hook files load its tokenizer themselves, by this name
            own["hf_checkpoint"] = loadable_name(self.hf_checkpoint, "bfloat16", 0)
        own |= {"prompt_data": str(self.prompt_data), "rollout_stop": list(self.rollout_stop) or None}
        own |= {"apply_chat_template_kwargs": self.chat_template_arguments}
        if self.max_tokens_per_gpu is None:
            del own["max_tokens_per_gpu"]
        return HookArguments(**{**OTHERS, **own, "over_sampling_batch_size": self.over_sampling})
