"""Sampling through the routes of training clients: a real gateway and bus, a scripted replica and trainer."""

import asyncio
import math
from array import array
from typing import Any

import httpx
import pytest

from bombus.bus import Bus
from bombus.commands.audit import audited
from bombus.hive import inbox
from bombus.hive.events import CallsNoted
from bombus.hive.generation import Fault, Finished, Generate, PromptScores
from bombus.hive.records import Span, pack_logprobs, pack_tokens, unpack_tokens
from bombus.hive.state import Phase
from bombus.operations import SaveWeights
from bombus.replay.audit.audit import TO_CLIENT
from bombus.replay.source import BusSource
from bombus_gateway.operations_wire.messages import SAMPLE_RESPONSE, WireStop
from tests.gateway.openai_hive import (
    ENGINE,
    IM_END,
    TEXT,
    Send,
    every_thread_busy,
    fault,
    frame_of,
    gateway_of,
    new_id,
    says,
    tokens_of,
)
from tests.gateway.operations.scripted_trainer import OperationHive, address_of
from tests.gateway.operations.test_routes import BASE, ask, open_model, result, xorl_result
from tests.patience import PATIENCE_S, until


@pytest.fixture
async def model(hive: OperationHive, client: httpx.AsyncClient) -> str:
    """A model of Tinker's client, in a run that has a replica."""
    model = await open_model(client)
    await hive.join_replica()
    return model


async def begin(client: httpx.AsyncClient, model: str, number: int = 0, **what: str) -> str:
    """Begin a session of sampling, from the base unless `what` is another."""
    session = model.rpartition(":train:")[0]
    body = {"session_id": session, "sampling_session_seq_id": number, **(what or {"base_model": BASE})}
    name: str = (await ask(client, "create_sampling_session", **body))["sampling_session_id"]
    return name


def sample(sampler: str, seq: int = 0, prompt: tuple[int, ...] = (5, 6, 7), **more: Any) -> dict[str, Any]:
    params = {"max_tokens": 12, "temperature": 1.0, **more.pop("params", {})}
    return {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "prompt": {"chunks": [{"tokens": list(prompt), "type": "encoded_text"}]},
        "sampling_params": params,
        **more,
    }


