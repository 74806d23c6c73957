"""The load: agents that play two turns with the OpenAI SDK, unmodified, and report with ours or with plain HTTP."""

import asyncio
import contextlib
import random
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from openai import AsyncOpenAI, OpenAIError

from bombus import MultiModelEpisode, Task, WorkflowOutput
from bombus.hive.failures import FailureKind
from bombus.sdk.aio import AsyncSwarmClient
from bombus.sdk.errors import BadReward, EngineOffline, SwarmError
from bombus.sdk.types import Credentials, EpisodeKind
from tests.chaos.engines import ChaosEngine
from tests.chaos.ledger import Ledger
from tests.chaos.plain import end_plainly
from tests.chaos.rewards import REFUSED, reward_of

AGENTS = 6
MULTI_MODEL_AGENTS = 2
TASKS = "abc"
CALL_S = 30.0
RETRIES = 12
IDLE_S = 60.0


class Agents:
    """Agents of one engine, which work until `stop`; `ledger` has the answers that they got."""

    def __init__(self, url: str, engine: ChaosEngine, seed: int) -> None:
        self.ledger = Ledger()
        self.engine = engine
        self._url = url
        self._seed = seed
        self._stopping = False

    def stop(self) -> None:
        """Let each agent finish its episode, then stop."""
        self._stopping = True

    async def run(self) -> None:
        name = self.engine.name
        async with (
            AsyncSwarmClient(self._url, verbose=False, engine=name) as client,
            httpx.AsyncClient(timeout=CALL_S) as http,
        ):
            await client.auto_sync_train_config_and_start_engine(self.engine.job())
            async with asyncio.TaskGroup() as tasks:
                for number in range(AGENTS):
                    pick = random.Random(f"{self._seed} {name} {number}")
                    agent = _Agent(client, http, f"{self._url}/e/{name}", self.ledger, pick)
                    tasks.create_task(self._work(agent))

    async def _work(self, agent: "_Agent") -> None:
        while not self._stopping:
            await agent.play_one()


class MultiModelAgents:
    """Two agents that play multi-model episodes on all engines until `stop`; each engine's ledger has its part."""

    def __init__(self, url: str, ledgers: Mapping[str, Ledger], seed: int) -> None:
        self._url = url
        self._ledgers = ledgers
        self._seed = seed
        self._stopping = False
        self.ended = 0

    def stop(self) -> None:
        self._stopping = True

    async def run(self) -> None:
        async with (
            AsyncSwarmClient(self._url, verbose=False) as client,
            httpx.AsyncClient(timeout=CALL_S) as http,
            asyncio.TaskGroup() as tasks,
        ):
            for number in range(MULTI_MODEL_AGENTS):
                pick = random.Random(f"{self._seed} multi {number}")
                agents = {name: _Agent(client, http, self._url, each, pick) for name, each in self._ledgers.items()}
                tasks.create_task(self._work(client, agents, pick))

    async def _work(self, client: AsyncSwarmClient, agents: Mapping[str, "_Agent"], pick: random.Random) -> None:
        while not self._stopping:
            try:
                multi = await client.begin_multi_model_episode({name: name for name in agents}, IDLE_S, max_wait_s=20.0)
            except SwarmError:  # the engines are not up yet, or there was no room on all of them
                await asyncio.sleep(pick.random())
                continue
            for name, ledger in self._ledgers.items():
                ledger.claims.add(multi[name].episode)
            try:
                await self._play(client, agents, multi, pick)
            except (OpenAIError, SwarmError) as error:
                self._ledgers[next(iter(agents))].troubles[f"multi-model: {type(error).__name__}"] += 1

    async def _play(
        self, client: AsyncSwarmClient, agents: Mapping[str, "_Agent"], multi: MultiModelEpisode, pick: random.Random
    ) -> None:
        task = pick.choice(TASKS)
        texts = {name: await agent.converse(multi[name], task) for name, agent in agents.items()}
        if pick.random() < 0.1:
            await client.abort_multi_model_episode(multi)
            for name, ledger in self._ledgers.items():
                ledger.aborts.add(multi[name].episode)
            return
        rewards = {name: reward_of(text.count(task), pick) for name, text in texts.items()}
        await client.end_multi_model_episode(Task(task_id=task), multi, rewards)
        self.ended += 1
        for name, ledger in self._ledgers.items():
            ledger.ends[multi[name].episode] = rewards[name]


