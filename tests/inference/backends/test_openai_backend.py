"""The openai backend: both kinds of servers, what they may lack, and how their weights change."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest

from bombus.architectures.canary import canary_logprobs
from bombus.errors import Code, EngineFault
from bombus.hive.events import Canary
from bombus.weights.canary import CanaryFailed, Expected
from bombus.weights.models import build_tiny, load_model
from bombus_inference.backends.openai.backend import OpenAIBackend
from bombus_inference.backends.openai.wire import completions_body, sglang_body
from bombus_inference.backends.protocol import Policy
from bombus_inference.settings import ComputeSettings, OpenAISettings
from tests.inference.backends.foreign_servers import KEY, ExternalCompletions, ExternalServer, ExternalSglang, serving
from tests.inference.backends.http_backends import BackendClient, ignore_stage
from tests.inference.backends.small_engines import request, worst_difference
from tests.patience import PATIENCE_S

KINDS = [ExternalCompletions, ExternalSglang]
COMPUTE = ComputeSettings(max_model_len=256, max_running=8)
CONTEXT = 256


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions of one model."""
    made = [tmp_path_factory.mktemp(f"v{seed}") for seed in (0, 1)]
    for seed, folder in enumerate(made):
        build_tiny(folder, seed)
    return made


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", KEY)


@asynccontextmanager
async def backend_of(server: ExternalServer, **settings: Any) -> AsyncIterator[tuple[OpenAIBackend, BackendClient]]:
    client = BackendClient()
    async with serving(server) as url:
        chosen = OpenAISettings(url=url, api_key_env="SERVER_KEY", **settings)
        backend = OpenAIBackend(COMPUTE, chosen, client.deliver)
        try:
            yield backend, client
        finally:
            await backend.stop()


@pytest.mark.parametrize("kind", KINDS)
async def test_its_tokens_come_through_with_their_logprobs(kind: type[ExternalServer], folders: list[Path]) -> None:
    server = kind(folders[0])
    async with backend_of(server) as (backend, client):
        await backend.load(Policy(folders[0], 1, 0, CONTEXT), ignore_stage)
        answer = await client.ask(backend, request([5, 6, 7], n=2, top_logprobs=2, stream=True))
        assert sorted(answer.choices) == [0, 1]
        for made in answer.choices.values():
            assert made.versions == [0] * 12
            assert made.finish == "length"
            assert worst_difference(load_model(folders[0]), [5, 6, 7], made) < 1e-4
            assert all(len(row) == 2 for row in made.top)
        unstreamed = (await client.ask(backend, request([5, 6, 7]))).only
        stop = (await client.ask(backend, request([5, 6, 7], temperature=0.0, stop=tuple(range(44))))).only
        assert len(unstreamed.tokens) == 12
        assert (len(stop.tokens), stop.finish) == (1, "stop")


def test_external_servers_get_the_wishes_that_they_can_take() -> None:
    parameters: dict[str, Any] = {"min_p": 0.1, "presence_penalty": 1.0, "frequency_penalty": -0.5}
    biased = request([4], logit_bias={7: -3.0}, **parameters)
    sent = parameters | {"logit_bias": {"7": -3.0}}
    completions = json.loads(completions_body("m", biased, [4], 8))
    assert {name: completions[name] for name in sent} == sent
    sglang = json.loads(sglang_body(biased, [4], 8))["sampling_params"]
    assert {name: sglang[name] for name in sent} == sent
    repetition = request([4], repetition_penalty=1.2)
    assert json.loads(completions_body("m", repetition, [4], 8))["repetition_penalty"] == 1.2
    assert "min_p" not in json.loads(completions_body("m", repetition, [4], 8))


async def test_what_a_server_counts_in_another_way_is_refused_by_name(folders: list[Path]) -> None:
    server = ExternalSglang(folders[0])
    async with backend_of(server) as (backend, client):
        await backend.load(Policy(folders[0], 1, 0, CONTEXT), ignore_stage)
        asked = len(server.requests)
        fault = await client.refused(backend, request([5, 6, 7], repetition_penalty=1.2))
        assert fault.code == Code.UNSUPPORTED
        assert "repetition_penalty" in fault.why
        assert len(server.requests) == asked


