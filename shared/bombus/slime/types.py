"""`Sample`, which slime's hooks receive and return. Its attributes and the format of `to_dict` are slime's."""

from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any


@dataclass
class SlimeSample:
    """One attempt at a prompt: the prompt, the response and the reward.

    `tokens` contains the prompt followed by the response. `loss_mask` and `rollout_log_probs` have one number for each
    of the `response_length` tokens of the response.
    """

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    @dataclass
    class SpecInfo:
        """Counters of speculative decoding, which bombus does not use."""

        spec_accept_token_num: int = 0
        spec_draft_token_num: int = 0
        spec_verify_ct: int = 0
        completion_token_num: int = 0

        def to_dict(self) -> dict[str, int]:
            return dict(vars(self))

    @dataclass
    class PrefixCacheInfo:
        cached_tokens: int = 0
        total_prompt_tokens: int = 0

        @property
        def prefix_cache_hit_rate(self) -> float:
            return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

        def add(self, meta_info: Mapping[str, Any]) -> None:
            self.cached_tokens += meta_info.get("cached_tokens", 0)
            self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)

        def to_dict(self) -> dict[str, int]:
            return dict(vars(self))

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""  # a text, a list of messages, or any other value that a hook file reads
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    @property
    def effective_response_length(self) -> int:
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: Namespace) -> Any:
        """Return the reward, or its value under `args.reward_key` if that is set. Raises `ValueError` if there is no
        reward."""
        if not args.reward_key:
            return self.reward
        if not isinstance(self.reward, Mapping) or args.reward_key not in self.reward:
            raise ValueError(f"the reward of a sample is {self.reward!r}, without the --reward-key {args.reward_key!r}")
        return self.reward[args.reward_key]

    def to_dict(self) -> dict[str, Any]:
        """Return the sample in the format of a rollout file, including attributes that a hook has added."""
        plain = {"status": getattr(self.status, "value", self.status)}  # hooks may have set a string
        counters = {"spec_info": self.spec_info.to_dict(), "prefix_cache_info": self.prefix_cache_info.to_dict()}
        return {**vars(self), **plain, **counters}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "SlimeSample":
        """Return the sample that `to_dict` describes. Raises `ValueError` for an unknown status."""
        own = {one.name for one in fields(SlimeSample)}
        given = dict(data)
        given["status"] = SlimeSample.Status(given["status"])
        for name, counters in (("spec_info", SlimeSample.SpecInfo), ("prefix_cache_info", SlimeSample.PrefixCacheInfo)):
            known = {one.name for one in fields(counters)}  # another release of slime may have more counters
            given[name] = counters(**{key: value for key, value in given.get(name, {}).items() if key in known})
        for name in ("tokens", "loss_mask", "rollout_log_probs"):
            if hasattr(given.get(name), "tolist"):
                given[name] = given[name].tolist()
        sample = SlimeSample(**{name: value for name, value in given.items() if name in own})
        for name, value in given.items():
            if name not in own:
                setattr(sample, name, value)
        return sample

    def append_response_tokens(  # noqa: PLR0913 - slime's signature
        self,
        args: Namespace | None = None,
        *,
        tokens: Iterable[int] | None = None,
        log_probs: Iterable[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Add tokens to the response: the model's tokens with their logprobs, or other tokens, which are not trained
        on.

        Raises `ValueError` unless there is one logprob for each of the model's tokens.
        """
        added = [int(token) for token in tokens or ()]
        scores = None if log_probs is None else [float(value) for value in log_probs]
        if scores is not None and len(scores) != len(added):
            raise ValueError(f"{len(scores)} log_probs were given for {len(added)} tokens")
        if added and trainable and scores is None:
            raise ValueError("tokens of the model need their log_probs: ask for return_logprob")
        if added and not trainable:
            if scores is not None:
                raise ValueError("tokens that are not trained on have no log_probs: leave log_probs out")
            scores = [0.0] * len(added)
        self.response += text or ""
        before = self.response_length
        if added:  # done in place, because a hook may have references to the same lists
            self.tokens += added
            self.response_length += len(added)
            self.loss_mask = [1] * before if self.loss_mask is None else self.loss_mask
            self.loss_mask += [int(trainable)] * len(added)
        if scores is not None:
            if self.rollout_log_probs is None and trainable and before:
                raise ValueError("the response has tokens without rollout_log_probs: append their log_probs first")
            self.rollout_log_probs = [0.0] * before if self.rollout_log_probs is None else self.rollout_log_probs
            self.rollout_log_probs += scores
        if meta_info is not None and update_terminal_info:
            self.update_from_meta_info(args, meta_info)
        self._check_lengths()

    def _check_lengths(self) -> None:
        for name, values in (("loss_mask", self.loss_mask), ("rollout_log_probs", self.rollout_log_probs)):
            if values is not None and len(values) != self.response_length:
                raise ValueError(f"{name} has {len(values)} values for a response of {self.response_length} tokens")

    def update_from_meta_info(self, args: Namespace | None, meta_info: Mapping[str, Any]) -> None:
        """Copy the status and the counters of an answer. Hook files for earlier releases of slime call this."""
        if "finish_reason" not in meta_info:
            return
        self.prefix_cache_info.add(meta_info)
        if "weight_version" in meta_info:
            self.weight_versions.append(str(meta_info["weight_version"]))
        self.status = FINISHED.get(meta_info["finish_reason"]["type"], self.status)


FINISHED = {
    "length": SlimeSample.Status.TRUNCATED,
    "abort": SlimeSample.Status.ABORTED,
    "stop": SlimeSample.Status.COMPLETED,
}
