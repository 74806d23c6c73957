"""Plays episodes of a game: claims a batch in one request, plays it at once, reports it in one request."""

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import httpx

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
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._http = httpx.AsyncClient(timeout=CALL_S, limits=limits)

    async def close(self) -> None:
        await self._http.aclose()

    async def claim(self, count: int, kind: Literal["train", "eval"] = "train") -> list[Credentials]:
        """Wait until the engine rolls and has room, and claim `count` episodes in one request."""
        return await self.client.begin_episodes(count, episode_type=kind)

    async def play(
        self, claimed: Sequence[Credentials], questions: Sequence[Question], temperature: float = 1.0
    ) -> list[Played]:
        """One claimed episode for each question, all at once. An episode whose infrastructure fails is aborted and
        missing from the result."""
        played = await asyncio.gather(
            *(self._one(credentials, question, temperature) for credentials, question in zip(claimed, questions))
        )
        ends, lost = [], []
        for credentials, question, result in zip(claimed, questions, played):
            if result is None:
                lost.append(credentials.episode_uuid)
                continue
            output = WorkflowOutput(reward=result.reward, is_success=result.exact)
            ends.append((Task(task_id=question.id, main_query=question.prompt), credentials.episode_uuid, output))
        if lost:
            await self.client.abort_episodes(lost, infra=True, detail="the model could not be reached")
        if ends:
            await self.client.end_episodes(ends)
        return [result for result in played if result is not None]

    async def _one(self, credentials: Credentials, question: Question, temperature: float) -> Played | None:
        url = f"{credentials.base_url}/chat/completions"
        headers = {"authorization": f"Bearer {credentials.api_key}"}

        async def chat(messages: Messages, max_tokens: int) -> Reply:
            body: dict[str, Any] = {
                "model": credentials.model,
                "messages": messages,
                "max_tokens": max_tokens,
                "temperature": temperature,
            }
            for attempt in range(TRIES):
                retry = {"x-stainless-retry-count": str(attempt)}
                response = await self._http.post(url, json=body, headers=headers | retry)
                if response.status_code != 503:
                    break
                await asyncio.sleep(0.5 * 2**attempt)
            response.raise_for_status()
            choice = response.json()["choices"][0]
            return Reply(choice["message"]["content"] or "", choice["finish_reason"] == "stop")

        try:
            return await self.game.play(chat, question)
        except httpx.TransportError:
            return None
