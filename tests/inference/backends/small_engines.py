"""Helpers for tests of the inference engine: small models, requests, and answers assembled from frames."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from bombus.hive.generation import Fault, Finished, Frame, Generate, PromptScores, Tokens
from bombus.hive.records import SamplingParams, pack_tokens, unpack_logprobs, unpack_tokens
from bombus_inference.backends.torch import attention
from bombus_inference.backends.torch.engine import Engine, Output
from bombus_inference.settings import ComputeSettings
from tests.small_models import small_llama

VOCABULARY = 60
CONTEXT = 256


def llama(seed: int = 0) -> LlamaForCausalLM:
    """A model with grouped query heads and untied embeddings."""
    return small_llama(seed, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, initializer_range=0.5).eval()


def qwen(seed: int = 0) -> Qwen2ForCausalLM:
    """A model with one key head for each query head, biases, and tied embeddings."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.5,
    )
    return Qwen2ForCausalLM(config).eval()


def paged(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of `model` that attends over the paged cache."""
    attention.register()
    copy = deepcopy(model)
    copy.set_attn_implementation(attention.NAME)
    return copy


def another(model: PreTrainedModel, seed: int = 9) -> PreTrainedModel:
    """Return a model of the same shape with other weights."""
    torch.manual_seed(seed)
    return type(model)(deepcopy(model.config)).eval()


def engine_for(model: PreTrainedModel, **settings: Any) -> Engine:
    defaults: dict[str, Any] = {"kv_cache_bytes": 4 << 20, "max_model_len": CONTEXT, "block_tokens": 4}
    return Engine(paged(model), ComputeSettings(**(defaults | settings)), run=1, version=0)


def request(
    prompt: Sequence[int],
    *,
    n: int = 1,
    stream: bool = False,
    run: int = 1,
    stop: tuple[int, ...] = (),
    **sampling_fields: Any,
) -> Generate:
    """Return a request of 12 tokens with seed 0, unless the fields of `SamplingParams` that are given say otherwise."""
    sampling = SamplingParams(stop_token_ids=stop, **({"max_tokens": 12, "seed": 0} | sampling_fields))
    return Generate(id="r", engine="main", run=run, prompt=pack_tokens(prompt), sampling=sampling, n=n, stream=stream)


@dataclass
class Completion:
    """One choice, assembled from its frames."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    frames: int = 0
    finish: str = ""
    cached: int = 0


@dataclass
class Answer:
    choices: dict[int, Completion] = field(default_factory=dict)
    fault: Fault | None = None
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_tops: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_version: int = -1

    def take(self, frame: Frame) -> None:
        if isinstance(frame, Fault):
            self.fault = frame
            return
        if isinstance(frame, PromptScores):
            self._take_scores(frame)
            return
        choice = self.choices.setdefault(frame.choice, Completion())
        if isinstance(frame, Finished):
            choice.finish, choice.cached = frame.reason, frame.cached_prompt_tokens
            return
        assert isinstance(frame, Tokens)
        tokens = unpack_tokens(frame.tokens)
        choice.tokens += tokens
        choice.logprobs += unpack_logprobs(frame.logprobs)
        choice.versions += [frame.version] * len(tokens)
        choice.top += frame.top
        choice.frames += 1

    def _take_scores(self, frame: PromptScores) -> None:
        assert (frame.start, self.choices.get(0)) == (len(self.prompt_logprobs), None)
        self.prompt_version = frame.version
        self.prompt_logprobs += unpack_logprobs(frame.logprobs)
        tops = list(zip(unpack_tokens(frame.top_tokens), unpack_logprobs(frame.top_logprobs), strict=True))
        if frame.width:
            self.prompt_tops += [tops[at : at + frame.width] for at in range(0, len(tops), frame.width)]

    @property
    def only(self) -> Completion:
        assert self.fault is None
        (choice,) = self.choices.values()
        return choice


class Answers(dict[int, Answer]):
    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            for frame in output.frames:
                self.setdefault(output.ticket, Answer()).take(frame)


def finish(engine: Engine, answers: Answers | None = None) -> Answers:
    """Step until there is no work left."""
    answers = Answers() if answers is None else answers
    while engine.has_work:
        answers.take(engine.step())
    return answers


def answer(engine: Engine, body: Generate) -> Answer:
    engine.add(1, body)
    return finish(engine)[1]


def reference_logits(model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
    """Return the logits at each completion token from a plain forward pass: [tokens, vocabulary]."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([[*prompt, *completion]])).logits[0]
    return logits.float()[len(prompt) - 1 : -1]


def reference_logprobs(model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
    """Return the log-softmax at each completion token from a plain forward pass: [tokens, vocabulary]."""
    return torch.log_softmax(reference_logits(model, prompt, completion), dim=-1)


def worst_difference(model: PreTrainedModel, prompt: Sequence[int], made: Completion) -> float:
    """Return the largest difference between reported logprobs and those of a plain forward pass at temperature 1."""
    expected = reference_logprobs(model, prompt, made.tokens)
    chosen = expected.gather(1, torch.tensor(made.tokens)[:, None]).squeeze(1)
    return float((chosen - torch.tensor(made.logprobs)).abs().max())


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder
