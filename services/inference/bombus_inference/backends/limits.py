"""Checks requests before a backend sees them, since a request that one backend refuses may crash another."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from bombus.errors import Code, Refused
from bombus.hive.generation import Generate
from bombus.hive.records import TEMPERATURE_MIN, SamplingParams, unpack_tokens

TOP_LOGPROBS_MAX = 20
CHOICES_MAX = 256  # `n` of one request; Tinker's clients may request this many samples for one prompt
PENALTY_MAX = 2.0  # OpenAI's and vLLM's limit
REPETITION_MIN, REPETITION_MAX = 0.01, 100.0  # outside this range, logits may overflow float32
BIAS_MAX = 100.0  # OpenAI's limit; vLLM clamps larger values to it
BIASED_TOKENS_MAX = 1024
NO_ADAPTERS = (
    "this replica serves no adapters besides its own policy; to serve them, use the torch backend with --adapters-mb "
    "above 0, or vLLM in an operations run"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one backend. `max_model_len` is in tokens, for prompt and completion together.

    `waiting_max` is the number of sequences that may wait. `constrains` says whether structured output is supported.
    `scores` says whether prompts are scored and logprobs at temperature 1 are available regardless of how tokens are
    sampled. `adapters` says whether adapters are served beside the engine's own policy.
    """

    max_model_len: int
    vocabulary: int
    choices_max: int
    waiting_max: int
    constrains: bool = False
    scores: bool = False
    adapters: bool = False

    def check(self, request: Generate, run: int) -> list[int]:
        """Return the request's prompt. Raises `Refused` for a request that a replica that serves `run` cannot
        answer."""
        if request.run != run:
            raise Refused(Code.WRONG_PHASE, f"this replica serves run {run}, not {request.run}")
        if request.constraint is not None and not self.constrains:
            raise Refused(
                Code.UNSUPPORTED, "this replica does not support structured output; vLLM with a tokenizer does"
            )
        if request.prompt_logprobs and not self.scores:
            raise Refused(
                Code.UNSUPPORTED,
                "this replica does not score prompts; the torch and vLLM backends do",
            )
        if request.plain_logprobs and not (self.scores or samples_plainly(request)):
            why = (
                "this replica has logprobs at temperature 1 only for tokens sampled at temperature 1 without bias, "
                "penalties or truncation; the torch and vLLM backends have them for all"
            )
            raise Refused(Code.UNSUPPORTED, why)
        if request.adapter and not self.adapters:
            raise Refused(Code.UNSUPPORTED, NO_ADAPTERS)
        prompt = self._prompt(request.prompt)
        self._check_sampling(request)
        return prompt

    def tokens_max(self, request: Generate, prompt: list[int]) -> int:
        """Return the maximum number of tokens in prompt and completion together."""
        if request.prompt_logprobs and not request.sampling.max_tokens:
            return len(prompt)
        completion = request.sampling.max_tokens or self.max_model_len
        return min(len(prompt) + completion, self.max_model_len)

    def _prompt(self, packed: bytes) -> list[int]:
        if not packed or len(packed) % 4:
            raise Refused(Code.MALFORMED, "the prompt is not a list of int32 token ids, or is empty")
        prompt = unpack_tokens(packed)
        if len(prompt) >= self.max_model_len:
            raise Refused(
                Code.PROMPT_TOO_LONG,
                f"the prompt has {len(prompt)} tokens; this model takes {self.max_model_len} for prompt and completion",
            )
        if min(prompt) < 0 or max(prompt) >= self.vocabulary:
            raise Refused(Code.MALFORMED, f"token ids range from 0 to {self.vocabulary - 1}")
        return prompt

    def _check_sampling(self, request: Generate) -> None:
        sampling = request.sampling
        ranges = (
            ("max_tokens", sampling.max_tokens, 0, math.inf),
            ("temperature", sampling.temperature, 0.0, 100.0),
            ("top_k", sampling.top_k, 0, math.inf),
            ("min_p", sampling.min_p, 0.0, 1.0),
            ("presence_penalty", sampling.presence_penalty, -PENALTY_MAX, PENALTY_MAX),
            ("frequency_penalty", sampling.frequency_penalty, -PENALTY_MAX, PENALTY_MAX),
            ("repetition_penalty", sampling.repetition_penalty, REPETITION_MIN, REPETITION_MAX),
            ("top_logprobs", sampling.top_logprobs, 0, TOP_LOGPROBS_MAX),
        )
        for name, value, low, high in ranges:
            if not low <= value <= high:
                raise Refused(Code.MALFORMED, f"{name} is {value}, but must be from {low} to {high}")
        if 0 < sampling.temperature < TEMPERATURE_MIN:
            why = f"temperature is {sampling.temperature}, but must be 0 or at least {TEMPERATURE_MIN}"
            raise Refused(Code.MALFORMED, why)
        if not 0 < sampling.top_p <= 1:
            raise Refused(Code.MALFORMED, f"top_p is {sampling.top_p}, but must be above 0 and at most 1")
        self._check_bias(sampling.logit_bias)
        most = min(self.choices_max, self.waiting_max)
        if not 1 <= request.n <= most:
            why = f"the request asks for {request.n} answers to one prompt; this replica samples from 1 to {most}"
            raise Refused(Code.MALFORMED, why)
        alternatives = min(TOP_LOGPROBS_MAX, self.vocabulary) if request.prompt_logprobs else 0
        if not 0 <= request.top_prompt <= alternatives:
            why = f"the request asks for {request.top_prompt} alternatives to each token of the prompt"
            bound = f"at most {alternatives} are reported" if alternatives else "none are reported without its logprobs"
            raise Refused(Code.MALFORMED, f"{why}; {bound}")

    def _check_bias(self, bias: Mapping[int, float]) -> None:
        if len(bias) > BIASED_TOKENS_MAX:
            raise Refused(Code.MALFORMED, f"logit_bias has {len(bias)} tokens; at most {BIASED_TOKENS_MAX} are allowed")
        for token, value in bias.items():
            if not 0 <= token < self.vocabulary:
                raise Refused(Code.MALFORMED, f"logit_bias has token {token}; ids are 0 to {self.vocabulary - 1}")
            if not -BIAS_MAX <= value <= BIAS_MAX:
                why = f"logit_bias of token {token} is {value}, but must be from {-BIAS_MAX:g} to {BIAS_MAX:g}"
                raise Refused(Code.MALFORMED, why)


def samples_plainly(request: Generate) -> bool:
    """Return whether tokens are sampled from the model's own distribution."""
    sampling = request.sampling
    plain = SamplingParams(
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids,
        top_logprobs=sampling.top_logprobs,
    )
    return sampling == plain and request.constraint is None
