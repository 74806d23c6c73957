"""What a turn costs at the end of a long history, in each dialect: the gateway's CPU.

One `bombus up` with SmolLM2's tokenizer and template, or with another template, and a scripted replica in place of its
own. The history is that of a coding agent: each answer is a call, which a model that thinks has thought about, and each
turn sends all again with the result of the last one. The whole history is played, and the turns after it are
measured. The dialects, and the short and the long history, take turns.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.processes import cpu_ns, process_of
from bench.scripted import scripted_replica
from bombus import AsyncSwarmClient, Job
from bombus.bus import Bus
from bombus.demo import hive
from bombus.weights.models import SMOLLM2, resolve_tokenizer
from bombus_gateway.text.rendering import TextModel, TextOptions

PAIRS, TOOLS = 240, 60  # calls with their results, and tools, of the long history
ROUNDS = 5  # with episodes of their own, so that short histories stay short
ANSWERS = 1000  # before one comes again: some models write ids of calls, and no episode has one twice
ANSWER_TOKENS = 96  # at most
RESULT_WORDS = 48
CONTEXT = 65_536
TEXT = "the quick brown fox jumps over a lazy dog def return import self value list of files in src main test"
WORDS = TEXT.split()
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")

Json = dict[str, Any]


def files_of(template: str) -> dict[str, bytes]:
    """Return a tokenizer and a chat template: SmolLM2's, or small ones for the chat template in the file `template`."""
    if template:
        from tests.templates.families import family

        return family(Path(template).read_text(), "all special").files
    folder = resolve_tokenizer(SMOLLM2)
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}


