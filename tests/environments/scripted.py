"""A model that tests script: an OpenAI-compatible server as a transport of httpx, in this process."""

import asyncio
import json
from collections import deque
from collections.abc import Sequence
from typing import Any

import httpx

from bombus import Credentials

CREDENTIALS = Credentials(base_url="http://model.test/v1", api_key="sk-1", model="m", episode_uuid="e1.secret")


def calls(*made: tuple[str, object], text: str | None = None) -> dict[str, Any]:
    """Return the message that calls tools, each with its arguments as an object, or as text that may be anything."""
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
                },
            }
            for number, (name, arguments) in enumerate(made)
        ],
    }


def completion(
    message: str | dict[str, Any], prompt: int = 10, tokens: int = 5, finish: str = "stop", id: str = "1"
) -> httpx.Response:
    """Return the response with an answer, and its usage."""
    whole = message if isinstance(message, dict) else {"role": "assistant", "content": message, "refusal": None}
    body = {
        "id": f"chatcmpl-{id}",
        "choices": [{"index": 0, "message": whole, "finish_reason": finish}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": tokens},
    }
    return httpx.Response(200, json=body)


Reply = str | dict[str, Any] | httpx.Response | Exception


class ScriptedModel(httpx.AsyncBaseTransport):
    """Gives one reply after another, then `otherwise`. `requests` has the bodies, `headers` what came with them."""

    def __init__(self, *replies: Reply, otherwise: Reply = "done") -> None:
        self.replies = deque(replies)
        self.otherwise = otherwise
        self.requests: list[dict[str, Any]] = []
        self.headers: list[httpx.Headers] = []
        self.asked = asyncio.Event()
        self.hangs = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(json.loads(await request.aread()))
        self.headers.append(request.headers)
        self.asked.set()
        if self.hangs:
            await asyncio.Event().wait()
        reply = self.replies.popleft() if self.replies else self.otherwise
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, httpx.Response):
            return reply
        return completion(reply, id=str(len(self.requests)))

    def shown(self, request: int) -> Sequence[str]:
        """Return what the tools gave back, as the model was shown it in a request."""
        return [each["content"] for each in self.requests[request]["messages"] if each["role"] == "tool"]
