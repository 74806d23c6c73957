"""The OpenAPI page describes what the gateway answers: each field of each API, whole and streamed, and refusals.

`make test-harnesses` has schemathesis look for answers of other kinds.
"""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema_rs
import pytest

from bombus.bus import Bus
from bombus.hive.generation import Generate
from tests.gateway.openai_hive import ENGINE, JOB, GatewayHive, Send, gateway_hive, says
from tests.gateway.openapi_page import DescribedAnswers, closed

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
MESSAGES = [{"role": "user", "content": "what is the weather in Paris?"}]
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
CHAT: dict[str, Any] = {"model": "m", "messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}]}
TOOLS = [{"name": "weather", "input_schema": {"type": "object"}}]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1, "n": 2}),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/completions", {"model": "m", "prompt": "the", "logprobs": 1}),
    ("/v1/messages", {"model": "m", "messages": MESSAGES, "tools": TOOLS}),
    ("/v1/messages", {"model": "m", "messages": MESSAGES, "tools": TOOLS, "stream": True}),
    ("/v1/messages/count_tokens", {"model": "m", "messages": MESSAGES}),
    ("/v1/responses", {"model": "m", "input": "hi", "tools": [{"type": "function", **FUNCTION}], "user": "u"}),
    ("/v1/responses", {"model": "m", "input": "hi", "stream": True}),
    ("/v1/responses", {"model": "m", "input": "hi", "tools": [{"type": "custom", "name": "weather"}]}),
    ("/v1/embeddings", {"model": "m", "input": "hi"}),
    ("/tokenize", {"prompt": "the", "return_token_strs": True}),
    ("/v1/tokenize", {"messages": MESSAGES}),
    ("/v1/detokenize", {"tokens": [1, 2]}),
]
SWARM: list[tuple[str, str, dict[str, Any]]] = [
    ("GET", "/get_engine_status", {}),
    ("GET", "/get_current_batch_rollout_pool_information", {}),
    ("GET", "/get_server_experiment_dir", {}),
    ("POST", "/get_episode_buffer", {}),
    ("POST", "/compare_train_config", {"yaml_as_string": "bombus: {trainer: {lr: 0.5}}"}),
    ("POST", "/claim_episode", {"client_uuid": "c1"}),
    ("POST", "/claim_episodes", {"client_uuid": "c1", "claim_id": "k", "count": 2}),
    ("POST", "/claim_episodes", {"client_uuid": "c1", "claim_id": "k2", "count": 999, "wait_s": 0}),
    ("POST", "/can_continue_episode", {"client_uuid": "c1", "episode_uuid": "e"}),
    ("POST", "/end_episode", {"client_uuid": "c1", "episode_uuid": "e", "task_id": "t", "workflow_output": {}}),
    ("POST", "/abort_episodes", {"client_uuid": "c1", "episode_uuids": ["e"]}),
    ("POST", "/push_verbose_log", {"message": "hi"}),
    ("POST", "/agree_sync_weight", {"client_uuid": "c1"}),
    ("POST", "/sync_train_config", {"yaml_as_string": "nonsense: ["}),
    ("POST", "/sync_train_code", {}),
    ("POST", "/resume_engine", {}),
    ("POST", "/stop_episode", {"episode": "main-9-9"}),
    ("POST", "/start_engine", {}),
]


async def calls_a_tool(request: Generate, send: Send) -> None:
    await says(*[f"I look.\n{CALL}"] * request.n)(request, send)


@pytest.fixture
async def served(bus: Bus) -> AsyncIterator[GatewayHive]:
    async with gateway_hive(bus, JOB) as hive:
        hive.replica.otherwise = calls_a_tool
        yield hive


async def page_of(http: httpx.AsyncClient) -> DescribedAnswers:
    return DescribedAnswers((await http.get("/openapi.json")).json())


