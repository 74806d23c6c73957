"""The routes that turn conversations into tokens and back, as vLLM has them."""

import httpx

from bombus.bus import Bus
from bombus.hive.records import unpack_tokens
from tests.gateway.openai_hive import MODEL, TEXT, gateway_hive

USER = {"role": "user", "content": "hello there"}


async def test_tokens_of_a_conversation_are_those_that_a_call_begins_with(bus: Bus) -> None:
    async with gateway_hive(bus) as hive:
        _, key = await hive.claim()
        await hive.client(key).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello there"}]
        )
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=hive.base_url, headers=headers) as http:
            found = (await http.post("/tokenize", json={"messages": [USER]})).json()
            assert found["tokens"] == unpack_tokens(hive.replica.requests[0].prompt)
            assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 2000)
            history = (
                await http.post("/v1/tokenize", json={"messages": [USER], "add_generation_prompt": False})
            ).json()
            text = (await http.post("/detokenize", json={"tokens": found["tokens"]})).json()["prompt"]
            shorter = (await http.post("/v1/detokenize", json={"tokens": history["tokens"]})).json()["prompt"]
            assert text == shorter + "<|im_start|>assistant\n"
            plain = (await http.post("/tokenize", json={"prompt": "hello", "return_token_strs": True})).json()
            assert plain["tokens"] == TEXT.tokenizer.encode("hello")
            assert "".join(plain["token_strs"]) == "hello"
            for path, body in (
                ("/tokenize", {}),
                ("/tokenize", {"messages": [{"role": "bee", "content": "x"}]}),
                ("/detokenize", {"tokens": [10**9]}),
            ):
                refused = await http.post(path, json=body)
                assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
