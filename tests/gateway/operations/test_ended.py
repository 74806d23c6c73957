"""Episodes in a run of training operations, through our SDK: a real gateway and bus, a scripted replica and trainer."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from openai import AsyncOpenAI

from bombus import AsyncSwarmClient, Credentials, Task, WorkflowOutput
from bombus.bus import Bus
from bombus.errors import Code
from bombus.hive import inbox
from bombus.hive.episodes import without_secret
from bombus.hive.records import unpack_tokens
from bombus.replay.episode.story import read_story
from bombus.replay.episode.text import facts
from bombus.replay.source import BusSource
from bombus.sdk.errors import BadRequest, NoEpisode, NotYourEpisode
from tests.gateway.openai_hive import ENGINE, MODEL, lacks_adapter, new_id, says, tokens_of
from tests.gateway.operations.scripted_trainer import OperationHive, address_of
from tests.gateway.operations.test_routes import open_model
from tests.gateway.operations.test_sampling import begin, drawn, sample, saved, tokens

TASK = Task(task_id="t")


@pytest.fixture
async def path(hive: OperationHive, client: httpx.AsyncClient) -> str:
    """The path of a saved model, in a run that has a replica."""
    model = await open_model(client)
    await hive.join_replica()
    found: str = (await saved(client, model, 1, path="one"))["path"]
    return found


@pytest.fixture
async def swarm(hive: OperationHive) -> AsyncIterator[AsyncSwarmClient]:
    async with AsyncSwarmClient(hive.url) as client:
        yield client


async def ask_once(credentials: Credentials, *messages: str, **more: object) -> str:
    async with AsyncOpenAI(base_url=credentials.base_url, api_key=credentials.api_key, max_retries=0) as client:
        roles = ("user", "assistant")
        said = [{"role": roles[at % 2], "content": text} for at, text in enumerate(messages)]
        answer = await client.chat.completions.create(model=MODEL, messages=said, **more)  # type: ignore[call-overload]
        text: str = answer.choices[0].message.content
        return text


async def played(swarm: AsyncSwarmClient, path: str, reward: float) -> str:
    """Play an episode of two turns, and return its id."""
    episode, credentials = await swarm.begin_episode(sampler=path)
    first = await ask_once(credentials, "hello")
    await ask_once(credentials, "hello", first, "and?")
    await swarm.end_episode(TASK, episode, WorkflowOutput(reward=reward))
    return episode


async def test_episodes_play_with_a_saved_model_and_come_back_as_data_for_a_loss(
    hive: OperationHive, swarm: AsyncSwarmClient, path: str
) -> None:
    hive.replica.otherwise = says("there")
    first, second = [await played(swarm, path, reward) for reward in (1.0, 0.0)]
    assert hive.replica.adapters == {address_of("one"): "/w/one"}, "the replica was sent the adapter, once"
    generated = [each for each in hive.replica.requests if each.adapter]
    assert len(generated) == 5, "the first was asked again once the replica had the adapter"
    assert {(each.adapter, each.plain_logprobs) for each in generated} == {(address_of("one"), True)}

    data = await swarm.take_datums()
    assert [(datum.episode, datum.reward, datum.sampler) for datum in data] == [(first, 1.0, path), (second, 0.0, path)]
    there, prompt = tokens_of("there"), unpack_tokens(generated[-1].prompt)
    whole = prompt + there
    assert data[0].tokens == whole[:-1]
    assert data[0].target_tokens == whole[1:]
    sampled = [at for at, counts in enumerate(data[0].mask) if counts]
    assert [data[0].target_tokens[at] for at in sampled] == 2 * there
    assert [data[0].logprobs[at] for at in sampled] == pytest.approx([-token / 1000 for token in 2 * there])
    assert {data[0].advantages[at] for at in sampled} == {0.5}
    assert sum(data[1].advantages) == -0.5 * len(sampled)
    assert sum(data[0].advantages) == 0.5 * len(sampled), "and 0 where nothing was sampled"
    assert hive.engine.pool == {}, "they were taken"
    assert hive.engine.counters.taken == 2
    assert await swarm.take_datums() == []


async def test_replay_tells_what_an_episode_played_with_and_who_took_it(
    hive: OperationHive, bus: Bus, swarm: AsyncSwarmClient, path: str
) -> None:
    episode = without_secret(await played(swarm, path, 1.0))
    waiting = await read_story(BusSource(bus, "the bus"), episode)
    assert waiting.fate == "waits in the pool"
    await swarm.take_datums()
    story = await read_story(BusSource(bus, "the bus"), episode)
    assert story.fate.startswith("taken by its client (event ")
    assert dict(facts(story))["sampler"].endswith("/sampler/one")
    assert story.tokenizer == "tokenizer-1"


async def test_what_was_read_stays_until_it_was_taken(hive: OperationHive, swarm: AsyncSwarmClient, path: str) -> None:
    episode = await played(swarm, path, 1.0)
    body = {"client_uuid": swarm.client_uuid, "episode_uuids": [episode]}
    async with httpx.AsyncClient(base_url=hive.url) as client:
        first, again = [(await client.post("/read_ended_episodes", json=body)).json() for _ in range(2)]
        assert first == again
        assert [each["calls"] for each in first["episodes"]] == [2]
        for _ in range(2):
            assert (await client.post("/take_ended_episodes", json=body)).json() == {"success": True}
        gone = (await client.post("/read_ended_episodes", json=body)).json()
    assert gone == {"episodes": [], "left": [], "gone": [episode], "lost": {}}


async def test_an_answer_that_is_full_leaves_episodes_for_the_next_and_the_client_asks_again(
    swarm: AsyncSwarmClient, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bombus_gateway.swarm.ended.ANSWER_BYTES_MAX", 1)
    episodes = [await played(swarm, path, 1.0) for _ in range(3)]
    assert [datum.episode for datum in await swarm.take_datums()] == episodes


async def test_an_episode_plays_with_the_base_where_its_client_says_so(
    hive: OperationHive, swarm: AsyncSwarmClient, path: str
) -> None:
    _, credentials = await swarm.begin_episode(sampler="base")
    await ask_once(credentials, "hello")
    assert (hive.replica.requests[-1].adapter, hive.replica.requests[-1].plain_logprobs) == ("", True)


async def test_what_cannot_be_begun_or_read_is_refused_in_words(
    hive: OperationHive, swarm: AsyncSwarmClient, path: str
) -> None:
    with pytest.raises(BadRequest, match="say which of its saved models the episodes sample from"):
        await swarm.begin_episode(max_wait_s=1.0)
    with pytest.raises(BadRequest, match=r"There is no saved model .*/sampler/none here"):
        await swarm.begin_episode(sampler=path.replace("one", "none"), max_wait_s=1.0)
    with pytest.raises(BadRequest, match="is not the path of a checkpoint"):
        await swarm.begin_episode(sampler="/etc/passwd", max_wait_s=1.0)
    episode, _ = await swarm.begin_episode(sampler=path)
    with pytest.raises(NoEpisode, match="has not ended: end it first"):
        await swarm.take_datums([episode])
    async with AsyncSwarmClient(hive.url) as other:
        await swarm.end_episode(TASK, episode, WorkflowOutput(reward=1.0))
        with pytest.raises(NotYourEpisode):
            await other.take_datums([episode])


async def test_an_episode_whose_calls_are_lost_gives_no_data_and_the_others_do(
    hive: OperationHive, bus: Bus, swarm: AsyncSwarmClient, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    await played(swarm, path, 1.0)
    ref = next(iter(hive.engine.pool.values())).calls[0]
    kept = await played(swarm, path, 0.0)
    await bus.purge_below(bus.subjects.calls_stream, ref.seq + 1)
    assert [datum.episode for datum in await swarm.take_datums()] == [kept]
    assert "is not available" in caplog.text


async def test_a_replica_that_drops_an_adapter_again_and_again_fails_the_call_in_words(
    hive: OperationHive, swarm: AsyncSwarmClient, path: str
) -> None:
    hive.replica.scripts.extend([lacks_adapter] * 9)
    hive.replica.adapters[address_of("one")] = "/w/one"
    _, credentials = await swarm.begin_episode(sampler=path)
    with pytest.raises(Exception, match=r"Replicas dropped adapter .* 8 times to make room"):
        await ask_once(credentials, "hello")


async def test_an_adapter_that_a_replica_cannot_load_fails_the_call_with_its_reason(
    client: httpx.AsyncClient, swarm: AsyncSwarmClient, path: str
) -> None:
    model = path.removeprefix("tinker://").partition("/")[0]
    broken = (await saved(client, model, 2, path="broken"))["path"]
    _, credentials = await swarm.begin_episode(sampler=broken)
    with pytest.raises(Exception, match="the adapter is damaged"):
        await ask_once(credentials, "hello")


async def test_samples_and_calls_of_one_saved_model_load_its_adapter_once(
    hive: OperationHive, client: httpx.AsyncClient, swarm: AsyncSwarmClient, path: str
) -> None:
    model = path.removeprefix("tinker://").partition("/")[0]
    sampler = await begin(client, model, 3, model_path=path)
    _, credentials = await swarm.begin_episode(sampler=path)
    hive.replica.otherwise = says("there")
    answer, text = await asyncio.gather(drawn(client, sample(sampler)), ask_once(credentials, "hello"))
    assert (tokens(answer.sequences[0]), text) == (tokens_of("there"), "there")
    assert hive.replica.adapters == {address_of("one"): "/w/one"}


async def test_the_episodes_of_a_job_are_not_read_by_clients(
    hive: OperationHive, bus: Bus, swarm: AsyncSwarmClient, path: str
) -> None:
    episode = await played(swarm, path, 1.0)
    await bus.inbox.request(inbox.Stop(id=new_id(), engine=ENGINE))
    assert len(await swarm.take_datums([episode])) == 1, "after the run they can still be taken"
    started = await bus.inbox.request(inbox.Start(id=new_id(), engine=ENGINE))
    assert hive.gateway is not None
    await hive.gateway.follower.wait_position(started.position)
    with pytest.raises(BadRequest) as refused:
        await swarm.take_datums([episode])
    assert refused.value.code == Code.UNSUPPORTED
