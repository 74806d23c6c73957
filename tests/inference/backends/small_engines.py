"""What the tests of the inference engine share: small models, requests, and answers put together again."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from bombus.hive.generation import Fault, Finished, Frame, Generate, Tokens
from bombus.hive.records import SamplingParams, pack_tokens, unpack_logprobs, unpack_tokens
from bombus_inference.backends.torch import attention
from bombus_inference.backends.torch.engine import Engine, Output
from bombus_inference.settings import EngineSettings
from tests.small_models import small_llama

VOCABULARY = 60
CONTEXT = 256


def llama(seed: int = 0) -> LlamaForCausalLM:
    """Grouped query heads, untied embeddings."""
    return small_llama(seed, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, initializer_range=0.5).eval()


def qwen(seed: int = 0) -> Qwen2ForCausalLM:
    """One key head for each query head, biases, tied embeddings."""
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
    """A copy of `model` that attends over the paged cache."""
    attention.register()
    copy = deepcopy(model)
    copy.set_attn_implementation(attention.NAME)
    return copy


def another(model: PreTrainedModel, seed: int = 9) -> PreTrainedModel:
    """Of the same shape, with other weights."""
    torch.manual_seed(seed)
    return type(model)(deepcopy(model.config)).eval()


def engine_for(model: PreTrainedModel, **settings: object) -> Engine:
    defaults: dict[str, object] = {"kv_cache_bytes": 4 << 20, "max_model_len": CONTEXT, "block_tokens": 4}
    return Engine(paged(model), EngineSettings(**(defaults | settings)), run=1, version=0)


def request(
    prompt: Sequence[int],
    *,
    n: int = 1,
    stream: bool = False,
    run: int = 1,
    max_tokens: int = 12,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int | None = 0,
    stop: tuple[int, ...] = (),
    top_logprobs: int = 0,
) -> Generate:
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop_token_ids=stop,
        top_logprobs=top_logprobs,
    )
    return Generate(id="r", engine="main", run=run, prompt=pack_tokens(prompt), sampling=sampling, n=n, stream=stream)


@dataclass
class Completion:
    """One choice, put together from its frames."""

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

    def take(self, frame: Frame) -> None:
        if isinstance(frame, Fault):
            self.fault = frame
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
    """Step until nothing is left to do."""
    answers = Answers() if answers is None else answers
    while engine.has_work:
        answers.take(engine.step())
    return answers


def answer(engine: Engine, asked: Generate) -> Answer:
    engine.add(1, asked)
    return finish(engine)[1]


def reference_logprobs(model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
    """log-softmax over the vocabulary at each completion token, by a plain forward pass: [tokens, vocabulary]."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)[len(prompt) - 1 : -1]


def worst_difference(model: PreTrainedModel, prompt: Sequence[int], made: Completion) -> float:
    """Between the reported logprobs and a plain recompute at temperature 1."""
    expected = reference_logprobs(model, prompt, made.tokens)
    chosen = expected.gather(1, torch.tensor(made.tokens)[:, None]).squeeze(1)
    return float((chosen - torch.tensor(made.logprobs)).abs().max())


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder
