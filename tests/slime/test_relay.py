"""The address of a sample: SGLang's `/generate` there is a call of its episode, and the tokens of texts are kept."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers

from bombus import AsyncSwarmClient
from bombus.bus import Bus
from bombus.hive.records import unpack_tokens
from bombus.sdk.types import Credentials
from bombus.slime.relay import RETIRED_MAX, SampleRelay
from bombus_gateway.text.rendering import TextModel, TextOptions
from tests.gateway.openai_hive import FILES, MODEL, TEXT, GatewayHive, gateway_hive, says
from tests.slime.test_retrieval import UNREADABLE


class HookTokenizer:
    """The tests' tokenizer with the methods that transformers' has."""

    def __init__(self, text: TextModel = TEXT) -> None:
        self._of = text.tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._of.encode(text)

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return self._of.fast.decode(tokens, skip_special_tokens=skip_special_tokens)


def sentence_piece_files() -> dict[str, bytes]:
    """Return the files of a model whose tokens begin with a space, which its decoder takes from the first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), strip])
    specials = [AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")]
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(["what is the weather, fine"], trainer)
    return {**FILES, "tokenizer.json": tokenizer.to_str().encode()}


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        yield http


@pytest.fixture
async def relay(served: GatewayHive) -> AsyncIterator[SampleRelay]:
    async with SampleRelay(served.base_url, HookTokenizer()) as relay:
        yield relay


@pytest.fixture
async def claimed(client: AsyncSwarmClient) -> Credentials:
    (one,) = await client.begin_episodes(1, task_id="t1")
    return one


async def ask(http: httpx.AsyncClient, port: int, body: object, status: int = 200) -> Any:
    answer = await http.post(f"http://127.0.0.1:{port}/generate", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_a_text_that_goes_on_keeps_the_tokens_that_were_sampled(
    served: GatewayHive, relay: SampleRelay, claimed: Credentials, http: httpx.AsyncClient
) -> None:
    split = TEXT.tokenizer.encode("th") + TEXT.tokenizer.encode("e")  # another text would be one token
    assert TEXT.tokenizer.encode("the") != split
    served.replica.scripts.extend([says(split, finish="length"), says("fox")])
    address = await relay.open(claimed)
    params = {"max_new_tokens": 8, "no_stop_trim": True, "skip_special_tokens": False, "stop_token_ids": None}
    first = await ask(http, address.port, {"text": "what is ", "sampling_params": params})
    assert (first["text"], "output_token_logprobs" in first["meta_info"]) == ("the", False)
    await ask(http, address.port, {"text": "what is the quick", "sampling_params": params})
    records = await served.records(claimed.episode, 2)
    assert records[1].parent is not None
    assert unpack_tokens(records[1].prompt_tail) == TEXT.tokenizer.encode(" quick")
    assert address.calls[0].sampled == split


@pytest.mark.parametrize(
    ("said", "params", "shown", "more"),
    [
        # Special tokens are not shown: the hook's own template adds the one that was sampled.
        ("hello", {"no_stop_trim": True, "skip_special_tokens": True}, "hello", "<|im_end|>\n"),
        # The stop is not shown, and the hook closes the tag itself.
        ("look <tool>", {"stop": ["<tool>"], "no_stop_trim": False}, "look ", "<tool> found"),
    ],
)
async def test_tokens_that_were_not_shown_are_kept_where_the_text_goes_on_with_them(
    said: str,
    params: dict[str, Any],
    shown: str,
    more: str,
    served: GatewayHive,
    relay: SampleRelay,
    claimed: Credentials,
    http: httpx.AsyncClient,
) -> None:
    address = await relay.open(claimed)
    served.replica.scripts.append(says(said, portion=1))
    body = {"text": "what?", "sampling_params": {"max_new_tokens": 64, **params}}
    assert (await ask(http, address.port, body))["text"] == shown
    await ask(http, address.port, {**body, "text": "what?" + shown + more})
    first, second = address.calls
    assert TEXT.tokenizer.fast.decode(second.prompt, skip_special_tokens=False) == "what?" + shown + more
    known = first.prompt + first.sampled
    assert second.prompt[: len(known)] == known, "what was sampled is gone on from"


@pytest.mark.parametrize("shown", ["", "look ", "look <t", "l"])
async def test_a_text_that_goes_on_otherwise_has_no_token_that_was_not_shown(
    shown: str, served: GatewayHive, relay: SampleRelay, claimed: Credentials, http: httpx.AsyncClient
) -> None:
    address = await relay.open(claimed)
    stop = "look <tool>".removeprefix(shown)
    served.replica.scripts.append(says("look <tool>"))
    params = {"max_new_tokens": 64, "stop": [stop], "no_stop_trim": False}
    answer = await ask(http, address.port, {"text": "what?", "sampling_params": params})
    assert answer["text"] == shown
    await ask(http, address.port, {"text": f"what?{shown} is there", "sampling_params": {}})
    assert TEXT.tokenizer.fast.decode(address.calls[1].prompt, skip_special_tokens=False) == f"what?{shown} is there"


@pytest.mark.parametrize("tail", ["z", "zq", "zqzqz", "zqzqzqz", "zqzqzqzqz", "\N{ANT}", "\N{ANT}zqzqzq"])
async def test_what_an_answer_showed_keeps_its_tokens_up_to_the_last_whole_character(
    tail: str, served: GatewayHive, relay: SampleRelay, claimed: Credentials, http: httpx.AsyncClient
) -> None:
    encode = TEXT.tokenizer.encode
    kept = encode("\N{HONEYBEE}" * 4) + encode("th") + encode("e")  # each bee is four tokens of one byte
    served.replica.scripts.append(says(kept + encode(tail), finish="length"))
    address = await relay.open(claimed)
    params = {"max_new_tokens": 64, "stop": [tail], "no_stop_trim": False}
    shown = "\N{HONEYBEE}" * 4 + "the"
    assert (await ask(http, address.port, {"text": "what? ", "sampling_params": params}))["text"] == shown
    await ask(http, address.port, {"text": f"what? {shown}\N{BUG}", "sampling_params": {}})
    assert address.calls[1].prompt == address.calls[0].prompt + kept + encode("\N{BUG}")


async def test_of_several_texts_that_are_known_the_longest_is_gone_on_from(
    served: GatewayHive, relay: SampleRelay, claimed: Credentials, http: httpx.AsyncClient
) -> None:
    split = TEXT.tokenizer.encode("th") + TEXT.tokenizer.encode("e")  # another text would be one token
    served.replica.scripts.extend([says(split, finish="length"), says(split, finish="length")])
    address = await relay.open(claimed)
    params = {"max_new_tokens": 8, "no_stop_trim": True, "skip_special_tokens": False}
    for text in ("what is ", "what is the", "what is thethe fox"):
        await ask(http, address.port, {"text": text, "sampling_params": params})
    first, second, third = address.calls
    assert second.prompt == first.prompt + split
    assert third.prompt == second.prompt + split + TEXT.tokenizer.encode(" fox")


async def test_the_longest_text_is_the_one_with_most_characters_and_not_with_most_tokens(
    served: GatewayHive, relay: SampleRelay, claimed: Credentials, http: httpx.AsyncClient
) -> None:
    encode = TEXT.tokenizer.encode
    two, one = encode("t") + encode("h"), encode("the")
    assert (len(two), len(one)) == (2, 1)
    served.replica.scripts.extend([says(two, finish="length"), says(one, finish="length")])
    address = await relay.open(claimed)
    params = {"max_new_tokens": 8, "no_stop_trim": True, "skip_special_tokens": False}
    for text in ("what is ", "what is ", "what is the fox"):
        await ask(http, address.port, {"text": text, "sampling_params": params})
    first, _, third = address.calls
    assert third.prompt == first.prompt + one + encode(" fox")


@pytest.mark.parametrize("params", [{}, {"no_stop_trim": True}])
async def test_the_space_that_an_answer_begins_with_is_shown_and_keeps_its_token(
    params: dict[str, Any], bus: Bus, http: httpx.AsyncClient
) -> None:
    files = sentence_piece_files()
    tokenizer = HookTokenizer(TextModel(files, MODEL, TextOptions()))
    async with (
        gateway_hive(bus, files=files) as served,
        SampleRelay(served.base_url, tokenizer) as relay,
        AsyncSwarmClient(served.base_url, verbose=False) as client,
    ):
        address = await relay.open((await client.begin_episodes(1, task_id="t1"))[0])
        fine = tokenizer.encode("fine")
        served.replica.scripts.append(says(fine, finish="length"))
        params = {"max_new_tokens": 8, **params}
        assert (await ask(http, address.port, {"text": "what is", "sampling_params": params}))["text"] == " fine"
        await ask(http, address.port, {"text": "what is fine weather", "sampling_params": params})
        assert address.calls[1].prompt[: len(address.calls[0].prompt) + len(fine)] == address.calls[0].prompt + fine


@pytest.mark.parametrize(("skips", "shown"), [(True, "hello"), (False, "hello<|im_end|>")])
async def test_special_tokens_are_shown_unless_they_are_to_be_skipped(
    skips: bool, shown: str, served: GatewayHive, relay: SampleRelay, claimed: Credentials, http: httpx.AsyncClient
) -> None:
    address = await relay.open(claimed)
    served.replica.scripts.append(says("hello"))
    params = {"max_new_tokens": 8, "no_stop_trim": True, "skip_special_tokens": skips}
    assert (await ask(http, address.port, {"text": "what?", "sampling_params": params}))["text"] == shown


async def test_text_after_a_stop_is_shown_as_sglang_shows_it(
    served: GatewayHive, relay: SampleRelay, claimed: Credentials, http: httpx.AsyncClient
) -> None:
    address = await relay.open(claimed)
    said = "look <tool> more"
    for no_trim, text in ((True, "look <tool>"), (False, "look ")):
        served.replica.scripts.append(says(said, portion=1))
        params = {"max_new_tokens": 64, "stop": ["<tool>"], "no_stop_trim": no_trim}
        body = {"text": "what?", "sampling_params": params, "return_logprob": True}
        answer = await ask(http, address.port, body)
        assert answer["text"] == text
        assert answer["meta_info"]["finish_reason"] == {"type": "stop"}


async def test_chat_completions_there_are_calls_of_the_episode_too(
    served: GatewayHive, relay: SampleRelay, claimed: Credentials, http: httpx.AsyncClient
) -> None:
    address = await relay.open(claimed)
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    answer = await http.post(f"http://127.0.0.1:{address.port}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert len(await served.records(claimed.episode, 1)) == 1


async def test_late_requests_are_aborted_as_sglang_aborts_them(
    served: GatewayHive, relay: SampleRelay, claimed: Credentials, http: httpx.AsyncClient
) -> None:
    address = await relay.open(claimed)
    await relay.retire(address)
    answer = await ask(http, address.port, {"text": "a", "sampling_params": {}})
    assert answer["meta_info"]["finish_reason"] == {"type": "abort"}
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    chat = await http.post(f"http://127.0.0.1:{address.port}/v1/chat/completions", json=body)
    assert (chat.status_code, "this sample is over" in chat.text) == (403, True)
    assert not served.engine.open[claimed.episode].calls
    assert not served.replica.requests


async def test_ports_of_samples_that_are_over_are_kept_for_a_while_and_not_for_ever(
    relay: SampleRelay, http: httpx.AsyncClient
) -> None:
    ports: list[int] = []
    for _ in range(RETIRED_MAX + 1):
        address = await relay.open(None)
        ports.append(address.port)
        await relay.retire(address)
    assert (await http.get(f"http://127.0.0.1:{ports[1]}/health")).status_code == 200
    with pytest.raises(httpx.ConnectError):
        await http.get(f"http://127.0.0.1:{ports[0]}/health")


async def test_an_episode_that_is_over_aborts_the_sample(
    client: AsyncSwarmClient, relay: SampleRelay, claimed: Credentials, http: httpx.AsyncClient
) -> None:
    address = await relay.open(claimed)
    await client.abort_episode(claimed.episode_uuid)
    answer = await ask(http, address.port, {"text": "a", "sampling_params": {}})
    assert answer["meta_info"]["finish_reason"] == {"type": "abort"}


async def test_refusals_say_what_to_do(
    served: GatewayHive, relay: SampleRelay, claimed: Credentials, http: httpx.AsyncClient
) -> None:
    address, nobody = await relay.open(claimed), await relay.open(None)
    refused = await ask(http, nobody.port, {"text": "a", "sampling_params": {}}, 400)
    assert "use the args that the generate function was called with" in str(refused)
    assert "image_data" in str(await ask(http, address.port, {"text": "a", "image_data": ["x"]}, 400))
    assert "not a JSON object" in str(await ask(http, address.port, [1], 400))
    for unreadable in UNREADABLE:
        answer = await http.post(f"http://127.0.0.1:{address.port}/generate", content=unreadable)
        assert (answer.status_code, "not a JSON object" in answer.text) == (400, True)
    for wrong in ({"text": ["a", "b"]}, {"input_ids": 5}, {"text": "a", "input_ids": [5]}, {}):
        assert "one prompt at a time" in str(await ask(http, address.port, wrong, 400))
    assert "min_new_tokens" in str(
        await ask(http, address.port, {"text": "a", "sampling_params": {"min_new_tokens": 2}}, 400)
    )
    answer = await http.get(f"http://127.0.0.1:{address.port}/workers")
    assert (answer.status_code, "is not offered" in answer.text) == (404, True)
    page = {"origin": "http://evil.example", "content-type": "text/plain"}  # which needs no preflight
    answer = await http.post(f"http://127.0.0.1:{address.port}/generate", content=b'{"text": "a"}', headers=page)
    assert (answer.status_code, "a web page may not" in answer.text) == (401, True)
    assert not served.replica.requests
