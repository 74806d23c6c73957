"""Doubles of external servers, over real HTTP: vLLM's `/v1/completions`, and SGLang's `/generate`.

Our own engine with a real model generates for them, so that tokens and logprobs are true. Each can be made to lack what
the real ones may lack.
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
from bombus.machine.advertising import url_of
from bombus.machine.http_server import http_server
from bombus.machine.process import listen
from bombus.weights.models import load_model
from bombus_inference.backends.torch.backend import load_policy, read_state
from bombus_inference.backends.torch.engine import Engine
from bombus_inference.settings import ComputeSettings
from tests.inference.backends.small_engines import Answer, Completion, finish, reference_logprobs

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

SETTINGS = ComputeSettings(kv_cache_bytes=8 << 20, max_model_len=256)
KEY = "a key of the test"


@dataclass
class ExternalServer:
    """`lacks` may contain ids, logprobs, prompts and update. With `raw`, logprobs are those of temperature 1."""

    folder: Path
    lacks: frozenset[str] = frozenset()
    raw: bool = False
    tokenizer_of: Path | None = None
    label: str = "default"
    requests: list[dict[str, Any]] = field(default_factory=list)
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.hold.set()
        self.engine = Engine(load_policy(self.folder, SETTINGS), SETTINGS, run=1, version=0)
        self.tokenizer = Tokenizer.from_file(str((self.tokenizer_of or self.folder) / "tokenizer.json"))

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        message = await receive()
        path = scope["path"]
        body = json.loads(message["body"]) if message.get("body") else {}
        headers = dict(scope["headers"])
        if headers.get(b"authorization") != f"Bearer {KEY}".encode():
            await answer(send, 401, {"error": "no key"})
            return
        watching = asyncio.create_task(self._watch(receive))
        try:
            await self._serve(path, body, send)
        finally:
            watching.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.disconnected.set()

    async def _serve(self, path: str, body: dict[str, Any], send: Send) -> None:
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

    def _scores(self, prompt: list[int]) -> list[float]:
        """Return the logprobs of all tokens of a prompt but the first."""
        sampling = SamplingParams(max_tokens=0)
        prompted = Generate(
            id="s", engine="main", run=1, prompt=pack_tokens(prompt), sampling=sampling, prompt_logprobs=True
        )
        self.engine.add(2, prompted)
        return finish(self.engine)[2].prompt_logprobs[1:]

    def _load(self, folder: str) -> None:
        self.engine.swap_weights(read_state(Path(folder), SETTINGS), self.engine.version + 1, 1)


class ExternalCompletions(ExternalServer):
    """Answers like vLLM 0.32 with `return_token_ids` and `return_tokens_as_token_ids`."""

    async def _serve(self, path: str, body: dict[str, Any], send: Send) -> None:
        match path:
            case "/v1/models":
                await answer(send, 200, {"object": "list", "data": [{"id": "m", "max_model_len": 200}]})
            case "/v1/completions":
                self.requests.append(body)
                await self._complete(body, send)
            case "/weight_info" if "update" not in self.lacks:
                await answer(send, 200, {"weight_version": self.label})
            case "/collective_rpc":
                self._load(body["kwargs"]["weights_path"])
                await answer(send, 200, {"results": [None]})
            case "/update_weight_version":
                self.label = body["new_version"]
                await answer(send, 200, {"success": True, "new_version": self.label})
            case "/reset_prefix_cache":
                await answer(send, 200, {"success": True})
            case _:
                await answer(send, 404, {"detail": "Not Found"})

    async def _complete(self, body: dict[str, Any], send: Send) -> None:
        if "prompts" in self.lacks:
            await answer(send, 400, {"error": {"message": "prompt must be a string"}})
            return
        if "prompt_logprobs" in body and "scores" not in self.lacks:
            pairs = zip(body["prompt"][1:], self._scores(body["prompt"]))
            rows = [None, *({str(token): {"logprob": logprob, "rank": 1}} for token, logprob in pairs)]
            await answer(send, 200, {"choices": [{"index": 0, "text": "", "prompt_logprobs": rows}]})
            return
        if "prompt_logprobs" in body:
            await answer(send, 400, {"error": {"message": "prompt_logprobs is not supported"}})
            return
        sampling = SamplingParams(
            max_tokens=body["max_tokens"],
            temperature=body["temperature"],
            top_p=body["top_p"],
            top_k=body["top_k"],
            seed=body.get("seed"),
            stop_token_ids=tuple(body["stop_token_ids"]),
            top_logprobs=body["logprobs"],
        )
        choices = await self._made(body["prompt"], body["n"], sampling)
        if not body["stream"]:
            usage = {"prompt_tokens_details": {"cached_tokens": choices[0].cached}}
            parts = [self._choice(number, made, 0, len(made.tokens)) for number, made in enumerate(choices)]
            await answer(send, 200, {"choices": parts, "usage": usage})
            return
        await begin(send, 200, b"text/event-stream")
        for number, made in enumerate(choices):
            for at in range(len(made.tokens)):
                await send_event(send, {"choices": [self._choice(number, made, at, at + 1)]})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def _choice(self, number: int, made: Completion, start: int, end: int) -> dict[str, Any]:
        part = slice(start, end)
        rows = [dict(row) | {token: lp} for row, token, lp in zip(made.top, made.tokens, made.logprobs)]
        tops = [{f"token_id:{token}": lp for token, lp in row.items()} for row in rows[part]]
        logprobs = {"token_logprobs": made.logprobs[part], "top_logprobs": tops}
        return {
            "index": number,
            "text": self.tokenizer.decode(made.tokens[part], skip_special_tokens=False),
            "token_ids": None if "ids" in self.lacks else made.tokens[part],
            "logprobs": None if "logprobs" in self.lacks else logprobs,
            "finish_reason": made.finish if end == len(made.tokens) else None,
        }


class ExternalSglang(ExternalServer):
    """Answers like SGLang's documentation of its native API."""

    async def _serve(self, path: str, body: dict[str, Any], send: Send) -> None:
        match path:
            case "/get_model_info":
                await answer(send, 200, {"model_path": str(self.folder), "is_generation": True})
            case "/generate":
                self.requests.append(body)
                await self._generate(body, send)
            case "/update_weights_from_disk":
                if "update" in self.lacks:
                    failure = {"success": False, "message": "Failed to load", "num_paused_requests": 0}
                    await answer(send, 400, failure)
                    return
                self._load(body["model_path"])
                self.label = body["weight_version"]
                await answer(send, 200, {"success": True, "message": "Succeeded.", "num_paused_requests": 0})
            case _:
                await answer(send, 404, {"detail": "Not Found"})

    async def _generate(self, body: dict[str, Any], send: Send) -> None:
        wanted = body["sampling_params"]
        if "logprob_start_len" in body:
            prompt = body["input_ids"]
            rows = [[None, prompt[0], None]]
            if "scores" not in self.lacks:
                rows += [[logprob, token, None] for token, logprob in zip(prompt[1:], self._scores(prompt))]
            await answer(send, 200, {"text": "", "meta_info": {"input_token_logprobs": rows}})
            return
        sampling = SamplingParams(
            max_tokens=wanted["max_new_tokens"],
            temperature=wanted["temperature"],
            top_p=wanted["top_p"],
            top_k=max(0, wanted["top_k"]),
            stop_token_ids=tuple(wanted["stop_token_ids"]),
            top_logprobs=body["top_logprobs_num"],
        )
        choices = [self._choice(made) for made in await self._made(body["input_ids"], wanted["n"], sampling)]
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


async def send_event(send: Send, event: object) -> None:
    body = b"data: " + json.dumps(event).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})


@asynccontextmanager
async def serving(app: ExternalServer) -> AsyncIterator[str]:
    """Serve `app` while the block runs. Yields its URL."""
    bound = listen("127.0.0.1", 0)
    async with http_server(app, bound, drain_s=1):
        yield url_of(bound)
