"""Which replica is chosen, which requests are admitted, and how a request's limits become sampling parameters."""

import asyncio
from collections import Counter

import pytest
from msgspec.structs import replace

from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.config.documents import parse_job
from bombus.errors import Code, Refused
from bombus.hive.events import Collection, EngineConfigured, EpisodeType, ReplicaQuarantined
from bombus.hive.generation import Generate
from bombus.hive.pacing import fitting
from bombus.hive.records import LengthLimit, SamplingParams
from bombus.hive.state import EngineState, Replica
from bombus_gateway.call.admission import Admitted, check_not_over, is_known
from bombus_gateway.call.planning import AnswerLimit, answer_limit, sampling_params
from bombus_gateway.call.replica_client import ReplicaClient, ReplicaGone
from bombus_gateway.call.request import CompletionRequest, RequestedSampling
from bombus_gateway.call.upstream import BUSIER_BY, LEFT_S, Upstream, best
from bombus_gateway.keys import KeyClaims
from tests.gateway.openai_hive import TEXT

ROLLOUT = {"max_prompt_length": 100, "max_response_length": 900, "max_response_length_in_one_turn": 50}
JOB = parse_job({"bombus": {"rollout": {**ROLLOUT, "temperature": 0.9}}})
CHAT = CompletionRequest(chat=True)
ADMITTED = Admitted(EngineState(name="main"), JOB, TEXT, "main-1-1", EpisodeType.TRAIN)


def replica(run: int = 1, version: int = 4, capacity: int = 16) -> Replica:
    return Replica(url="http://r", capacity=capacity, joined_ns=0, run=run, version=version)


def test_an_episode_stays_with_its_replica_until_that_is_busier_than_the_others() -> None:
    replicas = {name: replica() for name in ("a", "b", "c")}
    idle: Counter[str] = Counter()
    homes = {episode: best(replicas, idle, episode)[0] for episode in map(str, range(60))}
    assert set(homes.values()) == set(replicas)
    assert all(best(replicas, idle, episode)[0] == home for episode, home in homes.items())
    home = homes["0"]
    busy = Counter({home: BUSIER_BY + 1})
    assert best(replicas, busy, "0")[0] != home
    fewer = {name: one for name, one in replicas.items() if name != home}
    moved = [episode for episode, was in homes.items() if was != home and best(fewer, idle, episode)[0] != was]
    assert moved == []  # only the episodes of the replica that left move


def test_a_full_replica_is_not_chosen() -> None:
    replicas = {"a": replica(capacity=2), "b": replica(capacity=64)}
    assert best(replicas, Counter({"a": 2, "b": 9}), "any")[0] == "b"


def test_only_replicas_with_the_newest_weights_of_this_run_serve_a_synchronous_job() -> None:
    state = EngineState(name="main", run=1, version=4)
    state.replicas = {
        "old": replica(version=3),
        "other run": replica(run=2),
        "none": replica(version=-1),
        "good": replica(),
    }
    assert list(fitting(state)) == ["good"]


def test_an_asynchronous_job_is_also_served_by_replicas_that_are_behind_within_its_bound() -> None:
    job = EngineConfigured(config="", config_digest="", collection=Collection(max_staleness=1), model="")
    state = EngineState(name="main", run=1, version=4, active=job)
    state.replicas = {
        "older": replica(version=2),
        "old": replica(version=3),
        "good": replica(),
        "none": replica(version=-1),
    }
    assert list(fitting(state)) == ["old", "good"]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_quarantined_replica_gets_no_calls_whatever_it_serves(max_staleness: int) -> None:
    rules = Collection(max_staleness=max_staleness)
    job = EngineConfigured(config="", config_digest="", collection=rules, model="")
    state = EngineState(name="main", run=1, version=4, active=job)
    state.replicas = {"apart": replica(), "apart too": replica(version=3), "good": replica()}
    for name in ("apart", "apart too"):
        state.replicas[name].quarantined = ReplicaQuarantined(run=1, version=4, replica=name, reason="no mount")
    assert list(fitting(state)) == ["good"]


def test_a_busier_home_gives_way_to_the_replica_with_the_most_free_capacity() -> None:
    replicas = {"small": replica(capacity=4), "large": replica(capacity=64), "larger": replica(capacity=128)}
    homed = next(episode for episode in map(str, range(99)) if best(replicas, Counter(), episode)[0] == "small")
    running = Counter({"small": 4, "large": 20, "larger": 30})
    assert best(replicas, running, homed)[0] == "larger"