@dataclass(frozen=True)
class _Agent:
    client: AsyncSwarmClient
    http: httpx.AsyncClient
    engine_url: str
    ledger: Ledger
    pick: random.Random

    async def play_one(self) -> None:
        """Play an episode. What goes wrong was not acknowledged.

        Raises `EngineOffline` when the run is over.
        """
        kind: EpisodeKind = "eval" if self.pick.random() < 0.05 else "train"
        try:
            _, credentials = await self.client.begin_episode(IDLE_S, kind, max_wait_s=20.0)
        except EngineOffline:
            raise
        except SwarmError as error:
            self.ledger.troubles[f"claim: {type(error).__name__}"] += 1
            return
        self.ledger.claims.add(credentials.episode)
        try:
            await self._play(credentials, kind)
        except (OpenAIError, SwarmError) as error:
            self.ledger.troubles[f"{type(error).__name__}: {str(error)[:60]}"] += 1
            await self._give_up(credentials)

    async def _give_up(self, credentials: Credentials) -> None:
        """Abort the episode, if it is not over, or let it become idle, as an agent that has died would."""
        if self.pick.random() < 0.5:
            with contextlib.suppress(SwarmError):
                await self.client.abort_episode(credentials.episode_uuid, failure=FailureKind.ENVIRONMENT)

    async def _play(self, credentials: Credentials, kind: EpisodeKind) -> None:
        task = self.pick.choice(TASKS)
        text = await self.converse(credentials, task)
        if self.pick.random() < 0.05:
            await self.client.abort_episode(credentials.episode_uuid)
            self.ledger.aborts.add(credentials.episode)
            return
        if self.pick.random() < 0.1:
            await self._be_refused(credentials, task)
        reward = reward_of(text.count(task), self.pick)
        await self._end(credentials, task, reward)
        self.ledger.ends[credentials.episode] = reward
        if kind == "eval":
            self.ledger.evals.add(credentials.episode)

    async def converse(self, credentials: Credentials, task: str) -> str:
        """Play two turns and return the model's last answer."""
        model = AsyncOpenAI(
            base_url=credentials.base_url,
            api_key=credentials.api_key,
            max_retries=RETRIES,
            http_client=self.http,  # type: ignore[arg-type]  # its own copy of httpx, with the same interface
        )
        text = ""
        messages: list[dict[str, str]] = []
        for turn in range(2):
            messages.append({"role": "user", "content": f"{task}{turn}="})
            reply = await model.chat.completions.create(model="any", messages=messages, max_tokens=8)  # type: ignore[arg-type]
            text = reply.choices[0].message.content or ""
            self.ledger.called(credentials.episode, reply.id.removeprefix("chatcmpl-"), text)
            messages.append({"role": "assistant", "content": text})
        return text

    async def _be_refused(self, credentials: Credentials, task: str) -> None:
        """Report a reward that no hive takes. The episode stays open."""
        reward = self.pick.choice(REFUSED)
        try:
            await self._end(credentials, task, reward)
        except BadReward:
            self.ledger.refused.setdefault(credentials.episode, []).append(reward)
        else:
            raise AssertionError(f"episode {credentials.episode} was ended with the reward {reward!r}")

    async def _end(self, credentials: Credentials, task: str, reward: float) -> None:
        if self.pick.random() < 0.5:
            output = WorkflowOutput(reward=reward)
            await self.client.end_episode(Task(task_id=task), credentials.episode_uuid, output)
        else:
            uuid = credentials.episode_uuid
            await end_plainly(self.http, self.engine_url, self.client.client_uuid, uuid, task, reward)
