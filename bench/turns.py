"""What a turn costs on a long history, in each dialect: the gateway's CPU, and what the replica computes again.

One `bombus up` with SmolLM2's tokenizer and template, and weights so small that they cost nothing. The history is that
of a coding agent: tools, and pairs of a call and its result. Each turn sends it all again with some 48 tokens more and
gets at most 16: 64 new tokens. The dialects, and the short and the long history, take turns.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.processes import cpu_ns, process_of
from bombus import AsyncSwarmClient, Job
from bombus.demo import hive
from bombus.weights.models import SMOLLM2, resolve_tokenizer

ROUNDS = 5  # with episodes of their own, so that short histories stay short
SAMPLED = 16
ASKED_WORDS = 42  # some 48 tokens with what the template puts around them
RESULT_WORDS = 48
CONTEXT = 65_536
TEXT = "the quick brown fox jumps over a lazy dog def return import self value list of files in src main test"
WORDS = TEXT.split()

Json = dict[str, Any]


def small_model(folder: Path) -> str:
    """Write a model with SmolLM2's tokenizer and chat template, and weights of two layers of 32."""
    tokenizer = resolve_tokenizer(SMOLLM2)
    config = json.loads((tokenizer / "config.json").read_text())
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=config["vocab_size"],
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        if (tokenizer / name).is_file():
            (folder / name).write_bytes((tokenizer / name).read_bytes())
    return str(folder)


@dataclass
class History:
    """A conversation as its harness keeps it, in the words of chat completions."""

    tools: list[Json]
    system: str
    messages: list[Json]

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})


def history_of(pairs: int, tools: int, rng: random.Random) -> History:
    """Make a history with so many calls and results, and so many tools."""

    def text(words: int) -> str:
        return " ".join(rng.choices(WORDS, k=words))

    path = {"type": "object", "properties": {"path": {"type": "string", "description": text(10)}}, "required": ["path"]}
    offered = [{"name": f"tool_{at}", "description": text(60), "parameters": path} for at in range(tools)]
    messages: list[Json] = [{"role": "user", "content": text(50)}]
    for at in range(pairs):
        call = {"name": f"tool_{at % max(tools, 1)}", "arguments": json.dumps({"path": text(3)})}
        messages.append({"role": "assistant", "id": f"call_{at}", "call": call})
        messages.append({"role": "tool", "id": f"call_{at}", "content": text(RESULT_WORDS)})
    return History(offered, text(60), messages)


# ---- the dialects ----------------------------------------------------------------------------------------------------


class Chat:
    name = "chat"
    path = "/v1/chat/completions"

    def body(self, history: History) -> Json:
        messages = [{"role": "system", "content": history.system}, *map(self._message, history.messages)]
        tools = [{"type": "function", "function": tool} for tool in history.tools]
        return {"messages": messages, "tools": tools, "max_tokens": SAMPLED}

    def _message(self, message: Json) -> Json:
        if "call" in message:
            call = {"id": message["id"], "type": "function", "function": message["call"]}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        if message["role"] == "tool":
            return {"role": "tool", "tool_call_id": message["id"], "content": message["content"]}
        return message

    def read(self, answer: Json) -> tuple[str, int, int]:
        """Return the text of an answer, and how many tokens its prompt had and how many of them were cached."""
        usage = answer["usage"]
        text = answer["choices"][0]["message"]["content"] or ""
        return text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


class Messages:
    name = "messages"
    path = "/v1/messages"

    def body(self, history: History) -> Json:
        tools = [
            {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
            for tool in history.tools
        ]
        messages = [self._message(message) for message in history.messages]
        return {"system": history.system, "messages": messages, "tools": tools, "max_tokens": SAMPLED}

    def _message(self, message: Json) -> Json:
        if "call" in message:
            call = message["call"]
            block = {"type": "tool_use", "id": message["id"], "name": call["name"]}
            return {"role": "assistant", "content": [block | {"input": json.loads(call["arguments"])}]}
        if message["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": message["id"], "content": message["content"]}
            return {"role": "user", "content": [block]}
        return {"role": message["role"], "content": [{"type": "text", "text": message["content"]}]}

    def read(self, answer: Json) -> tuple[str, int, int]:
        usage = answer["usage"]
        text = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
        cached = usage["cache_read_input_tokens"]
        return text, usage["input_tokens"] + cached, cached


class Responses:
    name = "responses"
    path = "/v1/responses"

    def body(self, history: History) -> Json:
        tools = [{"type": "function", "strict": False, **tool} for tool in history.tools]
        items = [self._item(message) for message in history.messages]
        return {"instructions": history.system, "input": items, "tools": tools, "max_output_tokens": SAMPLED}

    def _item(self, message: Json) -> Json:
        if "call" in message:
            return {"type": "function_call", "call_id": message["id"], **message["call"]}
        if message["role"] == "tool":
            return {"type": "function_call_output", "call_id": message["id"], "output": message["content"]}
        part = {"type": "output_text" if message["role"] == "assistant" else "input_text", "text": message["content"]}
        return {"type": "message", "role": message["role"], "content": [part]}

    def read(self, answer: Json) -> tuple[str, int, int]:
        usage = answer["usage"]
        items = [item for item in answer["output"] if item["type"] == "message"]
        text = "".join(part["text"] for item in items for part in item["content"])
        return text, usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


Dialect = Chat | Messages | Responses
DIALECTS: Sequence[Dialect] = (Chat(), Messages(), Responses())


# ---- the turns -------------------------------------------------------------------------------------------------------


@dataclass
class Line:
    """One episode: what its turns cost."""

    dialect: Dialect
    key: str
    history: History
    tokens: int = 0
    cpu_ms: list[float] = field(default_factory=list)
    took_ms: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)  # tokens of the prompt that were not cached


