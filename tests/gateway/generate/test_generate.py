"""`/generate` with an episode's key: what is sampled is recorded as a call, whichever form it was asked in."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from bombus.bus import Bus
from bombus.hive.records import unpack_tokens
from tests.gateway.openai_hive import JOB, TEXT, GatewayHive, gateway_hive, says, tokens_of

PROMPT = TEXT.tokenizer.encode("the quick brown")


@pytest.fixture
async def served(bus: Bus) -> AsyncIterator[GatewayHive]:
    async with gateway_hive(bus) as hive:
        yield hive


async def ask(served: GatewayHive, key: str, body: object, status: int = 200, path: str = "/generate") -> Any:
    async with httpx.AsyncClient(base_url=served.base_url, timeout=60) as http:
        answer = await http.post(path, json=body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].partition(";")[0] == "application/json"
    return answer.json()


async def test_vllms_form_gets_tokens_with_logprobs_which_are_recorded(served: GatewayHive) -> None:
    episode, key = await served.claim()
    served.replica.scripts.append(says("fox jumps", "lazy dog"))
    body = {"prompt": {"prompt_token_ids": PROMPT}, "logprobs": 0, "n": 2, "max_tokens": 8, "stop_token_ids": [5]}
    answer = await ask(served, key, body)
    assert (answer["text"], answer["finish_reasons"]) == (["fox jumps", "lazy dog"], ["stop", "stop"])
    (record,) = await served.records(episode, 1)
    assert unpack_tokens(record.prompt_tail) == answer["prompt_token_ids"] == PROMPT
    for choice, places in zip(record.choices, answer["logprobs"], strict=True):
        assert [int(token) for ((token,),) in places] == choice.token_ids()
        logged = memoryview(choice.logprobs).cast("f").tolist()
        assert [next(iter(each.values())) for (each,) in places] == pytest.approx(logged)
    assert answer["token_ids"][0] == tokens_of("fox jumps")
    assert record.sampling.max_tokens == 8
    assert 5 in record.sampling.stop_token_ids


async def test_alternatives_follow_the_token_itself(served: GatewayHive) -> None:
    _, key = await served.claim()
    served.replica.scripts.append(says("fox jumps"))
    answer = await ask(served, key, {"prompt": "the quick", "logprobs": 2, "max_tokens": 8})
    assert answer["prompt"] == "the quick"
    assert answer["prompt_token_ids"] == TEXT.tokenizer.encode("the quick")
    assert [int(next(iter(place))) for (place,) in answer["logprobs"][0]] == answer["token_ids"][0]


async def test_sglangs_form_gets_its_own_answer(served: GatewayHive) -> None:
    episode, key = await served.claim()
    served.replica.scripts.append(says("fox jumps"))
    params = {"max_new_tokens": 8, "temperature": 1.0}
    body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, "return_text_in_logprobs": False}
    answer = await ask(served, key, body, path="/e/main/generate")
    assert answer["text"] == "fox jumps"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop"}
    (record,) = await served.records(episode, 1)
    assert [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]] == record.choices[0].token_ids()
    served.replica.scripts.append(says("one", "two"))
    both = await ask(served, key, {"text": "the weather", "sampling_params": {**params, "n": 2}})
    assert [each["text"] for each in both] == ["one", "two"]


async def test_what_does_not_fit_is_refused_as_vllms_server_would(served: GatewayHive) -> None:
    _, key = await served.claim()
    answer = await ask(served, key, {"prompt": {"prompt_token_ids": [1]}, "n": "two"}, 400)
    assert "n" in str(answer["detail"])
    scored = {"prompt": {"prompt_token_ids": [1, 2]}, "prompt_logprobs": 0, "max_tokens": 1}
    assert "use a client key" in (await ask(served, key, scored, 400))["detail"]
    forged = f"{key[:-4]}xxxx"
    await ask(served, forged, {"prompt": "a"}, 401)


async def test_with_a_client_key_it_is_no_call_and_needs_a_run_of_operations(served: GatewayHive) -> None:
    async with httpx.AsyncClient(base_url=served.base_url, timeout=60) as http:
        answer = await http.post("/generate", json={"prompt": "a", "max_tokens": 4})
    assert answer.status_code == 409 or answer.status_code == 400
    assert "plays episodes" in answer.json()["detail"]


@pytest.mark.parametrize("ours", [True, False])
async def test_the_policy_of_a_run_of_rollout_groups_is_sampled_with_a_client_key_whoever_trains_on_them(
    bus: Bus, ours: bool
) -> None:
    job = {"bombus": JOB["bombus"] | {"collection": {"episode_groups": True, "rollout_groups": ours}}}
    async with gateway_hive(bus, job) as served, httpx.AsyncClient(base_url=served.base_url, timeout=60) as http:
        assert (served.engine.queues_groups, served.engine.makes_steps) == (True, ours)
        served.replica.scripts.append(says("fox jumps"))
        answer = await http.post("/generate", json={"prompt": "the quick", "logprobs": 0, "max_tokens": 8})
        assert answer.status_code == 200, answer.text
        assert answer.json()["text"] == ["fox jumps"]
        (request,) = served.replica.requests
        assert not request.plain_logprobs, "they are those of the distribution that was sampled from"