async def test_a_shorter_context_than_the_jobs_is_warned_about_once_per_run(
    folders: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    async with backend_of(ExternalCompletions(folders[0])) as (backend, _):
        for version in (0, 1):
            await backend.load(Policy(folders[version], 1, version, CONTEXT), ignore_stage)
    warnings = [message for message in caplog.messages if "sequences end" in message]
    assert [message.partition(":")[0] for message in warnings] == [
        f"sequences end at 200 tokens, not at the job's {CONTEXT}"
    ]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_whose_weights_are_not_those_of_the_version_serves_nothing(
    kind: type[ExternalServer], folders: list[Path]
) -> None:
    canary = Canary(logprobs=canary_logprobs(load_model(folders[0])), dtype="float32")
    worse = tuple(each - 9.0 for each in canary.logprobs)
    async with backend_of(kind(folders[0])) as (backend, client):
        policy = Policy(folders[0], 1, 0, CONTEXT, expected=Expected(0, canary))
        check = await backend.load(policy, ignore_stage)
        assert check is not None
        assert check.difference < 1e-4
        wrong = Expected(1, Canary(logprobs=worse, dtype="float32"))
        with pytest.raises(CanaryFailed, match="version 1 at the trainer"):
            await backend.load(Policy(folders[0], 1, 1, CONTEXT, expected=wrong), ignore_stage)
        assert backend.version == -1
        assert (await client.refused(backend, request([5]))).retry
    async with backend_of(kind(folders[0], lacks=frozenset({"scores"}))) as (backend, client):
        assert await backend.load(policy, ignore_stage) is None, "it gives no scores, so it is not checked"
        assert backend.version == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_new_weights_are_loaded_by_its_own_route_and_no_answer_mixes_versions(
    kind: type[ExternalServer], folders: list[Path]
) -> None:
    server = kind(folders[0])
    async with backend_of(server) as (backend, client):
        await backend.load(Policy(folders[0], 1, 0, CONTEXT), ignore_stage)
        server.hold.clear()
        server.holding.clear()
        ticket = client.add(backend, request([5]))
        await server.holding.wait()
        changing = asyncio.create_task(backend.load(Policy(folders[1], 1, 1, CONTEXT), ignore_stage))
        async with asyncio.timeout(PATIENCE_S):
            while backend.version >= 0:
                await asyncio.sleep(0)
        assert (await client.refused(backend, request([5]))).retry, "no new requests are taken meanwhile"
        server.hold.set()
        await changing
        old, new = (await client.finished(ticket)).only, (await client.ask(backend, request([5]))).only
        assert (set(old.versions), set(new.versions)) == ({0}, {1})
        assert worst_difference(load_model(folders[0]), [5], old) < 1e-4
        assert worst_difference(load_model(folders[1]), [5], new) < 1e-4
        assert server.label == "1/1"


async def test_a_call_that_takes_too_long_is_ended_before_the_weights_change(folders: list[Path]) -> None:
    server = ExternalCompletions(folders[0])
    async with backend_of(server, drain_s=0.0) as (backend, client):
        await backend.load(Policy(folders[0], 1, 0, CONTEXT), ignore_stage)
        server.hold.clear()
        server.holding.clear()
        ticket = client.add(backend, request([5]))
        await server.holding.wait()
        await backend.load(Policy(folders[1], 1, 1, CONTEXT), ignore_stage)
        fault = (await client.finished(ticket)).fault
        assert fault is not None
        assert fault.retry
        server.hold.set()


async def test_an_aborted_request_disconnects_from_the_server(folders: list[Path]) -> None:
    server = ExternalCompletions(folders[0])
    async with backend_of(server) as (backend, client):
        await backend.load(Policy(folders[0], 1, 0, CONTEXT), ignore_stage)
        server.hold.clear()
        server.holding.clear()
        ticket = client.add(backend, request([5]))
        await server.holding.wait()
        backend.abort(ticket)
        async with asyncio.timeout(PATIENCE_S):
            await server.disconnected.wait()
        server.hold.set()


@pytest.mark.parametrize(
    ("kind", "lacks", "words"),
    [
        (ExternalCompletions, "ids", "it returns no token ids"),
        (ExternalCompletions, "logprobs", "it returns no logprobs"),
        (ExternalCompletions, "prompts", r"does not continue a prompt of token ids .*must be a string"),
        (ExternalSglang, "logprobs", "it returns no token ids; it returns no logprobs"),
        (ExternalSglang, "update", "could not load .*: it did not load the weights: Failed to load"),
    ],
)
async def test_what_the_server_lacks_is_reported_in_one_sentence(
    kind: type[ExternalServer], lacks: str, words: str, folders: list[Path]
) -> None:
    async with backend_of(kind(folders[0], lacks=frozenset({lacks}))) as (backend, client):
        with pytest.raises(EngineFault, match=words):
            await backend.load(Policy(folders[0], 1, 0, CONTEXT), ignore_stage)
        assert backend.version == -1
        assert (await client.refused(backend, request([5]))).code == "no_replica"


@pytest.mark.parametrize("kind", KINDS)
async def test_logprobs_of_another_distribution_than_the_sampled_one_are_detected(
    kind: type[ExternalServer], folders: list[Path]
) -> None:
    async with backend_of(kind(folders[0], raw=True)) as (backend, _):
        with pytest.raises(EngineFault, match="not of the distribution that it samples from"):
            await backend.load(Policy(folders[0], 1, 0, CONTEXT), ignore_stage)


async def test_another_vocabulary_is_detected(folders: list[Path], tmp_path: Path) -> None:
    other = (folders[0] / "tokenizer.json").read_text()
    for letter in ascii_lowercase:
        other = other.replace(f'"{letter}":', f'"{letter.upper()}":')
    (tmp_path / "tokenizer.json").write_text(other)
    server = ExternalCompletions(folders[0], tokenizer_of=tmp_path)
    async with backend_of(server) as (backend, _):
        with pytest.raises(EngineFault, match="its vocabulary differs from that of the run's model"):
            await backend.load(Policy(folders[0], 1, 0, CONTEXT), ignore_stage)


async def test_a_server_that_cannot_load_weights_serves_only_version_0(folders: list[Path]) -> None:
    async with backend_of(ExternalCompletions(folders[0], lacks=frozenset({"update"}))) as (backend, client):
        await backend.load(Policy(folders[0], 1, 0, CONTEXT), ignore_stage)
        assert (await client.ask(backend, request([5]))).only.versions == [0] * 12
        with pytest.raises(EngineFault, match="no way to load new weights, so it can serve only version 0"):
            await backend.load(Policy(folders[1], 1, 1, CONTEXT), ignore_stage)


async def test_weights_that_another_client_changed_are_not_passed_off_as_ours(folders: list[Path]) -> None:
    server = ExternalSglang(folders[0])
    async with backend_of(server) as (backend, client):
        await backend.load(Policy(folders[0], 1, 0, CONTEXT), ignore_stage)
        server.label = "theirs"
        fault = await client.refused(backend, request([5]))
        assert fault.retry
        assert "another client changed" in fault.why


async def test_the_servers_own_length_limit_applies(folders: list[Path]) -> None:
    async with backend_of(ExternalCompletions(folders[0])) as (backend, client):
        await backend.load(Policy(folders[0], 1, 0, CONTEXT), ignore_stage)
        assert (await client.refused(backend, request([5] * 200))).code == "prompt_too_long"


async def test_a_wrong_key_a_wrong_model_and_an_absent_server_are_reported(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(folders[0], 1, 0, CONTEXT)
    async with backend_of(ExternalCompletions(folders[0]), model="other") as (backend, _):
        with pytest.raises(EngineFault, match="serves m, not 'other'"):
            await backend.load(policy, ignore_stage)
    monkeypatch.setenv("SERVER_KEY", "wrong")
    async with backend_of(ExternalCompletions(folders[0])) as (backend, _):
        with pytest.raises(EngineFault, match=r"401.*needs a key"):
            await backend.load(policy, ignore_stage)
    nobody = OpenAIBackend(COMPUTE, OpenAISettings(url="http://127.0.0.1:9"), BackendClient().deliver)
    with pytest.raises(EngineFault, match="no server can be used at"):
        await nobody.load(policy, ignore_stage)
    await nobody.stop()
    monkeypatch.delenv("SERVER_KEY")
    with pytest.raises(EngineFault, match="SERVER_KEY is not set"):
        OpenAIBackend(COMPUTE, OpenAISettings(url="http://x", api_key_env="SERVER_KEY"), BackendClient().deliver)
