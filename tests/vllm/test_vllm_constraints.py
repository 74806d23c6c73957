"""Answers that vLLM holds to a form: what they are, and of which distribution their logprobs are."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from bombus.hive.generation import Constraint, Generate, Tokens
from bombus.hive.records import FinishReason, pack_logprobs, pack_tokens
from bombus.weights.models import load_model
from bombus_gateway.call.completion import Completion as GatewayCompletion
from bombus_gateway.call.constraining import constraint_of
from bombus_gateway.call.request import CompletionRequest, Demand
from bombus_inference.backends.protocol import Policy
from bombus_inference.backends.vllm.backend import VllmBackend
from bombus_inference.settings import ComputeSettings, VllmSettings
from tests.gateway.openai_hive import FILES, IM_END, TEXT
from tests.inference.backends.http_backends import BackendClient, ignore_stage
from tests.inference.backends.small_engines import Completion, reference_logprobs, request, worst_difference
from tests.small_models import small_llama

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = 512
VOCABULARY = 448  # more than the tokenizer has, as in models whose vocabulary is padded
ENGINE = ComputeSettings(kv_cache_bytes=64 << 20, max_model_len=CONTEXT, max_running=8, threads=1)
PROMPT = [5, 17, 3, 44]
ANSWER = {
    "type": "object",
    "properties": {"sunny": {"type": "boolean"}, "wind": {"enum": ["north", "west"]}},
    "required": ["sunny", "wind"],
    "additionalProperties": False,
}
TOOLS: tuple[dict[str, Any], ...] = tuple(
    {"type": "function", "function": {"name": name, "parameters": ANSWER}} for name in ("weather", "forecast")
)
FORCED = CompletionRequest(
    chat=True, tools=TOOLS, parse_tool_calls=True, demands=(Demand("tool_choice", tools=("weather", "forecast")),)
)


@dataclass
class Stage:
    backend: VllmBackend
    client: BackendClient
    models: list[PreTrainedModel]
    folders: list[Path]

    async def answer(self, constraint: Constraint, **fields: Any) -> Completion:
        return (await self.client.ask(self.backend, held(constraint, **fields))).only


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    folders = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp(f"model{seed}")
        llama(seed).save_pretrained(folder)
        (folder / "tokenizer.json").write_bytes(FILES["tokenizer.json"])
        named = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(named))
        folders.append(folder)
    client = BackendClient()
    backend = VllmBackend(ENGINE, VllmSettings(eager=True), client.deliver)
    try:
        await backend.load(Policy(folders[0], 1, 0, CONTEXT), ignore_stage)
        yield Stage(backend, client, [load_model(folder) for folder in folders], folders)
    finally:
        await backend.stop()


def llama(seed: int) -> LlamaForCausalLM:
    """A model whose heads have the smallest size that vLLM supports on a CPU."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 128}
    return small_llama(seed, **shape, max_position_embeddings=CONTEXT).eval()


def held(constraint: Constraint, **fields: Any) -> Generate:
    given: dict[str, Any] = {"stop": (IM_END,), "max_tokens": 200} | fields
    made = request(PROMPT, **given)
    return msgspec.structs.replace(made, constraint=constraint)


def letters(count: int) -> Constraint:
    return Constraint(schema=json.dumps({"enum": [letter * count for letter in "ab"]}))


def text_of(made: Completion) -> str:
    """Return the text without the token that ended it."""
    assert made.finish == "stop"
    assert made.tokens[-1] == IM_END
    return TEXT.tokenizer.decode(made.tokens[:-1])


def calls_in(made: Completion, asked: CompletionRequest) -> list[dict[str, Any]]:
    """Return the calls that a gateway reads in an answer, which must consist of them alone."""
    read = GatewayCompletion(TEXT, asked, b"", "call", 0)
    read.feed(Tokens(version=0, tokens=pack_tokens(made.tokens), logprobs=pack_logprobs(made.logprobs)))
    read.end(FinishReason.STOP)
    assert read.text() == ""
    return [call["function"] for call in read.calls()]


async def test_a_vllm_with_a_tokenizer_can_hold_answers_to_a_form(stage: Stage) -> None:
    assert stage.backend.constrains


@pytest.mark.parametrize("seed", range(3))
async def test_an_answer_is_json_of_its_schema(stage: Stage, seed: int) -> None:
    value = json.loads(text_of(await stage.answer(Constraint(schema=json.dumps(ANSWER)), seed=seed)))
    assert isinstance(value["sunny"], bool)
    assert value["wind"] in ("north", "west")


