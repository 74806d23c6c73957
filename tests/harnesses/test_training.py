"""Claude Code, unmodified, and a real model: `bombus rollout` plays a batch with it, which the hive trains."""

import asyncio
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from bombus.bus import Bus, Reader
from bombus.hive.events import AnyEvent, BatchReady, CallsNoted, ReplicaJoined, StepCompleted, decode_event
from bombus.hive.records import CallRecord, decode_record
from bombus_inference.settings import ComputeSettings
from tests.harnesses.cases import ASKED_FOR
from tests.harnesses.evidence import evidence_of
from tests.harnesses.install import NODE, ROOT, bin_of, is_installed
from tests.harnesses.process import variables_of
from tests.harnesses.relay import closed_proxy
from tests.replica_access import replica_headers
from tests.system.test_up import Up
from tests.test_docs import DOCS, commands

LIMIT_S = 1800.0
BLOCK = ComputeSettings().block_tokens
T = TypeVar("T")
RUNS = ASKED_FOR and is_installed(NODE)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    (tmp_path / "hive").mkdir()
    running = Up(tmp_path / "hive", "--threads", "0", "--bin-tokens", "8192")
    yield running
    running.interrupt()


def documented() -> list[str]:
    """Return the words of the command of docs/rollout.md that plays with Claude Code."""
    (command,) = [each for each in commands(DOCS / "rollout.md") if "examples/claude" in each]
    return shlex.split(command.replace("$PWD", str(ROOT)))[1:]


async def roll_out(url: str, folder: Path) -> str:
    """Run the documented command without a way to other hosts, and return what it printed."""
    async with closed_proxy() as proxy:
        own = {"PYTHONPATH": os.pathsep.join(sys.path)}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bombus", *documented(), "--url", url, "--scratch", str(folder)),
            cwd=ROOT,
            env={**os.environ, **variables_of(folder, bin_of(NODE), proxy.url, own)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(LIMIT_S):
                printed = (await process.communicate())[0].decode()
        finally:
            if process.returncode is None:
                process.kill()
        assert not proxy.asked, proxy.asked
    assert process.returncode == 0, printed
    return printed


@dataclass(frozen=True)
class Log:
    """What a hive's log has: its events, and the calls of each episode."""

    events: Sequence[AnyEvent]
    calls: Mapping[str, Sequence[CallRecord]]

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.events if isinstance(event, kind)]


async def read_log(nats: str) -> Log:
    """Read all of the log of a hive whose one run has made a step."""
    async with await Bus.connect(nats, "main") as bus, Reader(bus, bus.subjects.events_stream) as reader:
        events: list[AnyEvent] = []
        while not any(isinstance(event, StepCompleted) for event in events):
            events += [decode_event(stored.data) for stored in await reader.read()]
        calls: dict[str, list[CallRecord]] = {}
        for event in events:
            for call in event.calls if isinstance(event, CallsNoted) else ():
                (stored,) = await bus.get_many(bus.subjects.calls_stream, [call.ref.seq])
                calls.setdefault(call.episode, []).append(decode_record(stored.data, call.ref))
    return Log(events, calls)


def already_computed(calls: Sequence[CallRecord]) -> int:
    """Return how many tokens of the prompts of these calls are those of the calls that they continue."""
    whole = {call.id: call.prompt_tokens + call.completion_tokens() for call in calls}
    return sum(whole[call.parent.id] for call in calls if call.parent is not None)


async def metric(nats: str, url: str, name: str) -> float:
    async with await Bus.connect(nats, "main") as bus:
        headers = await replica_headers(bus)
    async with httpx.AsyncClient(trust_env=False, headers=headers) as client:
        text = (await client.get(f"{url}/metrics")).text
    (found,) = re.findall(rf"^bombus_inference_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    return float(found)


@pytest.mark.skipif(not RUNS, reason=f"`make test-harnesses` makes {NODE}")
async def test_claude_code_plays_a_batch_on_a_real_model_and_each_token_is_trained_once(up: Up, tmp_path: Path) -> None:
    assert "step 1 after" in await roll_out(up.url, tmp_path)
    log = await read_log(up.nats)
    (batch,), (step,), (replica,) = log.of(BatchReady), log.of(StepCompleted), log.of(ReplicaJoined)
    episodes = [log.calls[episode.episode] for group in batch.groups for episode in group.episodes]
    assert len(episodes) == 4
    for calls in episodes:
        evidence = evidence_of(calls, str)
        assert (evidence.sequences, evidence.lost, evidence.twice) == (1, (), ()), evidence
    sampled = sum(call.completion_tokens() for calls in episodes for call in calls)
    assert step.metrics["tokens_trained"] == sampled
    continued = sum(call.parent is not None for calls in episodes for call in calls)
    cached = await metric(up.nats, replica.url, "cached_tokens_total")
    assert cached >= sum(map(already_computed, episodes)) - BLOCK * continued, "a turn computes its own tokens"
