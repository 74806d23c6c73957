"""Doubles of servers that strangers run, over real HTTP: vLLM's `/v1/completions`, and SGLang's `/generate`.

Behind their words is our own engine with a real model, so that tokens and logprobs are true. Each can be told to lack
what the real ones may lack.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from bombus.hive.generation import Generate
from bombus.hive.records import SamplingParams, pack_tokens
from bombus.host.http_server import http_server
from bombus.host.process import listen
from bombus.weights.models import load_model
from bombus_inference.backends.torch.backend import make_engine, read_state
from bombus_inference.service import url_of
from bombus_inference.settings import EngineSettings
from tests.inference.backends.small_engines import Answer, Completion, finish, reference_logprobs

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

SETTINGS = EngineSettings(kv_cache_bytes=8 << 20, max_model_len=256)
KEY = "a key of the test"


@dataclass
class Foreign:
    """`lacks` may hold: ids, logprobs, prompts, update. `raw` logprobs are those of temperature 1."""

    folder: Path
    lacks: frozenset[str] = frozenset()
    raw: bool = False
    tokenizer_of: Path | None = None
    label: str = "default"
    asked: list[dict[str, Any]] = field(default_factory=list)
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.hold.set()
        self.engine = make_engine(self.folder, SETTINGS, run=1, version=0)
        self.tokenizer = Tokenizer.from_file(str((self.tokenizer_of or self.folder) / "tokenizer.json"))

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = await receive()
        path = scope["path"]
        given = json.loads(body["body"]) if body.get("body") else {}
        headers = dict(scope["headers"])
        if headers.get(b"authorization") != f"Bearer {KEY}".encode():
            await answer(send, 401, {"error": "no key"})
            return
        gone = asyncio.create_task(self._until_gone(receive))
        try:
            await self._serve(path, given, send)
        finally:
            gone.cancel()

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.hung_up.set()

    async def _serve(self, path: str, given: dict[str, Any], send: Send) -> None:
        raise NotImplementedError

    async def _made(self, prompt: list[int], n: int, sampling: SamplingParams) -> list[Completion]:
        self.holding.set()
        await self.hold.wait()
        request = Generate(id="f", engine="main", run=1, prompt=pack_tokens(prompt), sampling=sampling, n=n)
        self.engine.add(1, request)
        made: Answer = finish(self.engine)[1]
        choices = [made.choices[number] for number in range(n)]
        if self.raw:
            model = load_model(self.folder)
            for choice in choices:
                rows = reference_logprobs(model, prompt, choice.tokens)
                choice.logprobs = rows.gather(1, torch.tensor(choice.tokens)[:, None]).squeeze(1).tolist()
                choice.top = [tuple(zip(*reversed([one.tolist() for one in row.topk(2)]))) for row in rows]
        return choices

    def _load(self, folder: str) -> None:
        self.engine.swap_weights(read_state(Path(folder), SETTINGS), self.engine.version + 1, 1)


class ForeignCompletions(Foreign):
    """As vLLM 0.32 answers with `return_token_ids` and `return_tokens_as_token_ids`."""

    async def _serve(self, path: str, given: dict[str, Any], send: Send) -> None:
        match path:
            case "/v1/models":
                await answer(send, 200, {"object": "list", "data": [{"id": "m", "max_model_len": 200}]})
            case "/v1/completions":
                self.asked.append(given)
                await self._complete(given, send)
            case "/weight_info" if "update" not in self.lacks:
                await answer(send, 200, {"weight_version": self.label})
            case "/collective_rpc":
                self._load(given["kwargs"]["weights_path"])
                await answer(send, 200, {"results": [None]})
            case "/update_weight_version":
                self.label = given["new_version"]
                await answer(send, 200, {"success": True, "new_version": self.label})
            case "/reset_prefix_cache":
                await answer(send, 200, {"success": True})
            case _:
                await answer(send, 404, {"detail": "Not Found"})

    async def _complete(self, given: dict[str, Any], send: Send) -> None:
        if "prompts" in self.lacks:
            await answer(send, 400, {"error": {"message": "prompt must be a string"}})
            return
        sampling = SamplingParams(
            max_tokens=given["max_tokens"],
            temperature=given["temperature"],
            top_p=given["top_p"],
            top_k=given["top_k"],
            seed=given.get("seed"),
            stop_token_ids=tuple(given["stop_token_ids"]),
            top_logprobs=given["logprobs"],
        )
        choices = await self._made(given["prompt"], given["n"], sampling)
        if not given["stream"]:
            usage = {"prompt_tokens_details": {"cached_tokens": choices[0].cached}}
            whole = [self._choice(number, made, 0, len(made.tokens)) for number, made in enumerate(choices)]
            await answer(send, 200, {"choices": whole, "usage": usage})
            return
        await begin(send, 200, b"text/event-stream")
        for number, made in enumerate(choices):
            for at in range(len(made.tokens)):
                await say(send, {"choices": [self._choice(number, made, at, at + 1)]})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def _choice(self, number: int, made: Completion, start: int, end: int) -> dict[str, Any]:
        part = slice(start, end)
        rows = [dict(row) | {token: lp} for row, token, lp in zip(made.top, made.tokens, made.logprobs)]
        tops = [{f"token_id:{token}": lp for token, lp in row.items()} for row in rows[part]]
        known = {"token_logprobs": made.logprobs[part], "top_logprobs": tops}
        return {
            "index": number,
            "text": self.tokenizer.decode(made.tokens[part], skip_special_tokens=False),
            "token_ids": None if "ids" in self.lacks else made.tokens[part],
            "logprobs": None if "logprobs" in self.lacks else known,
            "finish_reason": made.finish if end == len(made.tokens) else None,
        }


class ForeignSglang(Foreign):
    """As SGLang's documentation of its native API says."""

    async def _serve(self, path: str, given: dict[str, Any], send: Send) -> None:
        match path:
            case "/get_model_info":
                await answer(send, 200, {"model_path": str(self.folder), "is_generation": True})
            case "/generate":
                self.asked.append(given)
                await self._generate(given, send)
            case "/update_weights_from_disk":
                if "update" in self.lacks:
                    said = {"success": False, "message": "Failed to load", "num_paused_requests": 0}
                    await answer(send, 400, said)
                    return
                self._load(given["model_path"])
                self.label = given["weight_version"]
                await answer(send, 200, {"success": True, "message": "Succeeded.", "num_paused_requests": 0})
            case _:
                await answer(send, 404, {"detail": "Not Found"})

    async def _generate(self, given: dict[str, Any], send: Send) -> None:
        wanted = given["sampling_params"]
        sampling = SamplingParams(
            max_tokens=wanted["max_new_tokens"],
            temperature=wanted["temperature"],
            top_p=wanted["top_p"],
            top_k=max(0, wanted["top_k"]),
            stop_token_ids=tuple(wanted["stop_token_ids"]),
            top_logprobs=given["top_logprobs_num"],
        )
        choices = [self._choice(made) for made in await self._made(given["input_ids"], wanted["n"], sampling)]
        await answer(send, 200, choices if len(choices) > 1 else choices[0])

    def _choice(self, made: Completion) -> dict[str, Any]:
        finish = {"type": made.finish, **({"matched": made.tokens[-1]} if made.finish == "stop" else {})}
        meta: dict[str, Any] = {"id": "1", "finish_reason": finish, "cached_tokens": made.cached}
        meta |= {"weight_version": self.label, "prompt_tokens": 3, "completion_tokens": len(made.tokens)}
        if "logprobs" not in self.lacks:
            meta["output_token_logprobs"] = [[lp, token, None] for lp, token in zip(made.logprobs, made.tokens)]
            meta["output_top_logprobs"] = [[[lp, token, None] for token, lp in row] for row in made.top]
        return {"text": self.tokenizer.decode(made.tokens, skip_special_tokens=False), "meta_info": meta}


async def begin(send: Send, status: int, kind: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})


async def answer(send: Send, status: int, body: object) -> None:
    await begin(send, status, b"application/json")
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


async def say(send: Send, event: object) -> None:
    body = b"data: " + json.dumps(event).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})


@asynccontextmanager
async def serving(app: Foreign) -> AsyncIterator[str]:
    """Its URL, while the block runs."""
    bound = listen("127.0.0.1", 0)
    async with http_server(app, bound, drain_s=1):
        yield url_of(bound)