async def test_logprobs_are_those_of_the_tokens_that_the_form_leaves_at_the_given_temperature(stage: Stage) -> None:
    """Where all that is left is reported, it adds up to 1, and is as far apart as in the model."""
    made = await stage.answer(Constraint(schema='{"enum": [true, false]}'), top_logprobs=20, temperature=2.0)
    free = torch.log_softmax(logits(stage.models[0], made.tokens) / 2.0, dim=-1)
    assert text_of(made) in ("true", "false")
    for at, (token, logprob, row) in enumerate(zip(made.tokens, made.logprobs, made.top)):
        left = dict(row)
        assert sum(torch.tensor(list(left.values())).exp()) == pytest.approx(1, abs=1e-4)
        assert left[token] == pytest.approx(logprob, abs=1e-5)
        renormalised = torch.log_softmax(free[at][list(left)], dim=-1)
        assert list(left.values()) == pytest.approx(renormalised.tolist(), abs=1e-4)
        assert logprob > float(free[at, token]) + 1, "the policy itself finds this token less likely"
    assert made.logprobs[-1] == pytest.approx(0, abs=1e-6), "only the end is left"


def logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([[*PROMPT, *tokens]])).logits
    return found[0][len(PROMPT) - 1 : -1]


@pytest.mark.parametrize("seed", range(3))
async def test_a_forced_call_is_one_that_the_gateway_reads(stage: Stage, seed: int) -> None:
    constraint = constraint_of(FORCED, TEXT.renderer, pack_tokens(PROMPT))
    calls = calls_in(await stage.answer(constraint, seed=seed, max_tokens=400), FORCED)
    assert {call["name"] for call in calls} <= {"weather", "forecast"}
    assert all(set(json.loads(call["arguments"])) == {"sunny", "wind"} for call in calls)


async def test_a_named_tool_is_called_once_where_one_call_is_asked_for(stage: Stage) -> None:
    named = msgspec.structs.replace(
        FORCED, demands=(Demand("tool_choice", tools=("forecast",)),), one_call="parallel_tool_calls"
    )
    constraint = constraint_of(named, TEXT.renderer, pack_tokens(PROMPT))
    answer = await stage.client.ask(stage.backend, held(constraint, n=2))
    for made in answer.choices.values():
        assert text_of(made).count("<tool_call>") == 1
        assert [call["name"] for call in calls_in(made, FORCED)] == ["forecast"]


async def test_reasoning_may_come_before_the_form_and_has_to_end(stage: Stage) -> None:
    """Its end is a letter here: with these weights any text is as likely as any other."""
    begun = Constraint(schema='{"enum": [1, 2]}', thought="e")
    value = text_of(await stage.answer(begun, max_tokens=400)).partition("e")[2]
    assert value.strip() in ("1", "2")
    either = Constraint(schema='{"enum": [1, 2]}', thinks="[", thought="e")
    first = (await stage.answer(either, max_tokens=1, top_logprobs=20)).top[0]
    assert {TEXT.tokenizer.decode([token]) for token, _ in first} == {"1", "2", "["}


@pytest.mark.parametrize(
    "schema", ['{"type": "array", "items": {"type": "integer"}, "uniqueItems": true}', '{"type": "text"}', "{"]
)
async def test_a_schema_that_cannot_be_held_is_refused(stage: Stage, schema: str) -> None:
    fault = await stage.client.refused(stage.backend, held(Constraint(schema=schema)))
    assert (fault.code, fault.retry) == ("malformed", False)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_schema_at_which_the_engine_fails_is_refused_and_not_tried_elsewhere(
    stage: Stage, stream: bool
) -> None:
    """xgrammar 0.2.8 compiles no pattern that repeats for so long, and finds that out after the request is taken."""
    form = Constraint(schema='{"type": "string", "pattern": "^[ab]{300}$"}')
    fault = await stage.client.refused(stage.backend, msgspec.structs.replace(held(form), stream=stream))
    assert (fault.code, fault.retry) == ("unsupported", False)
    assert text_of(await stage.answer(letters(1))) in ('"a"', '"b"')


async def test_answers_beside_one_that_is_held_to_a_form_are_drawn_freely(stage: Stage) -> None:
    form = letters(30)
    tickets = [stage.client.add(stage.backend, held(form)), stage.client.add(stage.backend, request(PROMPT))]
    beside = [(await stage.client.finished(ticket)).only for ticket in tickets]
    assert len(json.loads(text_of(beside[0]))) == 30
    assert worst_difference(stage.models[0], PROMPT, beside[1]) < 1e-4


async def test_a_form_is_kept_while_weights_change(stage: Stage) -> None:
    form = letters(300)
    ticket = stage.client.add(stage.backend, msgspec.structs.replace(held(form, max_tokens=400), stream=True))
    await stage.client.until(lambda: stage.client.sampled(ticket) > 3)
    await stage.backend.load(Policy(stage.folders[1], 1, 1, CONTEXT), ignore_stage)
    made = (await stage.client.finished(ticket)).only
    await stage.backend.load(Policy(stage.folders[0], 1, 2, CONTEXT), ignore_stage)  # as the other tests expect
    assert set(made.versions) == {0, 1}
    assert len(json.loads(text_of(made))) == 300
    rows = [reference_logprobs(model, PROMPT, made.tokens) for model in stage.models]
    for at, (version, token) in enumerate(zip(made.versions, made.tokens)):
        assert made.logprobs[at] >= float(rows[version][at, token]) - 1e-4, "what is left can only be likelier"