def write_model(folder: Path, files: dict[str, bytes], text: TextModel) -> None:
    """Write a model with these text files and small weights, which a hive loads and nobody computes with."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(text.tokenizer.pieces),
        bos_token_id=None,
        eos_token_id=text.renderer.stop_token_ids[0],
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    for name in FILES:
        if name in files:
            (folder / name).write_bytes(files[name])


def words(count: int, rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def tools_of(count: int) -> list[Json]:
    rng = random.Random(0)
    path = {"type": "string", "description": words(10, rng)}
    parameters = {"type": "object", "properties": {"path": path}, "required": ["path"]}
    return [{"name": f"tool_{at}", "description": words(60, rng), "parameters": parameters} for at in range(count)]


def answers_of(text: TextModel) -> list[list[int]]:
    """Return answers as the model writes them: a call each, and a thought before it where the model thinks."""
    rng, renderer = random.Random(1), text.renderer
    tools = [{"type": "function", "function": tool} for tool in tools_of(1)]
    asked: Json = {"role": "user", "content": "go on"}
    found: list[list[int]] = []
    for at in range(ANSWERS):
        function = {"name": "tool_0", "arguments": json.dumps({"path": words(3, rng)})}
        call = {"id": f"call_{at}", "type": "function", "function": function}
        said: Json = {"role": "assistant", "content": None, "tool_calls": [call]}
        thought = {"reasoning_content": words(12, rng)} if renderer.reading.reasoning else {}
        prompt = renderer.render([asked], tools)
        whole = renderer.render([asked, said | thought], tools, generate=False)
        assert whole[: len(prompt)] == prompt
        answer = whole[len(prompt) :]
        ends = [place for place, token in enumerate(answer) if token in renderer.stop_token_ids]
        found.append(answer[: ends[0] + 1])
    return found


@dataclass
class History:
    """A conversation as its harness keeps it, in the words of chat completions."""

    tools: list[Json]
    system: str
    messages: list[Json]

    def add_call(self, id: str, name: str, arguments: str) -> None:
        self.messages.append({"role": "assistant", "id": id, "call": {"name": name, "arguments": arguments}})

    def add_result(self, text: str) -> None:
        self.messages.append({"role": "tool", "id": self.messages[-1]["id"], "content": text})


def history_of(tools: int) -> History:
    rng = random.Random(2)
    return History(tools_of(tools), words(60, rng), [{"role": "user", "content": words(50, rng)}])


# ---- the dialects ----------------------------------------------------------------------------------------------------


class Chat:
    name = "chat"
    path = "/v1/chat/completions"

    def body(self, history: History) -> Json:
        messages = [{"role": "system", "content": history.system}, *map(self._message, history.messages)]
        tools = [{"type": "function", "function": tool} for tool in history.tools]
        return {"messages": messages, "tools": tools, "max_tokens": ANSWER_TOKENS}

    def _message(self, message: Json) -> Json:
        if "call" in message:
            call = {"id": message["id"], "type": "function", "function": message["call"]}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        if message["role"] == "tool":
            return {"role": "tool", "tool_call_id": message["id"], "content": message["content"]}
        return message

    def read(self, answer: Json) -> tuple[tuple[str, str, str], int]:
        """Return the call of an answer, as its id, name and arguments, and the number of tokens of its prompt."""
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        return (call["id"], call["function"]["name"], call["function"]["arguments"]), answer["usage"]["prompt_tokens"]


class Messages:
    name = "messages"
    path = "/v1/messages"

    def body(self, history: History) -> Json:
        tools = [
            {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
            for tool in history.tools
        ]
        messages = [self._message(message) for message in history.messages]
        return {"system": history.system, "messages": messages, "tools": tools, "max_tokens": ANSWER_TOKENS}

    def _message(self, message: Json) -> Json:
        if "call" in message:
            call = message["call"]
            block = {"type": "tool_use", "id": message["id"], "name": call["name"]}
            return {"role": "assistant", "content": [block | {"input": json.loads(call["arguments"])}]}
        if message["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": message["id"], "content": message["content"]}
            return {"role": "user", "content": [block]}
        return {"role": message["role"], "content": [{"type": "text", "text": message["content"]}]}

    def read(self, answer: Json) -> tuple[tuple[str, str, str], int]:
        (call,) = [block for block in answer["content"] if block["type"] == "tool_use"]
        usage = answer["usage"]
        tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
        return (call["id"], call["name"], json.dumps(call["input"])), tokens


class Responses:
    name = "responses"
    path = "/v1/responses"

    def body(self, history: History) -> Json:
        tools = [{"type": "function", "strict": False, **tool} for tool in history.tools]
        items = [self._item(message) for message in history.messages]
        return {"instructions": history.system, "input": items, "tools": tools, "max_output_tokens": ANSWER_TOKENS}

    def _item(self, message: Json) -> Json:
        if "call" in message:
            return {"type": "function_call", "call_id": message["id"], **message["call"]}
        if message["role"] == "tool":
            return {"type": "function_call_output", "call_id": message["id"], "output": message["content"]}
        part = {"type": "output_text" if message["role"] == "assistant" else "input_text", "text": message["content"]}
        return {"type": "message", "role": message["role"], "content": [part]}

    def read(self, answer: Json) -> tuple[tuple[str, str, str], int]:
        (call,) = [item for item in answer["output"] if item["type"] == "function_call"]
        return (call["call_id"], call["name"], call["arguments"]), answer["usage"]["input_tokens"]


Dialect = Chat | Messages | Responses
DIALECTS: Sequence[Dialect] = (Chat(), Messages(), Responses())


# ---- the turns -------------------------------------------------------------------------------------------------------


@dataclass
class Episode:
    """What the turns of an episode cost."""

    dialect: Dialect
    key: str
    history: History
    tokens: int = 0
    cpu_ms: list[float] = field(default_factory=list)
    took_ms: list[float] = field(default_factory=list)


class Bench:
    """A hive with a scripted replica, and a client of it."""

    def __init__(self, http: httpx.AsyncClient, client: AsyncSwarmClient, bus: Bus) -> None:
        self._http = http
        self._client = client
        self._gateway = process_of(os.getpid(), "gateway")
        self._rng = random.Random(3)
        self.bus = bus

    async def played(self, dialect: Dialect, pairs: int, tools: int) -> Episode:
        """Claim an episode that has `tools` tools, and play `pairs` calls with their results."""
        (claimed,) = await self._client.begin_episodes(1)
        episode = Episode(dialect, claimed.api_key, history_of(tools))
        for _ in range(pairs):
            await self.turn(episode, measured=False)
        return episode

    async def turn(self, episode: Episode, measured: bool = True) -> None:
        body = json.dumps({"model": "policy", **episode.dialect.body(episode.history)}).encode()
        headers = {"authorization": f"Bearer {episode.key}", "content-type": "application/json"}
        before, began = cpu_ns(self._gateway), time.perf_counter()
        reply = await self._http.post(episode.dialect.path, content=body, headers=headers)
        took = time.perf_counter() - began
        spent = cpu_ns(self._gateway) - before
        assert reply.status_code == 200, reply.text
        call, episode.tokens = episode.dialect.read(reply.json())
        episode.history.add_call(*call)
        episode.history.add_result(words(RESULT_WORDS, self._rng))
        if measured:
            episode.cpu_ms.append(spent / 1e6)
            episode.took_ms.append(1e3 * took)

    async def round(self, sizes: Sequence[tuple[int, int]], turns: int) -> list[Episode]:
        """Play an episode of each dialect for each size of history, which takes turns with the others."""
        episodes = [await self.played(each, *size) for size in sizes for each in DIALECTS]
        for _ in range(turns):
            for episode in episodes:
                await self.turn(episode)
        return episodes


def job_of(model: str, tools: Literal["template", "hermes"]) -> Job:
    """Return a job for conversations of up to `CONTEXT` tokens, none of which is trained."""
    lengths = {
        "max_prompt_length": 16_000, "max_response_length": 48_000,
        "max_response_length_in_one_turn": ANSWER_TOKENS, "max_model_len": CONTEXT,
    }  # fmt: skip
    bombus: dict[str, Json] = {"rollout": lengths, "model": {"path": model, "tools": tools}}
    return Job(model=model, batch_size=1000, num_repeat=2, bombus=bombus)


@asynccontextmanager
async def running_bench(template: str = "", durability: str = "process") -> AsyncIterator[Bench]:
    """Run a hive with a scripted replica for the block."""
    tools: Literal["template", "hermes"] = "template" if template else "hermes"  # SmolLM2's has no place for them
    files = files_of(template)
    text = TextModel(files, "", TextOptions(tools=tools))
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_model(model, files, text)
        async with hive.running(Path(folder), 1, durability) as url, AsyncSwarmClient(url) as client:
            await client.auto_sync_train_config_and_start_engine(job_of(str(model), tools))
            nats = (Path(folder) / "hive/nats-url").read_text().strip()
            async with (
                httpx.AsyncClient(base_url=url, timeout=600) as http,
                await Bus.connect(nats, "main") as bus,
                scripted_replica(bus, "main", answers_of(text), "stop"),
            ):
                yield Bench(http, client, bus)


async def run(template: str, turns: int, sizes: Sequence[tuple[int, int]]) -> None:
    episodes: list[Episode] = []
    async with running_bench(template) as bench:
        for _ in range(ROUNDS):
            episodes += await bench.round(sizes, turns)
            print(".", end="", flush=True)
    print()
    report(episodes)


def report(episodes: Sequence[Episode]) -> None:
    half = len(DIALECTS)
    costs = [
        statistics.median(cpu for episode in episodes[at :: 2 * half] for cpu in episode.cpu_ms)
        for at in range(2 * half)
    ]
    for at, cost in enumerate(costs):
        short, chat = costs[at % half], costs[at - at % half]
        same = episodes[at :: 2 * half]
        print(
            f"{f'{same[0].dialect.name}, {same[0].tokens:,} tokens':24}  gateway CPU {cost:6.2f} ms a turn"
            f"  {cost / short:4.2f} of the short history's  {cost / chat:4.2f} of chat's"
            f"  a turn took {statistics.median(took for episode in same for took in episode.took_ms):6.1f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--template", default="", help="a file with a chat template, in place of SmolLM2's")
    parser.add_argument("--turns", type=int, default=8, help="measured in each of the rounds")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="calls and results in the long history")
    parser.add_argument("--tools", type=int, default=TOOLS, help="of the long history")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asyncio.run(run(args.template, args.turns, ((4, 1), (args.pairs, args.tools))))


if __name__ == "__main__":
    main()
