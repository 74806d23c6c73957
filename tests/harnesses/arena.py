"""A hive whose model is scripted, and an episode of it that an unmodified harness plays."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bombus.bus import Bus
from bombus.hive.generation import Fault, Generate
from bombus.hive.records import CallRecord, unpack_tokens
from tests.gateway.openai_hive import FILES, IM_END, MODEL, TEXT, GatewayHive, Send, gateway_hive, says, tokens_of
from tests.harnesses.catalogue import Harness
from tests.harnesses.catalogue.harness import Place
from tests.harnesses.evidence import Evidence, evidence_of
from tests.harnesses.install import bin_of
from tests.harnesses.player import OUTPUT, TASK, answer, shown
from tests.harnesses.process import Ended, run, variables_of
from tests.harnesses.relay import ClosedProxy, Exchange, Failure, Relay, closed_proxy, relay_to

PROGRAMS = Path(__file__).parent / "programs"
CONTEXT = 262_144
JOB: dict[str, Any] = {
    "bombus": {
        "model": {"path": MODEL, "tools": "hermes"},
        "rollout": {
            "max_prompt_length": 200_000,
            "max_response_length": 50_000,
            "max_response_length_in_one_turn": 4096,
            "max_model_len": CONTEXT,
        },
    }
}
LONG_FILES = {**FILES, "config.json": b'{"max_position_embeddings": %d, "vocab_size": 420}' % CONTEXT}
ALIVE_S = 1.0
PORTION = 12  # tokens of a frame


@dataclass
class ScriptedModel:
    """Samples what the player says. `sampled` has the tokens of each generation, by episode.

    The first `faults` generations fail, as on a replica that breaks.
    """

    sampled: dict[str, list[list[int]]] = field(default_factory=dict)
    faults: int = 0

    async def play(self, request: Generate, send: Send) -> None:
        if self.faults:
            self.faults -= 1
            await send(Fault(why="the scripted replica fails", retry=True))
            return
        prompt = shown(TEXT.tokenizer.decode(unpack_tokens(request.prompt), with_specials=True))
        text = answer(prompt)
        tokens = tokens_of(text)[: request.sampling.max_tokens]
        self.sampled.setdefault(request.episode, []).append(tokens)
        # Calls that a model makes at once arrive at once: a stream has to keep them apart.
        portion = 0 if text.count("<tool_call>") > 1 else PORTION
        finish = "stop" if tokens[-1] == IM_END else "length"
        await says(tokens, portion=portion, finish=finish)(request, send)


@dataclass(frozen=True, repr=False)
class Played:
    """An episode, as the harness, the relay, the model and the log saw it."""

    ended: Ended
    exchanges: list[Exchange]
    hosts: list[str]
    sampled: list[list[int]]
    evidence: Evidence
    output: str  # what the harness was asked to leave in its workspace

    @property
    def is_finished(self) -> bool:
        return self.ended.code == 0 and self.output == OUTPUT

    def __repr__(self) -> str:
        """Return what one needs to know of an episode that went wrong."""
        evidence = self.evidence
        lines = [f"exit code {self.ended.code}", *map(str, self.exchanges), *self.hosts]
        calls = f"{evidence.calls} calls, {evidence.auxiliary_calls} of them auxiliary calls"
        lines += [f"{calls}, {evidence.sequences} sequences, lost {evidence.lost}, {evidence.twice}"]
        lines += map(str, evidence.rewrites)
        return "\n".join([*lines, "--- output", self.ended.output])


class Arena:
    """A hive, the relay in front of its gateway, and a proxy that lets nothing out."""

    def __init__(self, hive: GatewayHive, relay: Relay, proxy: ClosedProxy) -> None:
        self.hive = hive
        self.relay = relay
        self.proxy = proxy
        self.model = ScriptedModel()
        hive.replica.otherwise = self.model.play

    async def play(
        self, harness: Harness, way: str, folder: Path, failures: Mapping[int, Failure] | None = None
    ) -> Played:
        """Let a harness play one episode in an empty folder. `failures` are those of the relay."""
        home, workspace = folder / "home", folder / "workspace"
        (home / "tmp").mkdir(parents=True)
        workspace.mkdir()
        episode, key = await self.hive.claim()
        self.relay.failures = failures or {}
        place = Place(
            url=self.relay.url,
            key=key,
            task=TASK.format(workspace=workspace),
            workspace=str(workspace),
            home=str(home),
            bin=str(bin_of(harness.environment)),
            programs=str(PROGRAMS),
            way=way,
        )
        for name, text in harness.files.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(place.filled(text))
        own = {name: place.filled(value) for name, value in harness.variables.items()}
        variables = variables_of(home, bin_of(harness.environment), self.proxy.url, own)
        ended = await run([place.filled(word) for word in harness.command], workspace, variables)
        sampled = self.model.sampled.get(episode, [])
        records = await self._records(episode, len(sampled))
        output = workspace / "squares.txt"
        return Played(
            ended=ended,
            exchanges=list(self.relay.exchanges),
            hosts=list(self.proxy.asked),
            sampled=sampled,
            evidence=evidence_of(records, lambda tokens: TEXT.tokenizer.decode(tokens, with_specials=True)),
            output=output.read_text() if output.is_file() else "",
        )

    async def _records(self, episode: str, count: int) -> list[CallRecord]:
        """Return the calls of an episode, once there are `count`, or those that there are after some seconds."""
        try:
            return await self.hive.records(episode, count)
        except TimeoutError:
            return await self.hive.records(episode, 0)


@asynccontextmanager
async def arena_of(bus: Bus) -> AsyncIterator[Arena]:
    async with gateway_hive(bus, JOB, LONG_FILES) as hive, closed_proxy() as proxy, relay_to(hive.base_url) as relay:
        alive = asyncio.create_task(_stay_alive(hive))
        try:
            yield Arena(hive, relay, proxy)
        finally:
            alive.cancel()


async def _stay_alive(hive: GatewayHive) -> None:
    """Report the replica as real ones do: harnesses take longer than the hive bears silence."""
    while True:
        await hive.alive("replica-1", hive.replica)
        await asyncio.sleep(ALIVE_S)
