"""The short form of `make fuzz`, and that nothing which outsiders can reach is left out of it."""

import random
import re
import time
from itertools import count, islice
from pathlib import Path

import pytest

from bombus.bus import Bus
from tests.effort import long_only
from tests.fuzz import corpus
from tests.fuzz.decoders import Decoder, all_decoders
from tests.fuzz.decoding import BadDecoding, problem, run
from tests.fuzz.judging import wrong_with
from tests.fuzz.messages import message
from tests.fuzz.requests import HttpCase, Kind, Request, Server, http_case
from tests.fuzz.run import fuzz, routes_of
from tests.fuzz.sockets import Ended, Received
from tests.fuzz.values import Pairs, at, copies, mutated, paths
from tests.inference.test_server import serving

ROOT = Path(__file__).parents[2]
SEED = 20
SECONDS = 6.0
DECODINGS = 600
ROUTES = [("POST", path) for path in corpus.BODIES] + [("GET", path) for path in sorted(corpus.WITHOUT_BODY)]
_DECODES = re.compile(r"msgspec\.(json|msgpack)\.(Decoder|decode)\b")
# Modules of shared/ and services/ that decode: by what they are fuzzed, or why they need not be.
SERVER = "answers of the NATS server, or of an engine that the operator chose"
OWN = "what this machine wrote itself, or its operator"
CLIENT = "answers of the gateway, in a client"
HERE = "requests of programs of this machine, to a port that no other machine reaches"
DECODING = {
    "bombus/bus/blobs.py": "fuzz on the bus",
    "bombus/bus/snapshots.py": "snapshot",
    "bombus/bus/wire.py": SERVER,
    "bombus/demo/folder.py": OWN,
    "bombus/demo/player.py": CLIENT,
    "bombus/endpoints/servers.py": SERVER,
    "bombus/commands/init.py": OWN,
    "bombus/commands/tasks/run.py": CLIENT,
    "bombus/curriculum/journal.py": "lines that are cut and damaged: tests/curriculum/test_journal.py",
    "bombus/environments/chat_model.py": CLIENT,
    "bombus/environments/loading.py": OWN,
    "bombus/environments/openenv/messages.py": "environment message",
    "bombus/environments/pools/session.py": "what a server says an action is: tests/environments/pools/test_remote.py",
    "bombus/environments/pools/remote.py": "what a model samples: tests/environments/pools/test_remote.py",
    "bombus/environments/serving/announcing.py": SERVER,
    "bombus/export/finding.py": "a map of files, which is decoded as messages are",
    "bombus/hive/events/__init__.py": "event",
    "bombus/hive/generation.py": "generate",
    "bombus/hive/inbox/__init__.py": "inbox message",
    "bombus/operations/kinds.py": "operation",
    "bombus/hive/records.py": "call record",
    "bombus/hive/status/data.py": OWN,
    "bombus/insight/keyframes.py": OWN,
    "bombus/insight/record.py": OWN,
    "bombus/insight/trackers/ledger.py": OWN,
    "bombus/hive/trajectories/records.py": "rollout group",
    "bombus/hive/trajectories/training.py": "atropos trained group",
    "bombus/host/doctor_streams.py": SERVER,
    "bombus/machine/environments.py": OWN,
    "bombus/host/installing.py": OWN,
    "bombus/replay/archive.py": "archive",
    "bombus/replay/episode/tree.py": "a map of files, which is decoded as messages are",
    "bombus/rollout/harbor/verdict.py": "what a task's tests write: tests/rollout/harbor/test_verdict.py",
    "bombus/rollout/records.py": OWN,
    "bombus/rollout/tasks.py": OWN,
    "bombus/sdk/requests.py": CLIENT,
    "bombus/slime/http.py": CLIENT,
    "bombus/slime/prompts.py": OWN,
    "bombus/slime/relay.py": HERE,
    "bombus/slime/retrieval.py": HERE,
    "bombus/slime/saved.py": OWN,
    "bombus/slime/settings.py": OWN,
    "bombus/tasks/aws/console.py": "answers of a process of our own",
    "bombus/tasks/aws/worker.py": "requests of a process of our own",
    "bombus/tasks/aws/environment.py": "what an AWS simulator prints",
    "bombus/tasks/search/backends.py": SERVER,
    "bombus/tasks/search/corpus.py": OWN,
    "bombus/weights/adapters.py": "adapter",
    "bombus/weights/checkpoints.py": "checkpoint",
    "bombus/weights/deltas.py": "delta",
    "bombus/weights/lora_folders.py": "a map of files, which is decoded as messages are",
    "bombus_coordinator/compaction.py": OWN,
    "bombus_coordinator/preparing.py": OWN,
    "bombus_coordinator/rules/beginning.py": "a job that was a configuration before",
    "bombus_gateway/anthropic/request.py": "message",
    "bombus_gateway/anthropic/response.py": "what a model samples: tests/gateway/test_anthropic.py",
    "bombus_gateway/atropos/json_body.py": "atropos groups",
    "bombus_gateway/atropos/requests.py": "atropos trainer",
    "bombus_gateway/atropos/scored_data.py": "atropos groups",
    "bombus_gateway/atropos/vllm_generate.py": "atropos generate",
    "bombus_gateway/harnesses/marks.py": "a header: tests/gateway/test_harness_marks.py",
    "bombus_gateway/history/identity.py": "chat",
    "bombus_gateway/call/models.py": "a map of files, which is decoded as messages are",
    "bombus_gateway/call/replica_client.py": "answers of a replica, which is ours",
    "bombus_gateway/decoding/json_body.py": "chat",
    "bombus_gateway/keys.py": "key",
    "bombus_gateway/operations/bodies.py": "training create_model",
    "bombus_gateway/operations/rest/downloads.py": "link",
    "bombus_gateway/operations/rest/routes.py": "requests to the routes of training clients",
    "bombus_gateway/operations/rest/searching.py": "training search",
    "bombus_gateway/operations/routes.py": "requests to the routes of training clients",
    "bombus_gateway/operations/sessions.py": "requests to the routes of training clients",
    "bombus_gateway/operations_wire/checkpoints.py": "training save",
    "bombus_gateway/operations_wire/data/json_data.py": "training forward",
    "bombus_gateway/operations_wire/data/json_numbers.py": "training forward",
    "bombus_gateway/operations_wire/endpoints.py": "requests to the routes of training clients",
    "bombus_gateway/operations_wire/futures.py": "training future",
    "bombus_gateway/operations_wire/generate.py": "training sglang",
    "bombus_gateway/operations_wire/models.py": "training create_model",
    "bombus_gateway/operations_wire/sampling.py": "training sample",
    "bombus_gateway/operations_wire/steps.py": "training optim_step",
    "bombus_gateway/operations_wire/submission.py": "training optim_step",
    "bombus_gateway/text/reading/values.py": "what a model samples: tests/gateway/reading/test_total.py",
    "bombus_gateway/openai/request.py": "chat",
    "bombus_gateway/openai/tokenizing.py": "tokenize",
    "bombus_gateway/responses/request.py": "responses",
    "bombus_gateway/responses/tools.py": "what a model samples: tests/gateway/responses/test_output.py",
    "bombus_inference/backends/openai/wire.py": SERVER,
    "bombus_inference/backends/vllm/scoring.py": SERVER,
    "bombus_inference/backends/vllm/wire.py": SERVER,
    "bombus_inference/model_files.py": "shapes",
    "bombus_inference/server.py": "requests to a replica",
    "bombus_overwatch/service.py": "server-sent event",
    "bombus_trainer/replay/batch.py": "a map of files, which is decoded as messages are",
}


