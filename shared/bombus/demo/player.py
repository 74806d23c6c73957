"""Play episodes of a game: claim a batch in one request, play them concurrently, and report them in one request."""

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import aiohttp
import msgspec

from bombus.demo.games import CallRefused, Game, GameTask, Messages, ModelReply, Played
from bombus.hive.failures import FailureKind
from bombus.sdk.aio import AsyncSwarmClient
from bombus.sdk.types import Credentials, Task, WorkflowOutput

CALL_S = 300.0
TRIES = 3


class Player:
    """Plays with nothing but the OpenAI protocol, as any other agent could."""

    def __init__(self, client: AsyncSwarmClient, game: Game) -> None:
        self.client = client
        self.game = game
        # httpx takes 0.7 ms of CPU time for each call, and the model needs the two cores as well.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=CALL_S)
        )

    async def close(self) -> None:
        await self._http.close()

    async def claim(self, count: int, kind: Literal["train", "eval"] = "train") -> list[Credentials]:
        """Wait until the engine is rolling and has capacity, then claim `count` episodes in one request."""
        return await self.client.begin_episodes(count, episode_type=kind)

    async def play(
        self, claimed: Sequence[Credentials], tasks: Sequence[GameTask], temperature: float = 1.0
    ) -> list[Played | None]:
        """Play one claimed episode for each task, all concurrently. Return the results in the order of the tasks.

        If the infrastructure fails an episode, the episode is aborted and its result is None.
        """
        played = await asyncio.gather(
            *(
                self._one(_Model(self._http, credentials, temperature), task)
                for credentials, task in zip(claimed, tasks)
            )
        )
        ends, lost = [], []
        for credentials, task, result in zip(claimed, tasks, played):
            if result is None:
                lost.append(credentials.episode_uuid)
                continue
            reward = result.reward if result.call_rewards is None else list(result.call_rewards)
            output = WorkflowOutput(reward=reward, is_success=result.exact)
            ends.append((Task(task_id=task.id, main_query=task.prompt), credentials.episode_uuid, output))
        if lost:
            await self.client.abort_episodes(lost, failure=FailureKind.MODEL, detail="the model could not be reached")
        if ends:
            await self.client.end_episodes(ends)
        return played

    async def _one(self, model: "_Model", task: GameTask) -> Played | None:
        try:
            return await self.game.play(model, task)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError):
            return None


class _Model:
    """The model in one episode, called over the OpenAI protocol. This avoids OpenAI's SDK because a hundred agents and
    the model share two cores."""

    def __init__(self, http: aiohttp.ClientSession, credentials: Credentials, temperature: float) -> None:
        self._http = http
        self._credentials = credentials
        self._temperature = temperature

    async def chat(self, messages: Messages, max_tokens: int) -> ModelReply:
        choice = await self._post("chat/completions", {"messages": messages, "max_tokens": max_tokens})
        return ModelReply(choice["message"]["content"] or "", choice["finish_reason"] == "stop")

    async def complete(self, prompt: str, max_tokens: int) -> ModelReply:
        choice = await self._post("completions", {"prompt": prompt, "max_tokens": max_tokens})
        return ModelReply(choice["text"], choice["finish_reason"] == "stop")

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        credentials = self._credentials
        url = f"{credentials.base_url}/{path}"
        payload = msgspec.json.encode({"model": credentials.model, "temperature": self._temperature, **body})
        for attempt in range(TRIES):
            headers = {
                "authorization": f"Bearer {credentials.api_key}",
                "content-type": "application/json",
                # The OpenAI SDK sends this too. With it, the retry of a recorded call gets the recorded answer.
                "x-stainless-retry-count": str(attempt),
            }
            is_last = attempt == TRIES - 1
            try:
                async with self._http.post(url, data=payload, headers=headers) as response:
                    if 400 <= response.status < 500:
                        raise CallRefused(msgspec.json.decode(await response.read())["error"]["message"])
                    if response.status != 503 or is_last:
                        response.raise_for_status()
                        choice: dict[str, Any] = msgspec.json.decode(await response.read())["choices"][0]
                        return choice
            except aiohttp.ClientConnectionError:  # an idle connection may be closed just as it is reused
                if is_last:
                    raise
            await asyncio.sleep(0.5 * 2**attempt)
        raise AssertionError("the last try returns or raises")
