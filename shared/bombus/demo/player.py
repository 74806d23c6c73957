"""Plays episodes of a game: claims a batch in one request, plays it at once, reports it in one request."""

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import aiohttp
import msgspec

from bombus.demo.games import Game, Messages, Played, Question, Reply
from bombus.sdk.aio import AsyncSwarmClient
from bombus.sdk.types import Credentials, Task, WorkflowOutput

CALL_S = 300.0
TRIES = 3


class Player:
    """Speaks the plain OpenAI protocol to the model; anything else that does could play in its place."""

    def __init__(self, client: AsyncSwarmClient, game: Game) -> None:
        self.client = client
        self.game = game
        # httpx takes 0.7 ms of a core for a call, and two cores are shared with the model.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=CALL_S)
        )

    async def close(self) -> None:
        await self._http.close()

    async def claim(self, count: int, kind: Literal["train", "eval"] = "train") -> list[Credentials]:
        """Wait until the engine rolls and has room, and claim `count` episodes in one request."""
        return await self.client.begin_episodes(count, episode_type=kind)

    async def play(
        self, claimed: Sequence[Credentials], questions: Sequence[Question], temperature: float = 1.0
    ) -> list[Played]:
        """One claimed episode for each question, all at once. An episode whose infrastructure fails is aborted and
        missing from the result."""
        played = await asyncio.gather(
            *(
                self._one(_Model(self._http, credentials, temperature), question)
                for credentials, question in zip(claimed, questions)
            )
        )
        ends, lost = [], []
        for credentials, question, result in zip(claimed, questions, played):
            if result is None:
                lost.append(credentials.episode_uuid)
                continue
            reward = result.reward if result.call_rewards is None else list(result.call_rewards)
            output = WorkflowOutput(reward=reward, is_success=result.exact)
            ends.append((Task(task_id=question.id, main_query=question.prompt), credentials.episode_uuid, output))
        if lost:
            await self.client.abort_episodes(lost, infra=True, detail="the model could not be reached")
        if ends:
            await self.client.end_episodes(ends)
        return [result for result in played if result is not None]

    async def _one(self, model: "_Model", question: Question) -> Played | None:
        try:
            return await self.game.play(model, question)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError):
            return None


class _Model:
    """The OpenAI protocol in one episode, without the SDK: a hundred agents share two cores with the model."""

    def __init__(self, http: aiohttp.ClientSession, credentials: Credentials, temperature: float) -> None:
        self._http = http
        self._credentials = credentials
        self._temperature = temperature

    async def chat(self, messages: Messages, max_tokens: int) -> Reply:
        choice = await self._ask("chat/completions", {"messages": messages, "max_tokens": max_tokens})
        return Reply(choice["message"]["content"] or "", choice["finish_reason"] == "stop")

    async def complete(self, prompt: str, max_tokens: int) -> Reply:
        choice = await self._ask("completions", {"prompt": prompt, "max_tokens": max_tokens})
        return Reply(choice["text"], choice["finish_reason"] == "stop")

    async def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        credentials = self._credentials
        url = f"{credentials.base_url}/{path}"
        asked = msgspec.json.encode({"model": credentials.model, "temperature": self._temperature, **body})
        for attempt in range(TRIES):
            headers = {
                "authorization": f"Bearer {credentials.api_key}",
                "content-type": "application/json",
                # The OpenAI SDK's: a retry of a call that was recorded gets the recorded answer.
                "x-stainless-retry-count": str(attempt),
            }
            async with self._http.post(url, data=asked, headers=headers) as response:
                if response.status != 503 or attempt == TRIES - 1:
                    response.raise_for_status()
                    choice: dict[str, Any] = msgspec.json.decode(await response.read())["choices"][0]
                    return choice
            await asyncio.sleep(0.5 * 2**attempt)
        raise AssertionError("the last try returns or raises")
