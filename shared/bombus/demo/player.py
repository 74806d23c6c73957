"""Plays episodes of a game: claims a batch in one request, plays it at once, reports it in one request."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import httpx

from bombus.demo.games import Game, Messages, Played, Question, Reply
from bombus.sdk.aio import AsyncSwarmClient
from bombus.sdk.types import Credentials, Task, WorkflowOutput

CALL_S = 300.0
TRIES = 3
POOLS = 64


class Player:
    """Speaks the plain OpenAI protocol to the model; anything else that does could play in its place."""

    def __init__(self, client: AsyncSwarmClient, game: Game) -> None:
        self.client = client
        self.game = game
        # httpx looks at every connection of a pool for every request: many small pools, or the client is what is slow.
        tls = httpx.create_ssl_context()
        self._https = [httpx.AsyncClient(timeout=CALL_S, verify=tls) for _ in range(POOLS)]

    async def close(self) -> None:
        for http in self._https:
            await http.aclose()

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
                self._one(_Model(http, credentials, temperature), question)
                for http, credentials, question in zip(itertools.cycle(self._https), claimed, questions)
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
        except httpx.TransportError:
            return None


class _Model:
    """The OpenAI protocol in one episode, without the SDK: a hundred agents share two cores with the model."""

    def __init__(self, http: httpx.AsyncClient, credentials: Credentials, temperature: float) -> None:
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
        asked = {"model": credentials.model, "temperature": self._temperature, **body}
        for attempt in range(TRIES):
            # The header is the OpenAI SDK's: a retry of a call that was recorded gets the recorded answer.
            headers = {"authorization": f"Bearer {credentials.api_key}", "x-stainless-retry-count": str(attempt)}
            response = await self._http.post(url, json=asked, headers=headers)
            if response.status_code != 503:
                break
            await asyncio.sleep(0.5 * 2**attempt)
        response.raise_for_status()
        choice: dict[str, Any] = response.json()["choices"][0]
        return choice
