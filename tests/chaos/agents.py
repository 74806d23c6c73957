"""The load: agents that play two turns with the OpenAI SDK, unmodified, and report with ours."""

import asyncio
import random

import httpx
from openai import AsyncOpenAI, OpenAIError

from bombus import Job, Task, WorkflowOutput
from bombus.sdk.aio import AsyncSwarmClient
from bombus.sdk.errors import SwarmError
from bombus.sdk.types import Credentials
from tests.chaos.ledger import Ledger

AGENTS = 8
TASKS = "abc"
CALL_S = 30.0
RETRIES = 12
IDLE_S = 60.0


def job_of(max_staleness: int) -> Job:
    return Job(
        model="tiny",
        batch_size=2,
        num_repeat=4,
        lr=1e-3,
        bombus={
            "model": {"dtype": "float32"},
            "collection": {"max_staleness": max_staleness},
            "rollout": {
                "max_prompt_length": 256,
                "max_response_length": 200,
                "max_response_length_in_one_turn": 64,
                "max_model_len": 512,
            },
        },
    )


class Agents:
    """Agents that work until `stop`; `ledger` has the answers that they got."""

    def __init__(self, url: str, seed: int, max_staleness: int) -> None:
        self.ledger = Ledger()
        self.url = url
        self._job = job_of(max_staleness)
        self._seed = seed
        self._stopping = False

    def stop(self) -> None:
        """Let each agent finish its episode, then stop."""
        self._stopping = True

    async def run(self) -> None:
        async with AsyncSwarmClient(self.url, verbose=False) as client, httpx.AsyncClient(timeout=CALL_S) as http:
            await client.auto_sync_train_config_and_start_engine(self._job)
            async with asyncio.TaskGroup() as tasks:
                for number in range(AGENTS):
                    tasks.create_task(self._work(client, http, random.Random(self._seed * 1000 + number)))

    async def _work(self, client: AsyncSwarmClient, http: httpx.AsyncClient, pick: random.Random) -> None:
        while not self._stopping:
            kind = "eval" if pick.random() < 0.05 else "train"
            try:
                _, credentials = await client.begin_episode(IDLE_S, kind, max_wait_s=20.0)  # type: ignore[arg-type]
            except SwarmError as error:
                self.ledger.troubles[f"claim: {type(error).__name__}"] += 1
                continue
            self.ledger.claims.add(credentials.episode)
            try:
                await self._play(client, _model(credentials, http), credentials, kind, pick)
            except (OpenAIError, SwarmError) as error:  # nothing was acknowledged: the episode becomes idle or is over
                self.ledger.troubles[f"{type(error).__name__}: {str(error)[:60]}"] += 1

    async def _play(
        self, client: AsyncSwarmClient, model: AsyncOpenAI, credentials: Credentials, kind: str, pick: random.Random
    ) -> None:
        episode = credentials.episode
        task = Task(task_id=pick.choice(TASKS), main_query="")
        text = ""
        messages: list[dict[str, str]] = []
        for turn in range(2):
            messages.append({"role": "user", "content": f"{task.task_id}{turn}="})
            reply = await model.chat.completions.create(model="any", messages=messages, max_tokens=8)  # type: ignore[arg-type]
            text = reply.choices[0].message.content or ""
            self.ledger.called(episode, reply.id.removeprefix("chatcmpl-"), text)
            messages.append({"role": "assistant", "content": text})
        if pick.random() < 0.05:
            await client.abort_episode(credentials.episode_uuid)
            self.ledger.aborts.add(episode)
            return
        reward = float(text.count(task.task_id)) + pick.random() / 8
        await client.end_episode(task, credentials.episode_uuid, WorkflowOutput(reward=reward))
        self.ledger.ends[episode] = reward
        if kind == "eval":
            self.ledger.evals.add(episode)


def _model(credentials: Credentials, http: httpx.AsyncClient) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=credentials.base_url,
        api_key=credentials.api_key,
        max_retries=RETRIES,
        http_client=http,  # type: ignore[arg-type]  # its own copy of httpx, with the same interface
    )