@long_only
async def test_a_hive_under_wrong_requests_and_messages_trains_a_step_afterwards(tmp_path: Path) -> None:
    lines: list[str] = []
    outcome = await fuzz(tmp_path, SEED, SECONDS, lines.append)
    print("\n".join(lines))
    assert outcome.bad == []
    assert min(outcome.statuses[200], outcome.statuses[400]) > 0
    assert outcome.step_s > 0
    assert outcome.decoded.endswith(" 0 bad")


# ---- nothing is left out -------------------------------------------------------------------------------------------


async def test_every_route_of_the_gateway_has_a_valid_request_here(bus: Bus) -> None:
    assert {corpus.bare(path) for _, path in routes_of(bus)} == set(corpus.BODIES) | corpus.WITHOUT_BODY


async def test_every_route_of_a_replica_has_a_valid_request_here() -> None:
    async with serving() as (_, _, client):
        told = await client.get("/")
    assert {tuple(each.split()) for each in told.text.split(",")} == set(corpus.REPLICA)


def test_every_module_that_decodes_is_fuzzed_or_says_why_not() -> None:
    files = [*(ROOT / "shared").rglob("*.py"), *(ROOT / "services").rglob("*.py")]
    decoding = {_module(file) for file in files if _DECODES.search(file.read_text())}
    assert decoding == set(DECODING), "name its decoder in tests/fuzz/decoders.py, and the module here"


def _module(file: Path) -> str:
    """Return a module's path from its package on."""
    parts = file.relative_to(ROOT).parts
    return "/".join(parts[1:] if parts[0] == "shared" else parts[2:])