@pytest.mark.parametrize("prefix", ["", f"/e/{ENGINE}"])
async def test_answers_to_agents_are_those_of_the_page(served: GatewayHive, prefix: str) -> None:
    _, key = await served.claim()
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=served.base_url, headers=headers, timeout=60) as http:
        page = await page_of(http)
        for path, body in CALLS:
            reply = await http.post(prefix + path, json=body)
            assert reply.status_code == (400 if path == "/v1/embeddings" else 200), reply.text
            page.check(prefix + path, reply)
            if path == "/v1/responses" and not body.get("stream"):
                stored = await http.get(f"{prefix}{path}/{reply.json()['id']}")
                assert stored.status_code == 200
                page.check(f"{prefix}/v1/responses/{{response_id}}", stored)
        page.check(f"{prefix}/v1/models", await http.get(f"{prefix}/v1/models"))
        page.check(f"{prefix}/v1/models/{{model}}", await http.get(f"{prefix}/v1/models/any"))


async def test_refusals_of_agents_are_those_of_the_page(served: GatewayHive) -> None:
    _, key = await served.claim()
    async with httpx.AsyncClient(base_url=served.base_url, timeout=60) as http:
        page = await page_of(http)
        for path in dict.fromkeys(path for path, _ in CALLS):
            nobody = await http.post(path, json={})
            malformed = await http.post(path, content=b"[", headers={"x-api-key": key})
            assert (nobody.status_code, malformed.status_code) in ((401, 400), (400, 400))
            page.check(path, nobody)
            page.check(path, malformed)
        for path, name in (("/v1/responses/", "response_id"), ("/v1/models/", "model")):
            reply = await http.get(f"{path}resp_{'0' * 32}", headers={"x-api-key": key})
            page.check(f"{path}{{{name}}}", reply)


async def test_answers_to_clients_are_those_of_the_page(served: GatewayHive) -> None:
    episode, key = await served.claim()
    assert served.gateway is not None
    claimed = served.gateway.keys.claimed_id(episode)
    async with httpx.AsyncClient(base_url=served.base_url, timeout=60) as http:
        page = await page_of(http)
        called = await http.post("/v1/chat/completions", json=CHAT, headers={"authorization": f"Bearer {key}"})
        assert called.status_code == 200
        await served.calls(episode, 1)
        more: list[tuple[str, str, dict[str, Any]]] = [
            ("POST", "/replay_latest_llm_call", {"episode_uuid": claimed}),
            ("POST", "/touch_episodes", {"client_uuid": "c1", "episode_uuids": [claimed, "e"]}),
            ("POST", "/touch_client", {"client_uuid": "c1"}),
            ("POST", "/abort_episode", {"client_uuid": "c1", "episode_uuid": claimed}),
            ("POST", "/stop_engine", {}),
            ("POST", "/claim_episode", {"client_uuid": "c1"}),
        ]
        for method, path, body in [*SWARM, *more]:
            reply = await http.request(method, path, json=body if method == "POST" else None)
            page.check(path, reply)
        for path in ("/health", "/ready"):
            page.check(path, await http.get(path))


async def test_every_answer_names_its_fields(served: GatewayHive) -> None:
    async with httpx.AsyncClient(base_url=served.base_url) as http:
        document = (await http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]

    def names_fields(schema: dict[str, Any]) -> bool:
        if "$ref" in schema:
            return names_fields(schemas[schema["$ref"].rpartition("/")[2]])
        return all(map(names_fields, schema["anyOf"])) if "anyOf" in schema else bool(schema["required"])

    for path, routes in document["paths"].items():
        for method, route in routes.items():
            for status, answer in route["responses"].items():
                for kind, content in answer["content"].items():
                    if kind == "application/octet-stream":
                        continue  # not JSON
                    schema = content.get("schema") or content["itemSchema"]
                    assert names_fields(schema), (method, path, status, kind)


def test_a_field_that_the_page_does_not_name_is_found() -> None:
    named = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    answer = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/A"}}}}
    document = {"paths": {"/x": {"get": {"responses": {"200": answer}}}}, "components": {"schemas": {"A": named}}}
    assert closed(document)["components"]["schemas"]["A"]["additionalProperties"] is False
    page = DescribedAnswers(document)

    def reply(body: dict[str, Any]) -> httpx.Response:
        return httpx.Response(200, json=body, request=httpx.Request("GET", "http://h/x"))

    page.check("/x", reply({"a": 1}))
    for wrong in ({"a": 1, "b": 2}, {}, {"a": "1"}):
        with pytest.raises(jsonschema_rs.ValidationError):
            page.check("/x", reply(wrong))