class Bench:
    def __init__(self, http: httpx.AsyncClient, gateway: int) -> None:
        self._http = http
        self._gateway = gateway
        self._rng = random.Random(1)

    async def turn(self, line: Line, measured: bool = True) -> None:
        line.history.ask(" ".join(self._rng.choices(WORDS, k=ASKED_WORDS)))
        body = json.dumps({"model": "policy", **line.dialect.body(line.history)}).encode()
        headers = {"authorization": f"Bearer {line.key}", "content-type": "application/json"}
        before, began = cpu_ns(self._gateway), time.perf_counter()
        reply = await self._http.post(line.dialect.path, content=body, headers=headers)
        took = time.perf_counter() - began
        spent = cpu_ns(self._gateway) - before
        assert reply.status_code == 200, reply.text
        text, tokens, cached = line.dialect.read(reply.json())
        line.history.answer(text)
        line.tokens = tokens
        if measured:
            line.cpu_ms.append(spent / 1e6)
            line.took_ms.append(1e3 * took)
            line.computed.append(tokens - cached)

    async def round(self, keys: Sequence[str], sizes: Sequence[tuple[int, int]], turns: int) -> list[Line]:
        """Play an episode of each dialect for each size of history, which takes turns with the others."""
        left = iter(keys)
        lines = [Line(each, next(left), history_of(*size, random.Random(0))) for size in sizes for each in DIALECTS]
        for line in lines:
            for _ in range(2):
                await self.turn(line, measured=False)
        for _ in range(turns):
            for line in lines:
                await self.turn(line)
        return lines


def job_of(model: str) -> Job:
    """Return a job for conversations of up to `CONTEXT` tokens, none of which is trained."""
    lengths = {
        "max_prompt_length": 48_000, "max_response_length": 16_000,
        "max_response_length_in_one_turn": 64, "max_model_len": CONTEXT,
    }  # fmt: skip
    bombus: dict[str, Json] = {"rollout": lengths, "model": {"path": model, "tools": "hermes"}}
    return Job(model=model, batch_size=1000, num_repeat=2, bombus=bombus)


async def run(turns: int, sizes: Sequence[tuple[int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = small_model(Path(folder) / "model")
        async with hive.running(Path(folder), threads=1) as url, AsyncSwarmClient(url) as client:
            await client.auto_sync_train_config_and_start_engine(job_of(model))
            lines: list[Line] = []
            async with httpx.AsyncClient(base_url=url, timeout=600) as http:
                bench = Bench(http, process_of(os.getpid(), "gateway"))
                for _ in range(ROUNDS):
                    keys = [claimed.api_key for claimed in await client.begin_episodes(2 * len(DIALECTS))]
                    lines += await bench.round(keys, sizes, turns)
                    print(".", end="", flush=True)
    print()
    report(lines)


def report(lines: Sequence[Line]) -> None:
    half = len(DIALECTS)
    costs = [statistics.median(cpu for line in lines[at :: 2 * half] for cpu in line.cpu_ms) for at in range(2 * half)]
    for at, cost in enumerate(costs):
        short, chat = costs[at % half], costs[at - at % half]
        same = lines[at :: 2 * half]
        print(
            f"{f'{same[0].dialect.name}, {same[0].tokens:,} tokens':24}  gateway CPU {cost:6.2f} ms a turn"
            f"  {cost / short:4.2f} of the short history's  {cost / chat:4.2f} of chat's"
            f"  replica computed {statistics.median(new for line in same for new in line.computed):4.0f} tokens"
            f"  a turn took {statistics.median(took for line in same for took in line.took_ms):6.1f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=8, help="measured in each of the rounds")
    parser.add_argument("--pairs", type=int, default=210, help="calls and results in the long history")
    parser.add_argument("--tools", type=int, default=60, help="of the long history")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asyncio.run(run(args.turns, ((0, 1), (args.pairs, args.tools))))


if __name__ == "__main__":
    main()
