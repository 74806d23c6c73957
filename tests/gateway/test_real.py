"""The gateway as a service, with a real inference replica and a real (tiny) model."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import uvloop
from openai import AsyncOpenAI

from bombus.bus import Blobs, Bus
from bombus.bus.follow import Follower
from bombus.config.documents import parse_job
from bombus.hive import inbox
from bombus.hive.events import Weights
from bombus.hive.records import CallRecord, decode_record, unpack_logprobs
from bombus.hive.state import Phase
from bombus.hive.subjects import SIGNING_SECRET
from bombus.weights.models import load_tokenizer_files, resolve_model
from bombus_coordinator.shell import Coordinator
from bombus_gateway import service
from bombus_gateway.keys import Keys
from bombus_gateway.settings import GatewaySettings
from bombus_inference import service as inference
from bombus_inference.settings import ComputeSettings, InferenceSettings
from bombus_trainer.backends.torch.model import PolicyModel
from bombus_trainer.data.packing import pack
from bombus_trainer.data.sequences import TokenSequence, merge_calls
from tests.conftest import SMALL_STREAMS
from tests.gateway.openai_hive import ENGINE, chain_of, new_id
from tests.patience import PATIENCE_S
from tests.trainer.small_batches import item, tiny_settings

JOB = {
    "bombus": {
        "model": {"path": "tiny"},
        "rollout": {
            "max_prompt_length": 200,
            "max_response_length": 300,
            "max_response_length_in_one_turn": 24,
            "history": "keep",  # an untrained model may end an answer with <eos>, where its template has <|im_end|>
        },
    }
}


@pytest.fixture
def settings(nats_url: str, hive: str, free_tcp_port: int) -> GatewaySettings:
    return GatewaySettings(hive=hive, bus_url=nats_url, port=free_tcp_port)


async def boot(bus: Bus, follower: Follower, model: Path) -> int:
    """Act as the operator and the trainer until the engine is ROLLING; return the run."""
    await bus.inbox.request(parse_job(JOB).to_command(new_id(), ENGINE))
    done = await bus.inbox.request(inbox.Start(id=new_id(), engine=ENGINE))
    assert isinstance(done, inbox.Done)
    opened = await bus.inbox.request(inbox.TrainerOpens(id=new_id(), engine=ENGINE, run=done.run, trainer="t1"))
    assert isinstance(opened, inbox.Done)
    await Blobs(bus).put("tokenizer-1", msgspec.msgpack.encode(load_tokenizer_files(model)))
    body = (model / "model.safetensors").read_bytes()
    weights = Weights(
        where=str(model), bytes=len(body), sha256=hashlib.sha256(body).hexdigest(), tokenizer="tokenizer-1"
    )
    await bus.inbox.send(
        inbox.WeightsSaved(
            id=new_id(), engine=ENGINE, run=done.run, step=0, trainer_epoch=opened.epoch, weights=weights
        )
    )
    await follower.wait_for(lambda hive: hive.engine(ENGINE).phase == Phase.ROLLING, PATIENCE_S)
    return done.run


@asynccontextmanager
async def everything(bus: Bus, nats_url: str, model: Path, port: int) -> AsyncIterator[tuple[Follower, int]]:
    """Run coordinator, replica and gateway as services; give a follower and the run."""
    hive = bus.subjects.hive
    coordinator, follower = Coordinator(bus), Follower(bus)
    compute = ComputeSettings(kv_cache_bytes=4 << 20, max_model_len=512, threads=1)
    replica = InferenceSettings(hive=hive, bus_url=nats_url, replica="r1", alive_every_s=0.2, compute=compute)
    running = [
        asyncio.create_task(coordinator.lead()),
        asyncio.create_task(follower.run()),
        asyncio.create_task(inference.run(replica)),
        asyncio.create_task(service.run(GatewaySettings(hive=hive, bus_url=nats_url, port=port))),
    ]
    try:
        await asyncio.wait_for(coordinator.leading.wait(), PATIENCE_S)
        run = await boot(bus, follower, model)
        yield follower, run
    finally:
        for task in reversed(running):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def ready(url: str) -> None:
    async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient() as http:
        while True:
            try:
                if (await http.get(f"{url}/health")).status_code == 200:
                    return
            except httpx.ConnectError:
                pass
            await asyncio.sleep(0.05)


async def played(settings: GatewaySettings, model: Path, turns: int, edited: bool = False) -> list[CallRecord]:
    """Play a streamed episode and return its records. Each turn but the first brings a tool's answer.

    `edited`: one more call at the end, after the harness rewrote what the model said first.
    """
    async with await Bus.connect(settings.bus_url, settings.hive, name="test") as bus:
        await bus.ensure_streams(SMALL_STREAMS)
        async with everything(bus, settings.bus_url, model, settings.port) as (follower, run):
            url = f"http://127.0.0.1:{settings.port}"
            await ready(url)
            claim = inbox.Claim(id=new_id(), engine=ENGINE, claim=new_id(), client="c1", wait_s=5.0)
            granted = await bus.inbox.request(claim)
            assert isinstance(granted, inbox.Granted)
            (episode,) = granted.episodes
            await bus.inbox.send(inbox.Touch(id=new_id(), engine=ENGINE, confirmed=(claim.claim,)))
            key = Keys(await bus.secret(SIGNING_SECRET)).sign(ENGINE, run, episode, 2**62)
            messages: Any = [{"role": "user", "content": "1=2 and so on"}]
            async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:

                async def say(seed: int) -> str:
                    stream = await client.chat.completions.create(
                        model="tiny", messages=messages, stream=True, seed=seed, max_tokens=12
                    )
                    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

                for turn in range(turns):
                    text = await say(turn)
                    messages += [{"role": "assistant", "content": text}]
                    messages += [{"role": "tool", "tool_call_id": f"t{turn}", "content": f"{turn}=ok"}]
                if edited:
                    messages[1] = {"role": "assistant", "content": "something else"}
                    await say(turns)
            calls = turns + edited
            await follower.wait_for(lambda hive: len(hive.engine(ENGINE).open[episode].calls) == calls, PATIENCE_S)
            refs = [call.ref for call in follower.hive.engine(ENGINE).open[episode].calls]
            stored = await bus.get_many(bus.subjects.calls_stream, [ref.seq for ref in refs])
            return [decode_record(found.data, ref) for found, ref in zip(stored, refs, strict=True)]


def trained(records: list[CallRecord]) -> list[TokenSequence]:
    """The sequences that a trainer makes of the records, read back from bytes as it does."""
    return list(merge_calls("e", records).sequences)


def test_a_six_turn_tool_episode_is_one_sequence_and_the_trainer_gets_the_sampled_logprobs(
    settings: GatewaySettings, tmp_path: Path
) -> None:
    model = resolve_model("tiny", cache=tmp_path)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as in production
        records = runner.run(played(settings, model, turns=6))
    (sequence,) = trained(records)
    assert sequence.tokens_T.tolist() == chain_of(records)
    sampled = [token for record in records for token in record.choices[0].token_ids()]
    assert sequence.tokens_T[sequence.loss_mask_T].tolist() == sampled
    at_T = np.flatnonzero(sequence.loss_mask_T)
    (packed,) = pack([item(sequence.tokens_T.tolist(), at_T.tolist())], 1 << 20)
    scored = PolicyModel.load(model, tiny_settings()).score(packed).logprobs_N.detach().numpy()
    recorded = np.concatenate([unpack_logprobs(record.choices[0].logprobs) for record in records])
    assert np.abs(scored - recorded).max() < 1e-4


def test_a_rewritten_history_branches_and_every_sampled_token_is_trained_once(
    settings: GatewaySettings, tmp_path: Path
) -> None:
    model = resolve_model("tiny", cache=tmp_path)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        records = runner.run(played(settings, model, turns=2, edited=True))
    sequences = trained(records)
    assert len(sequences) == 2
    assert sum(int(sequence.loss_mask_T.sum()) for sequence in sequences) == sum(
        record.completion_tokens() for record in records
    )