async def drawn(client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
    """Sample, and return the answer."""
    found = await result(client, await ask(client, "asample", **body))
    assert found.headers["content-type"] == "application/x-protobuf", found.text
    return SAMPLE_RESPONSE.FromString(found.content)


async def failure(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, str]:
    answer: dict[str, str] = (await result(client, await ask(client, "asample", **body))).json()
    return answer


def tokens(sequence: Any) -> list[int]:
    return unpack_tokens(sequence.tokens)


async def saved(client: httpx.AsyncClient, model: str, seq: int, **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = (
        await result(client, await ask(client, "save_weights_for_sampler", model_id=model, seq_id=seq, **fields))
    ).json()
    return answer


async def test_several_samples_are_drawn_from_the_base_with_their_stop_tokens_and_logprobs(
    hive: OperationHive, client: httpx.AsyncClient, model: str
) -> None:
    sampler = await begin(client, model)
    hive.replica.otherwise = says("hello", "there", finish="stop")
    body = sample(sampler, num_samples=2, params={"seed": 3, "top_k": 4, "top_p": 0.5, "temperature": 0.7})
    accepted = await ask(client, "asample", **body)
    assert len(accepted["sample_sequence_ids"]) == 2
    answer = SAMPLE_RESPONSE.FromString((await result(client, accepted)).content)
    assert [tokens(each) for each in answer.sequences] == [tokens_of("hello"), tokens_of("there")]
    first = answer.sequences[0]
    assert first.stop_reason == WireStop.STOP
    assert array("f", first.logprobs).tolist() == pytest.approx([-token / 1000 for token in tokens_of("hello")])
    (request,) = hive.replica.requests
    assert (request.n, request.plain_logprobs, request.adapter) == (2, True, "")
    assert (request.sampling.seed, request.sampling.top_k, request.sampling.top_p) == (3, 4, 0.5)
    assert request.sampling.stop_token_ids == (IM_END,), "the model's own"
    assert unpack_tokens(request.prompt) == [5, 6, 7]


async def test_a_repeat_has_the_same_answer_and_another_body_its_own(
    hive: OperationHive, client: httpx.AsyncClient, model: str
) -> None:
    sampler = await begin(client, model)
    first, again = [await ask(client, "asample", **sample(sampler)) for _ in range(2)]
    assert first == again
    assert (await result(client, first)).content == (await result(client, first)).content
    other = await ask(client, "asample", **sample(sampler, prompt=(8, 9)))
    await result(client, other)
    assert len(hive.replica.requests) == 2


async def test_a_text_that_stops_ends_a_sample_with_the_token_that_completes_it(
    hive: OperationHive, client: httpx.AsyncClient, model: str
) -> None:
    sampler = await begin(client, model)
    whole = TEXT.tokenizer.encode("the weather is fine today")
    cut = next(n for n in range(len(whole)) if "fine" in TEXT.tokenizer.bytes_of(whole[:n]).decode())
    hive.replica.otherwise = says("the weather is fine today", portion=1)
    answer = await drawn(client, sample(sampler, params={"stop": ["fine", "never"]}))
    assert tokens(answer.sequences[0]) == whole[:cut]
    assert answer.sequences[0].stop_reason == WireStop.STOP
    assert hive.replica.requests[0].sampling.stop_token_ids == ()
    await drawn(client, sample(sampler, seq=1, params={"stop": [11, 12]}))
    assert hive.replica.requests[1].sampling.stop_token_ids == (11, 12)
    hive.replica.otherwise = says("the weather", finish="length")
    await drawn(client, sample(sampler, seq=3, params={"stop": ["<|im_end|>", "fine"]}))
    assert hive.replica.requests[2].sampling.stop_token_ids == (IM_END,), "a special token has no text to find it in"
    answer = await drawn(client, sample(sampler, seq=2, params={"stop": []}))
    assert hive.replica.requests[3].sampling.stop_token_ids == ()
    assert answer.sequences[0].stop_reason == WireStop.LENGTH
    await drawn(client, sample(sampler, seq=4, params={"stop": ["<|im_end|>\n"]}))
    assert hive.replica.requests[4].sampling.stop_token_ids == (IM_END,)
    whole = TEXT.tokenizer.encode("the\n<|im_start|>user\nmore")
    hive.replica.otherwise = says(whole, finish="length")
    answer = await drawn(client, sample(sampler, seq=5, params={"stop": ["\n<|im_start|>"]}))
    assert TEXT.tokenizer.decode(tokens(answer.sequences[0]), with_specials=True) == "the\n<|im_start|>"
    assert answer.sequences[0].stop_reason == WireStop.STOP


async def test_a_prompt_is_scored_with_alternatives_and_only_as_much_of_it_as_is_asked_for(
    hive: OperationHive, client: httpx.AsyncClient, model: str
) -> None:
    async def scores(request: Generate, send: Send) -> None:
        top = array("i", [0, 0, 6, 1, 7, 2])
        values = array("f", [math.nan, math.nan, -0.5, -2.0, -0.25, -3.0])
        first, rest = pack_logprobs([math.nan]), pack_logprobs([-0.5, -0.25])
        await send(
            PromptScores(
                version=0, logprobs=first, width=2, top_tokens=top[:2].tobytes(), top_logprobs=values[:2].tobytes()
            )
        )
        await send(
            PromptScores(
                start=1,
                version=0,
                logprobs=rest,
                width=2,
                top_tokens=top[2:].tobytes(),
                top_logprobs=values[2:].tobytes(),
            )
        )
        await send(frame_of([9]))
        await send(Finished(reason="length"))

    sampler = await begin(client, model)
    hive.replica.otherwise = scores
    body = sample(sampler, prompt_logprobs=True, topk_prompt_logprobs=2, params={"max_tokens": 1})
    answer = await drawn(client, body)
    found = array("f", answer.prompt_logprobs).tolist()
    assert math.isnan(found[0])
    assert found[1:] == [-0.5, -0.25]
    top = answer.topk_prompt_logprobs
    assert (top.length, top.k) == (3, 2)
    assert array("i", top.token_ids).tolist() == [0, 0, 6, 1, 7, 2]
    assert array("f", top.logprobs).tolist()[:3] == [-99999.0, -99999.0, -0.5]
    answer = await drawn(client, sample(sampler, seq=1, prompt_logprobs=True, prompt_logprobs_last_n=1))
    found = array("f", answer.prompt_logprobs).tolist()
    assert [math.isnan(each) for each in found] == [True, True, False]
    request = hive.replica.requests[0]
    assert (request.prompt_logprobs, request.top_prompt) == (True, 2)


async def test_a_checkpoint_is_loaded_where_it_is_missing_and_then_asked_again(
    hive: OperationHive, client: httpx.AsyncClient, model: str
) -> None:
    path = (await saved(client, model, 1, path="one"))["path"]
    sampler = await begin(client, model, model_path=path)
    for seq in range(2):
        await drawn(client, sample(sampler, seq=seq))
    assert hive.replica.adapters == {address_of("one"): "/w/one"}
    assert [request.adapter for request in hive.replica.requests] == [address_of("one")] * 3
    shown = (await client.get(f"samplers/{sampler}")).json()
    assert shown == {"sampler_id": sampler, "base_model": BASE, "model_path": path}
    hive.replica.adapters.clear()
    await drawn(client, sample(sampler, seq=2))
    assert hive.replica.adapters, "a replica that has dropped it is sent it again"


async def test_a_sampler_is_told_by_the_checkpoint_for_samplers_where_another_has_the_same_weights(
    client: httpx.AsyncClient, model: str
) -> None:
    await result(client, await ask(client, "save_weights", model_id=model, seq_id=1, path="same"))
    path = (await saved(client, model, 2, path="same"))["path"]
    sampler = await begin(client, model, model_path=path)
    assert (await client.get(f"samplers/{sampler}")).json()["model_path"] == path


async def test_a_checkpoint_that_a_replica_cannot_load_fails_the_sample_in_its_words(
    client: httpx.AsyncClient, model: str
) -> None:
    path = (await saved(client, model, 1, path="broken"))["path"]
    answer = await failure(client, sample(await begin(client, model, model_path=path)))
    assert answer == {"error": "the adapter is damaged", "category": "user"}


async def test_an_unnamed_save_begins_a_sampler_that_stays_and_an_inflight_one_moves(
    hive: OperationHive, client: httpx.AsyncClient, model: str
) -> None:
    session = model.removesuffix(":train:0")
    for seq, (number, kind) in enumerate([(0, "snapshot"), (1, "inflight"), (2, "snapshot"), (3, "inflight")], start=1):
        answer = await saved(client, model, seq, sampling_session_seq_id=number, kind=kind)
        assert answer["sampling_session_id"] == f"{session}:sample:{number}"
    assert [each.name for _, each in hive.executed if isinstance(each, SaveWeights)] == [
        "sample-0",
        "inflight-1",
        "sample-2",
        "inflight-3",
    ]
    for number in range(4):
        await drawn(client, sample(f"{session}:sample:{number}"))
    asked = list(dict.fromkeys(request.adapter for request in hive.replica.requests))
    assert asked == [address_of("sample-0"), address_of("inflight-3"), address_of("sample-2")]


async def test_inflight_samplers_move_to_inflight_saves_alone_in_the_order_of_their_numbers(
    hive: OperationHive, client: httpx.AsyncClient, model: str
) -> None:
    for seq, number in enumerate((0, 2, 1), start=1):
        await saved(client, model, seq, sampling_session_seq_id=number, kind="inflight")
    await result(client, await ask(client, "save_weights", model_id=model, seq_id=4, path="inflight-final"))
    await saved(client, model, 5, path="inflight-last")
    session = model.removesuffix(":train:0")
    await drawn(client, sample(f"{session}:sample:0"))
    assert hive.replica.requests[-1].adapter == address_of("inflight-2")


async def test_a_sampler_outlives_its_gateway_and_a_sample_is_drawn_again(
    hive: OperationHive, client: httpx.AsyncClient, model: str, bus: Bus
) -> None:
    path = (await saved(client, model, 1, path="one"))["path"]
    sampler = await begin(client, model, model_path=path)
    accepted = await ask(client, "asample", **sample(sampler))
    async with gateway_of(bus) as (_, url), httpx.AsyncClient(base_url=f"{url}/api/v1", timeout=60.0) as other:
        body = {"request_id": accepted["request_id"], "allow_metadata_only": True}
        assert (await other.post("retrieve_future", json=body)).status_code == 410
        await drawn(other, sample(sampler, seq=1))
    assert hive.replica.requests[-1].adapter == address_of("one")


async def test_what_is_not_there_is_refused_in_words(client: httpx.AsyncClient, model: str) -> None:
    session = model.removesuffix(":train:0")
    wrong = {"session_id": session, "sampling_session_seq_id": 0}
    gone = await client.post("create_sampling_session", json={**wrong, "model_path": f"tinker://{model}/weights/none"})
    assert (gone.status_code, "no checkpoint weights/none" in gone.json()["detail"]) == (404, True)
    other = await client.post("create_sampling_session", json={**wrong, "base_model": "org/other"})
    assert (other.status_code, f"serves models on {BASE} in run 1, not on org/other" in other.json()["detail"]) == (
        404,
        True,
    )
    ended = await client.post("create_sampling_session", json={**wrong, "session_id": "s-none", "base_model": BASE})
    assert ended.status_code == 410
    unknown = await client.post("asample", json=sample(f"{session}:sample:9"))
    assert (unknown.status_code, "no sampler" in unknown.json()["detail"]) == (404, True)
    answer = await failure(client, sample(await begin(client, model), prompt_alt_tokens_k=1))
    assert (answer["category"], "prompt_alt_tokens_k" in answer["error"]) == ("user", True)


async def test_samples_of_many_numbers_are_written_in_a_thread_while_others_go_on(
    hive: OperationHive, client: httpx.AsyncClient, model: str
) -> None:
    assert hive.gateway is not None
    sampler = await begin(client, model)
    hive.replica.scripts.append(says(*[[5] * 100] * 64, finish="length"))
    with every_thread_busy(hive.gateway.workers):
        many = asyncio.create_task(drawn(client, sample(sampler, num_samples=64, params={"max_tokens": 100})))
        await until(lambda: hive.replica.requests)
        await drawn(client, sample(sampler, seq=1))
        assert not many.done()
    assert [len(tokens(each)) for each in (await many).sequences] == [100] * 64


async def test_a_gateway_with_too_much_to_do_says_so_with_429(hive: OperationHive, bus: Bus, model: str) -> None:
    go = asyncio.Event()

    async def waits(request: Generate, send: Send) -> None:
        await go.wait()
        await says("ok")(request, send)

    async with (
        gateway_of(bus, open_calls_max=1) as (_, url),
        httpx.AsyncClient(base_url=f"{url}/api/v1", timeout=60.0) as small,
    ):
        sampler = await begin(small, model)
        hive.replica.otherwise = waits
        first = await ask(small, "asample", **sample(sampler))
        refused = await small.post("asample", json=sample(sampler, seq=1))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        go.set()
        await result(small, first)
        await drawn(small, sample(sampler, seq=1))


async def test_a_replica_that_fails_is_asked_again_and_one_that_is_missing_is_waited_for(
    hive: OperationHive, client: httpx.AsyncClient, model: str
) -> None:
    sampler = await begin(client, model)
    hive.replica.scripts.append(fault("it broke"))
    assert tokens((await drawn(client, sample(sampler))).sequences[0]) == tokens_of("ok")
    await hive.bus.inbox.send(inbox.ReplicaLeaves(id=new_id(), engine=ENGINE, replica="r1"))
    await hive.follower.wait_for(lambda _: "r1" not in hive.engine.replicas, PATIENCE_S)
    accepted = await ask(client, "asample", **sample(sampler, seq=1))
    alive = inbox.ReplicaAlive(
        id=new_id(), engine=ENGINE, replica="r1", url=hive.replica.url, run=hive.engine.run, version=0, capacity=8
    )
    await hive.bus.inbox.send(alive)
    assert (await result(client, accepted)).status_code == 200


async def test_a_replica_that_fails_each_time_fails_the_sample_and_a_busy_one_is_waited_for(
    hive: OperationHive, client: httpx.AsyncClient, model: str
) -> None:
    sampler = await begin(client, model)
    hive.replica.scripts.extend([fault("it broke")] * 6)
    answer = await failure(client, sample(sampler))
    assert (answer["category"], "it broke" in answer["error"]) == ("server", True)

    async def busy(request: Generate, send: Send) -> None:
        await send(Fault(why="1024 requests are open here already", code="overloaded", retry=True))

    hive.replica.scripts.extend([busy] * 7)
    assert tokens((await drawn(client, sample(sampler, seq=1))).sequences[0]) == tokens_of("ok")


async def test_a_base_is_sampled_without_any_model_in_a_run_that_its_sampler_starts(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    sampler = await begin(client, await new_session(client))
    assert hive.engine.run == 1
    assert hive.engine.clients.models == {}
    hive.replica.otherwise = says("hello")
    waiting = asyncio.create_task(drawn(client, sample(sampler)))
    await hive.follower.wait_for(lambda _: hive.engine.phase is Phase.ROLLING, PATIENCE_S)
    await hive.join_replica()
    assert [tokens(each) for each in (await waiting).sequences] == [tokens_of("hello")]
    assert hive.replica.requests[-1].adapter == ""
    model = await open_model(client)
    assert hive.engine.clients.models[model].run == 1, "a model joins the run"


async def test_what_was_saved_is_sampled_again_in_a_run_that_its_sampler_starts(
    hive: OperationHive, client: httpx.AsyncClient, model: str
) -> None:
    path = (await saved(client, model, 1, path="kept"))["path"]
    await hive.bus.inbox.request(inbox.Stop(id=new_id(), engine=ENGINE))
    await hive.follower.wait_for(lambda _: hive.engine.phase is Phase.OFFLINE, PATIENCE_S)
    sampler = await begin(client, await new_session(client), model_path=path)
    assert hive.engine.run == 2
    await hive.follower.wait_for(lambda _: hive.engine.phase is Phase.ROLLING, PATIENCE_S)
    await hive.join_replica()
    hive.replica.otherwise = says("hello")
    assert [tokens(each) for each in (await drawn(client, sample(sampler))).sequences] == [tokens_of("hello")]
    assert hive.replica.requests[-1].adapter == address_of("kept")


async def test_a_sampler_of_a_base_is_never_one_of_another(hive: OperationHive, client: httpx.AsyncClient) -> None:
    first = await new_session(client)
    sampler = await begin(client, first)
    await hive.bus.inbox.request(inbox.Stop(id=new_id(), engine=ENGINE))
    await hive.follower.wait_for(lambda _: hive.engine.phase is Phase.OFFLINE, PATIENCE_S)
    await begin(client, await new_session(client), base_model="org/other")
    assert hive.engine.started is not None
    assert hive.engine.started.base == "org/other"
    refused = await client.post("asample", json=sample(sampler))
    why = "This sampler's base differs from the current base of engine main, org/other: create another sampler."
    assert (refused.status_code, refused.json()["detail"]) == (404, why)


async def new_session(client: httpx.AsyncClient) -> str:
    """Return the name that the first model of a new session would have."""
    session = (await ask(client, "create_session", sdk_version="0.38.0", tags=[]))["session_id"]
    return f"{session}:train:0"


async def test_nothing_is_sampled_when_the_run_is_over(
    hive: OperationHive, client: httpx.AsyncClient, model: str
) -> None:
    sampler = await begin(client, model)
    gateway = hive.gateway
    assert gateway is not None
    await hive.bus.inbox.request(inbox.Stop(id=new_id(), engine=ENGINE))
    await until(lambda: gateway.follower.hive.engine(ENGINE).phase is Phase.OFFLINE)
    answer = await failure(client, sample(sampler))
    assert answer["error"].endswith("start a run by creating a model, or a sampling client of the base.")


async def test_a_prompt_of_one_token_has_no_logprob_and_no_alternatives_also_of_a_sampler_that_was_cloned(
    hive: OperationHive, client: httpx.AsyncClient, model: str
) -> None:
    scores = {"prompt_logprobs": True, "topk_prompt_logprobs": 2}
    found = await drawn(client, sample(await begin(client, model), seq=10**18 + 1, prompt=(5,), **scores))
    (logprob,) = array("f", found.prompt_logprobs)
    assert math.isnan(logprob), "Tinker's client reads None"
    top = found.topk_prompt_logprobs
    assert (top.length, top.k, list(array("i", top.token_ids))) == (1, 2, [0, 0])


async def test_no_call_is_recorded_and_the_model_is_told_to_be_sampleable(
    hive: OperationHive, client: httpx.AsyncClient, model: str
) -> None:
    await drawn(client, sample(await begin(client, model)))
    assert (await hive.bus.state(hive.bus.subjects.calls_stream)).messages == 0
    (first, *_) = (await client.get("get_server_capabilities")).json()["supported_models"]
    assert (first["model_name"], first["trainable"], first["sampleable"]) == (BASE, True, True)
    assert first["max_context_length"] > 0
    await hive.bus.inbox.request(inbox.Stop(id=new_id(), engine=ENGINE))
    await hive.follower.wait_for(lambda _: hive.engine.phase is Phase.OFFLINE, PATIENCE_S)
    (first, *_) = (await client.get("get_server_capabilities")).json()["supported_models"]
    assert first["sampleable"], "a sampling client would start the run, and a replica is there"


@pytest.mark.parametrize("gateway_settings", [{"record_samples": True}])
async def test_samples_are_recorded_as_calls_if_the_gateway_is_set_to_and_an_audit_says_which_weights_sampled_them(
    hive: OperationHive, client: httpx.AsyncClient, model: str
) -> None:
    hive.replica.otherwise = says("hello", "there", finish="stop")
    await drawn(client, sample(await begin(client, model), num_samples=2, params={"seed": 3}))
    path = (await saved(client, model, 1, path="one"))["path"]
    hive.replica.otherwise = says("hello", finish="stop")
    await drawn(client, sample(await begin(client, model, 1, model_path=path)))
    await hive.follower.wait_for(lambda _: hive.engine.counters.calls == 2, PATIENCE_S)
    source = BusSource(hive.bus, "the log of this test")
    noted = [call async for each in source.events() if isinstance(each.event, CallsNoted) for call in each.event.calls]
    of_base, of_adapter = await source.records([call.ref for call in noted])
    assert (of_base.episode, of_base.prompt_tail, of_base.sampling.seed) == ("", pack_tokens([5, 6, 7]), 3)
    assert [each.token_ids() for each in of_base.choices] == [tokens_of("hello"), tokens_of("there")]
    assert of_base.choices[0].spans == (Span(0, 0, len(tokens_of("hello"))),)
    assert (of_base.sampler, of_adapter.sampler) == ("", address_of("one"))
    assert hive.engine.counters.calls_late == 0
    assert hive.engine.newest_call == noted[1].ref.seq, "so that it can be purged"
    report = await audited(source)
    count = len(tokens_of("hello"))
    assert report.tokens == {TO_CLIENT: 2 * count + len(tokens_of("there"))}
    assert [(each.weights, each.tokens) for each in report.versions][1:] == [(address_of("one"), count)]
    assert not report.differences


@pytest.mark.parametrize("gateway_settings", [{"record_samples": True, "log_fill_max": 1e-9, "call_timeout_s": 0.2}])
async def test_samples_that_are_recorded_wait_for_room_in_the_log_before_they_are_drawn(
    hive: OperationHive, client: httpx.AsyncClient, model: str
) -> None:
    answer = await failure(client, sample(await begin(client, model)))
    assert answer == {"error": "The sample took longer than the limit of 0.2 s.", "category": "server"}
    assert not hive.replica.requests


@pytest.mark.parametrize("gateway_settings", [{"record_samples": True}])
async def test_recorded_samples_need_room_for_what_the_model_can_answer_and_a_second_attempt_makes_no_second_record(
    hive: OperationHive, client: httpx.AsyncClient, model: str
) -> None:
    hive.replica.scripts.append(fault("it broke"))
    body = sample(await begin(client, model), params={"max_tokens": 1 << 24})
    assert tokens((await drawn(client, body)).sequences[0]) == tokens_of("ok")
    assert len(hive.replica.requests) == 2
    assert (await hive.bus.state(hive.bus.subjects.calls_stream)).messages == 1


@pytest.mark.parametrize("gateway_settings", [{"record_samples": True, "bus_timeout_s": 0.5}])
async def test_samples_that_cannot_be_recorded_are_not_given_to_their_client(
    hive: OperationHive, client: httpx.AsyncClient, model: str
) -> None:
    sampler = await begin(client, model)
    await hive.bus.requests.request(f"$JS.API.STREAM.DELETE.{hive.bus.subjects.calls_stream}")
    answer = await failure(client, sample(sampler))
    assert (answer["category"], "no stream accepts this" in answer["error"]) == ("server", True)
    assert len(hive.replica.requests) == 1, "they were sampled, but nobody gets them"
    direct = await client.post(f"{hive.url}/generate", json={"input_ids": [5, 6, 7], "sampling_params": {}})
    assert direct.status_code == 503


async def test_xorls_client_samples_in_sglangs_form_from_the_base_and_from_a_checkpoint(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    made = await ask(client, "create_model", model_id="mine", base_model=BASE, lora_config={"rank": 4})
    await xorl_result(client, made)
    await hive.join_replica()
    kept = await ask(client, "save_weights_for_sampler", model_id="mine", seq_id=1, name="step-1")
    path = (await xorl_result(client, kept))["path"]
    begun = await ask(client, "create_sampling_session", model_path=path)
    assert (begun["success"], begun["model_path"], begun["lora_name"]) == (True, path, "step-1")
    hive.replica.otherwise = says("hello there")
    url = f"{hive.url}/generate"
    params = {"max_new_tokens": 5, "temperature": 1.0}
    first = {"input_ids": [5, 6], "sampling_params": params, "return_logprob": True, "lora_path": "step-1"}
    answer = (await client.post(url, json=first)).json()
    assert (answer["text"], answer["output_ids"]) == ("hello there", tokens_of("hello there"))
    assert answer["meta_info"]["finish_reason"] == "stop"
    assert [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]
    assert hive.replica.requests[-1].adapter == address_of("step-1")
    hive.replica.otherwise = says("one", "two")
    both = (await client.post(url, json={"text": "the weather", "sampling_params": {**params, "n": 2}})).json()
    assert [each["text"] for each in both] == ["one", "two"]
    assert unpack_tokens(hive.replica.requests[-1].prompt) == TEXT.tokenizer.encode("the weather")
    hive.replica.otherwise = says("one")
    asked = {"prompt": {"prompt_token_ids": [5, 6]}, "logprobs": 0, "max_tokens": 5}
    as_vllm = (await client.post(url, json=asked)).json()
    assert (as_vllm["text"], as_vllm["token_ids"], as_vllm["finish_reasons"]) == (["one"], [tokens_of("one")], ["stop"])
    assert as_vllm["prompt_token_ids"] == [5, 6]
    unknown = await client.post(url, json={**first, "lora_path": "none"})
    assert (unknown.status_code, "no checkpoint none" in unknown.json()["detail"]) == (404, True)
    asked_so_far = len(hive.replica.requests)
    many: dict[str, Any] = {**asked, "n": 64, "max_tokens": None, "logprobs": 20}
    for wrong, code, why in (
        ({"text": "a" * 4_000_000}, 400, "The text has 4000000 characters, but at most"),
        ({"input_ids": [5] * 600_000}, 400, "The prompt has 600000 tokens, but the model's limit"),
        (many, 413, "each with 20 alternatives, are over the limit of 2097152 alternatives in one request: ask for"),
    ):
        refused = await client.post(url, json=wrong)
        assert (refused.status_code, why in refused.json()["detail"]) == (code, True), refused.text
    assert len(hive.replica.requests) == asked_so_far
    body = sample(await begin(client, await new_session(client)), num_samples=64, topk_sample_logprobs=20)
    del body["sampling_params"]["max_tokens"]
    assert why in (await failure(client, body))["error"]