@pytest.mark.parametrize(
    ("wanted", "prompt", "answered", "limit"),
    [
        (None, 90, 0, AnswerLimit(50, LengthLimit.TURN)),
        (50, 90, 0, AnswerLimit(50, LengthLimit.TURN)),
        (7, 90, 0, AnswerLimit(7, LengthLimit.REQUEST)),
        (None, 990, 0, AnswerLimit(10, LengthLimit.JOB)),
        (None, 600, 880, AnswerLimit(20, LengthLimit.EPISODE)),
        (7, 600, 880, AnswerLimit(7, LengthLimit.REQUEST)),
    ],
)
def test_an_answer_gets_the_room_that_is_left_and_what_limits_it_is_named(
    wanted: int | None, prompt: int, answered: int, limit: AnswerLimit
) -> None:
    request = CompletionRequest(chat=True, sampling=RequestedSampling(max_tokens=wanted))
    assert answer_limit(ADMITTED, request, prompt, answered, is_first=False) == limit


def test_the_models_context_limits_an_answer_where_the_jobs_length_does_not() -> None:
    longer = parse_job({"bombus": {"rollout": {"max_model_len": 9000, "max_response_length_in_one_turn": 100}}})
    admitted = replace(ADMITTED, job=longer)
    assert TEXT.context_tokens == 2048
    limit = answer_limit(admitted, CHAT, 2000, 0, is_first=False)
    assert limit == AnswerLimit(48, LengthLimit.CONTEXT)
    assert limit.reason_at(48) == LengthLimit.CONTEXT
    assert limit.reason_at(47) == LengthLimit.REPLICA


def test_the_jobs_temperature_is_the_default() -> None:
    sampling, overridden = sampling_params(ADMITTED, CHAT, AnswerLimit(50, LengthLimit.TURN))
    assert overridden == ()
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (50, 0.9, None)


def test_a_seed_gives_each_training_episode_its_own_and_an_evaluation_exactly_that_one() -> None:
    request, limit = CompletionRequest(chat=True, sampling=RequestedSampling(seed=3)), AnswerLimit(50, LengthLimit.TURN)
    found, overridden = sampling_params(ADMITTED, request, limit)
    assert overridden == ("seed",)
    assert found == sampling_params(ADMITTED, request, limit)[0]
    other, _ = sampling_params(replace(ADMITTED, episode="main-1-2"), request, limit)
    assert found.seed not in (None, 3, other.seed)
    evaluated, overridden = sampling_params(replace(ADMITTED, type=EpisodeType.EVAL), request, limit)
    assert (evaluated.seed, overridden) == (3, ())


@pytest.mark.parametrize(("tokens", "is_first"), [(101, True), (1000, False)])
def test_a_prompt_that_is_too_long_is_refused(tokens: int, is_first: bool) -> None:
    with pytest.raises(Refused) as refused:
        answer_limit(ADMITTED, CHAT, tokens, 0, is_first)
    assert refused.value.code == Code.PROMPT_TOO_LONG


def test_a_conversation_whose_answers_have_used_up_the_jobs_response_length_gets_no_more() -> None:
    with pytest.raises(Refused, match="have 900 tokens, but the job's max_response_length for all of them is 900"):
        answer_limit(ADMITTED, CHAT, 950, 900, is_first=False)


def test_a_key_of_an_earlier_run_is_over_and_one_of_a_later_run_is_not_known_yet() -> None:
    state = EngineState(name="main", run=2, next_episode=5)
    state.open = {}
    with pytest.raises(Refused, match="run 1 of engine main has ended"):
        check_not_over(state, KeyClaims("main", 1, "main-1-1", 0))
    later = KeyClaims("main", 3, "main-3-1", 0)
    check_not_over(state, later)
    assert not is_known(state, later)


async def test_a_call_at_a_hung_replica_is_aborted_once_the_replica_has_left_the_hive(bus: Bus) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    follower, client = Follower(bus), ReplicaClient("key")
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    state = follower.hive.engines["main"] = EngineState(name="main", run=1, version=0)
    state.replicas["r"] = Replica(url=url, capacity=1, joined_ns=0, run=1, version=0)
    upstream = Upstream(follower, client, bus.inbox)
    request = Generate(id="c", engine="main", run=1, prompt=b"", sampling=SamplingParams(), episode="main-1-1")
    generation, _ = await upstream.start(request, 96)
    waiting = asyncio.create_task(generation.frames())
    quarantined = ReplicaQuarantined(run=1, version=1, replica="r", reason="no mount")
    state.replicas["r"].quarantined = quarantined
    upstream.abort_orphans(now=0.0)
    upstream.abort_orphans(now=99.0)
    await asyncio.sleep(0)
    assert not waiting.done(), "calls of a quarantined replica go on: it may still serve what they are of"
    upstream.abort_orphans(now=100.0)
    del state.replicas["r"]
    upstream.abort_orphans(now=200.0)
    upstream.abort_orphans(now=200.0 + LEFT_S)
    await asyncio.sleep(0)
    assert not waiting.done(), "a replica that stops in good order may still finish"
    upstream.abort_orphans(now=201.0 + LEFT_S)
    with pytest.raises(ReplicaGone, match="left the hive"):
        await waiting
    upstream.finished(generation)
    client.close()
    server.close()
    await server.wait_closed()