# ---- it is what it says --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", all_decoders(), ids=lambda each: each.name)
def test_a_decoder_reads_what_is_valid(decoder: Decoder, tmp_path: Path) -> None:
    read = [decoder.write(tree) for tree in decoder.valid]
    if decoder.name.startswith("body "):  # each of which is valid for one route
        assert not all(_refuses(decoder, body, tmp_path) for body in read) or decoder.name.endswith("Body")
    else:
        for body in read:
            decoder.read(body, tmp_path)


def _refuses(decoder: Decoder, body: bytes, folder: Path) -> bool:
    try:
        decoder.read(body, folder)
    except decoder.declared:
        return True
    return False


def test_decoders_raise_what_they_declare_and_nothing_else() -> None:
    outcomes = list(islice(run(SEED, count(), time.monotonic() + 120), DECODINGS))
    assert [each for each in outcomes if isinstance(each, BadDecoding)] == []
    assert len(outcomes) == DECODINGS


def test_a_case_follows_from_its_seed_and_number() -> None:
    def told(number: int) -> list[object]:
        case = http_case(SEED, number, ROUTES)
        return [case.label, *(request.chunks(bytes) for request in case.requests), message(SEED, number)]

    assert [told(number) for number in range(60)] == [told(number) for number in range(60)]
    assert told(1) != told(2)


def test_a_large_value_is_copied_once_whatever_it_is_made_of() -> None:
    """Copies of copies of an object whose names repeat took minutes to write."""
    for large in ("x" * 2_000_000, [0] * 20_000, Pairs(tuple(("a", 0) for _ in range(20_000)))):
        assert len(copies(large, 500)) == 1
    assert len(copies(Pairs((("a", 0),)), 500)) == 500


def test_a_change_leaves_the_tree_that_it_was_made_of_alone() -> None:
    before = repr(corpus.CHATS)
    for number in range(300):
        mutated(corpus.CHATS[number % len(corpus.CHATS)], random.Random(number), corpus.CHATS)
    assert repr(corpus.CHATS) == before
    assert at(corpus.CHATS[0], ("messages", 0, "role")) == "user"
    assert ("messages", 0, "role") in list(paths(corpus.CHATS[0]))


# ---- it finds faults -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "settled", "wrong"),
    [
        (b"HTTP/1.1 500 x\r\ncontent-length: 2\r\n\r\n{}", False, "a fault of the server"),
        (b"HTTP/1.1 500 x\r\ncontent-length: 21\r\n\r\nInternal Server Error", True, "a fault of the server"),
        (b'HTTP/1.1 503 x\r\ncontent-length: 22\r\n\r\n{"code":"no_replica" }', True, "503 while the engine rolls"),
        (b'HTTP/1.1 503 x\r\ncontent-length: 22\r\n\r\n{"code":"no_replica" }', False, ""),
        (b'HTTP/1.1 503 x\r\ncontent-length: 17\r\n\r\n{"code":"a word"}', False, "a fault of the server"),
        (b'HTTP/1.1 200 x\r\ncontent-length: 19\r\n\r\n{"code":"internal"}', True, "it tells of a fault inside"),
        (b"HTTP/1.1 200 x\r\ncontent-length: 5\r\n\r\n{}", True, "no answer within 1 s"),
        (b"garbage", True, "an answer that is not HTTP"),
        (b"", True, "no answer within 1 s"),
        (b"HTTP/1.1 400 x\r\ncontent-length: 2\r\n\r\n{}", True, ""),
    ],
)
def test_an_answer_that_must_not_be_is_found(sent: bytes, settled: bool, wrong: str) -> None:
    case = HttpCase(1, Server.GATEWAY, Kind.CONTENT, (Request("POST", "/x"),), 1.0)
    found = wrong_with(case, [Received(sent, Ended.CLOSED)], settled, bytes)
    assert (wrong in found) if wrong else not found


@pytest.mark.parametrize(
    ("status", "settled", "wrong"), [(503, False, ""), (503, True, "503 while"), (500, False, "a fault of the server")]
)
def test_an_answer_that_its_client_cut_off_is_judged_by_its_status(status: int, settled: bool, wrong: str) -> None:
    case = HttpCase(1, Server.REPLICA, Kind.DROPPED, (Request("POST", "/generate"),), 1.0, is_owed=False)
    sent = b"HTTP/1.1 %d x\r\ntransfer-encoding: chunked\r\n\r\n" % status
    found = wrong_with(case, [Received(sent, Ended.CLOSED)], settled, bytes)
    assert (wrong in found) if wrong else not found


def test_a_decoder_that_raises_something_else_is_found(tmp_path: Path) -> None:
    def reads(body: bytes, _: Path) -> object:
        return {b"a": 1}[body]

    assert "KeyError" in problem(Decoder("x", reads, (ValueError,), ["a"]), b"b", tmp_path)
    assert problem(Decoder("x", reads, (ValueError, KeyError), ["a"]), b"b", tmp_path) == ""
