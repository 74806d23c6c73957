"""What each login of `bombus init` may do on the bus: all subjects, tried by all services, neighbours and strangers."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import compress
from pathlib import Path
from typing import Any, get_args

import nats
import pytest
from nats.aio.client import Client
from nats.errors import Error, NoRespondersError

from bombus.bus import Bus
from bombus.bus.accounts import SERVICES
from bombus.bus.headers import REPLY
from bombus.bus.reader import Reader
from bombus.bus_address import VARIABLE, BusUser, user_of, without_login
from bombus.cli import main
from bombus.commands.init import make_credentials
from bombus.errors import BusUnavailable
from bombus.hive import inbox
from bombus.hive.events import kind_of
from bombus.hive.generation import replica_key
from bombus.hive.subjects import REPLICA_KEY, SIGNING_SECRET, Subjects
from bombus.host.credentials import read_environment
from tests.bus.guarded_server import GuardedServer, guarded_server
from tests.conftest import SMALL_STREAMS

HIVES = ("main", "next")
KINDS = [kind_of(kind) for kind in get_args(inbox.AnyCommand | inbox.AnyFact)]
STREAMS = {
    "inbox": "BOMBUS_main_inbox",
    "events": "BOMBUS_main_events",
    "calls": "BOMBUS_main_calls",
    "ops": "BOMBUS_main_ops",
    "trajectories": "BOMBUS_main_trajectories",
    "blobs": "OBJ_BOMBUS_main_blobs",
    "secrets": "KV_BOMBUS_main_secrets",
    "leases": "KV_BOMBUS_main_leases",
}
# Written by hand, so that a change of the permissions has to be made twice.
BODIES = {"calls", "ops", "trajectories"}
READS: Mapping[str, set[str]] = {
    "gateway": {"events", "blobs", "secrets"} | BODIES,
    "trainer": {"events", "blobs"} | BODIES,
    "inference": {"events", "blobs"},
    "environment": set(),
    "observer": {"inbox", "events", "blobs", "leases"} | BODIES,
}
OF_REPLICAS = {"load.broke", "replica.alive", "replica.leaves", "stage.reached", "weights.loaded"}
OF_TRAINERS = {
    "cover.written", "engine.broke", "give_up_groups", "model.away", "model.remakes", "operation.begins",
    "operation.done", "stage.reached", "step.broke", "step.done", "trainer.alive", "trainer.hangs", "trainer.opens",
    "trainer.rests", "trainer.serves", "weights.saved",
}  # fmt: skip
OF_COORDINATORS = {
    "bodies.stored", "compaction.tried", "episodes.grouped", "operations.stored", "storage.seen", "tick",
    "trajectories.stored",
}  # fmt: skip
OF_GATEWAYS = (set(KINDS) - OF_COORDINATORS - OF_REPLICAS - OF_TRAINERS) | {"give_up_groups"}
WRITES: Mapping[str, set[str]] = {
    "gateway": {f"inbox {kind}" for kind in OF_GATEWAYS}
    | {"call", "op", "trajectory", "signing secret", "replica key"},
    "trainer": {f"inbox {kind}" for kind in OF_TRAINERS} | {"op", "object", "chunk"},
    "inference": {f"inbox {kind}" for kind in OF_REPLICAS},
    "environment": {"environment"},
    "observer": set(),
}
SUBJECTS = {f"inbox {kind}": f"bombus.main.inbox.{kind}" for kind in KINDS} | {
    "event": "bombus.main.event.main.batch.ready",
    "epoch": "bombus.main.event.hive.epoch.opened",
    "call": "bombus.main.call.main.x",
    "op": "bombus.main.op.main.x",
    "trajectory": "bombus.main.trajectory.main.x",
    "object": "$O.BOMBUS_main_blobs.M.x",
    "chunk": "$O.BOMBUS_main_blobs.C.x",
    "signing secret": "$KV.BOMBUS_main_secrets.episode-keys",
    "replica key": "$KV.BOMBUS_main_secrets.replica-key",
    "other secret": "$KV.BOMBUS_main_secrets.x",
    "lease": "$KV.BOMBUS_main_leases.leader",
    "environment": "$KV.BOMBUS_main_leases.environments.x",
}
READING: Mapping[str, Mapping[str, Any]] = {
    "STREAM.MSG.GET.{}": {"last_by_subj": ">"},
    "DIRECT.GET.{}": {"last_by_subj": ">"},
    "CONSUMER.CREATE.{}.c": {"stream_name": "{}", "config": {"name": "c", "ack_policy": "none", "mem_storage": True}},
}
CHANGING: Mapping[str, Mapping[str, Any]] = {
    "STREAM.DELETE.{}": {},
    "STREAM.PURGE.{}": {"seq": 1},
    "STREAM.UPDATE.{}": {"name": "{}", "subjects": ["x"]},
    "STREAM.CREATE.{}": {"name": "{}", "subjects": ["y"]},
    "STREAM.MSG.DELETE.{}": {"seq": 1},
    "STREAM.SNAPSHOT.{}": {"deliver_subject": "z"},
    "STREAM.LEADER.STEPDOWN.{}": {},
    "CONSUMER.NAMES.{}": {},
    "CONSUMER.LIST.{}": {},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedServer]:
    with guarded_server(tmp_path_factory.mktemp("bus"), *HIVES) as running:
        yield running


def address(server: GuardedServer, user: str, hive: str = "main") -> str:
    return read_environment(server.folder, hive, BusUser(user))[VARIABLE]


@pytest.fixture
async def operator(server: GuardedServer) -> AsyncIterator[Bus]:
    """Return the bus of the operator, with one message in every stream."""
    async with await Bus.connect(address(server, "operator"), "main") as bus:
        await bus.ensure_streams(SMALL_STREAMS)
        for number, name in enumerate(("inbox tick", "event", "call", "op", "trajectory", "object", "other secret")):
            await bus.publisher.publish(SUBJECTS[name], b"secret", msg_id=f"first-{number}")
        await bus.publisher.publish(SUBJECTS["environment"], b"secret", msg_id="environment")
        yield bus


@asynccontextmanager
async def client(url: str, user: str, hive: str = "main") -> AsyncIterator[Client]:
    """Connect as nats-py does, without anything of ours in between."""

    async def ignore(_: Exception) -> None: ...

    prefix = f"_INBOX.{hive}.{user}".encode()
    connected = await nats.connect(url, inbox_prefix=prefix, error_cb=ignore, max_reconnect_attempts=0)
    try:
        yield connected
    finally:
        await connected.close()


async def is_granted(connected: Client, subject: str, body: bytes) -> bool:
    """Return whether a request is answered with anything but an error."""
    try:
        answer = await connected.request(subject, body, timeout=2)
    except (NoRespondersError, TimeoutError, Error):
        return False
    return b'"error"' not in answer.data and (answer.headers or {}).get("Status") is None


def filled(template: object, stream: str) -> bytes:
    return json.dumps(template).replace("{}", stream).encode()


async def written(connected: Client) -> set[str]:
    """Return the names of the subjects that can be written to."""
    granted = await asyncio.gather(*(is_granted(connected, subject, b"x") for subject in SUBJECTS.values()))
    return set(compress(SUBJECTS, granted))


async def called(connected: Client, calls: Mapping[str, Mapping[str, Any]]) -> set[tuple[str, str]]:
    """Return the calls of JetStream's API that are granted for streams, by either way to the API."""
    tried = [(call, short, api) for api in ("$JS.API", "BOMBUS.API") for call in calls for short in STREAMS]
    granted = await asyncio.gather(
        *(
            is_granted(connected, f"{api}.{call.format(STREAMS[short])}", filled(calls[call], STREAMS[short]))
            for call, short, api in tried
        )
    )
    return {(call, short) for call, short, _ in compress(tried, granted)}


async def messages(operator: Bus) -> dict[str, tuple[int, int]]:
    """Return the first and last message of each stream."""
    states = {short: await operator.state(name) for short, name in STREAMS.items()}
    return {short: (state.first_seq, state.last_seq) for short, state in states.items()}


def test_every_message_of_the_inbox_is_sent_by_those_that_this_test_lists() -> None:
    assert set(KINDS) == OF_GATEWAYS | OF_TRAINERS | OF_REPLICAS | OF_COORDINATORS


@pytest.mark.parametrize("user", [user.value for user in SERVICES])
async def test_a_service_can_write_read_and_change_only_what_it_has_to(
    server: GuardedServer, operator: Bus, user: str
) -> None:
    async with client(address(server, user), user) as connected:
        assert await written(connected) == WRITES[user]
        assert await called(connected, READING) == {(call, short) for call in READING for short in READS[user]}
        assert await called(connected, CHANGING) == ({("STREAM.PURGE.{}", "blobs")} if user == "trainer" else set())
        for call in ("STREAM.NAMES", "STREAM.LIST"):
            assert not await is_granted(connected, f"$JS.API.{call}", b"")
            assert not await is_granted(connected, f"BOMBUS.API.{call}", b"")


@pytest.mark.parametrize("user", [user.value for user in BusUser])
async def test_a_neighbour_hives_login_reaches_nothing_of_this_hive(
    server: GuardedServer, operator: Bus, user: str
) -> None:
    before = await messages(operator)
    async with client(address(server, user, "next"), user, "next") as connected:
        assert await written(connected) == set()
        assert await called(connected, READING) == set()
        await called(connected, CHANGING)  # some change streams of the same names in the neighbour's own account
    assert await messages(operator) == before


@pytest.mark.parametrize("login", ["", "main.gateway.1:wrong-password-here", "main.gateway.9:x", "main.nobody.1:x"])
async def test_without_a_valid_login_nobody_gets_in(server: GuardedServer, operator: Bus, login: str) -> None:
    bare = without_login(address(server, "gateway"))
    with pytest.raises(BusUnavailable, match="are the user and password right"):
        await Bus.connect(bare.replace("//", f"//{login}@") if login else bare, "main", timeout_s=0.5)


async def test_the_coordinator_leaves_its_hives_streams_in_place(server: GuardedServer, operator: Bus) -> None:
    async with client(address(server, "coordinator"), "coordinator") as connected:
        assert await written(connected) >= set(SUBJECTS) - {"signing secret"}
        granted = await called(connected, CHANGING)
        assert {call for call, _ in granted} <= {"STREAM.PURGE.{}", "STREAM.UPDATE.{}", "STREAM.CREATE.{}"}


@pytest.mark.parametrize("user", ["gateway", "trainer", "inference", "observer"])
async def test_no_answer_of_the_server_leaves_the_account_of_a_service(
    server: GuardedServer, operator: Bus, user: str
) -> None:
    elsewhere, own = "elsewhere.x", STREAMS["events"]
    heard: list[str] = []

    async def hear(message: Any) -> None:
        heard.append(message.subject)

    await operator.client.subscribe("elsewhere.>", cb=hear)
    await operator.client.flush()
    async with client(address(server, user), user) as connected:
        for call in (f"DIRECT.GET.{own}", f"STREAM.INFO.{own}"):
            await connected.publish(f"BOMBUS.API.{call}", b'{"seq":1}', reply=elsewhere)
        await is_granted(connected, f"BOMBUS.API.DIRECT.GET.{own}", b'{"seq":1}')  # answered after all of these
    await operator.client.publish("elsewhere.end")
    async with asyncio.timeout(5):
        while "elsewhere.end" not in heard:
            await asyncio.sleep(0.01)
    assert heard == ["elsewhere.end"]


async def test_a_service_hears_only_answers_to_its_own_requests(server: GuardedServer, operator: Bus) -> None:
    heard: list[str] = []

    async def hear(message: Any) -> None:
        heard.append(message.subject)

    async with client(address(server, "inference"), "inference") as connected:
        for subject in (">", "_INBOX.>", "bombus.>", "$KV.>", "_R_.>"):
            await connected.subscribe(subject, cb=hear)
        await connected.flush()
        async with await Bus.connect(address(server, "gateway"), "main") as gateway:
            ours = "_INBOX.main.inference.x"
            await gateway.publisher.publish(SUBJECTS["call"], b"x", msg_id="heard")
            await gateway.last(gateway.subjects.events_stream)
            await operator.client.publish("_INBOX.main.gateway.x", b"x")
            await operator.client.publish(ours, b"x")
            async with asyncio.timeout(5):
                while ours not in heard:
                    await asyncio.sleep(0.01)
    assert set(heard) == {ours}


async def test_a_command_cannot_have_its_answer_sent_to_a_stream(server: GuardedServer, operator: Bus) -> None:
    before = await messages(operator)
    async with await Bus.connect(address(server, "coordinator"), "main") as coordinator:
        for reply in (SUBJECTS["event"], SUBJECTS["inbox tick"], SUBJECTS["lease"], "$JS.API.STREAM.PURGE.x"):
            await coordinator.answer(reply, inbox.Done())
        await coordinator.last(coordinator.subjects.events_stream)
    assert await messages(operator) == before


async def test_commands_and_their_answers_cross_the_accounts(server: GuardedServer, operator: Bus) -> None:
    async with (
        await Bus.connect(address(server, "coordinator"), "main") as coordinator,
        await Bus.connect(address(server, "gateway"), "main") as gateway,
        await Bus.connect(address(server, "trainer"), "main") as trainer,
        Reader(coordinator, coordinator.subjects.inbox_stream) as reader,
    ):
        asking = asyncio.create_task(gateway.inbox.request(inbox.Start(id="1")))
        while not asking.done():
            for stored in await reader.read():
                if reply := stored.headers.get(REPLY):
                    await coordinator.answer(reply, inbox.Done(position=7))
                    assert (await asking).position == 7

        async def pong(message: Any) -> None:
            await trainer.answer(message.reply, inbox.Done(doing="stepping"))

        await trainer.client.subscribe(trainer.subjects.trainer("main", 1), cb=pong)
        await trainer.client.flush()
        async with await Bus.connect(address(server, "observer"), "main") as observer:
            for bus in (operator, observer):
                answer = await bus.requests.request(bus.subjects.trainer("main", 1))
                assert inbox.decode_answer(answer.data) == inbox.Done(doing="stepping")


@pytest.mark.parametrize("user", ["trainer", "inference"])
async def test_a_trainer_or_replica_recognizes_gateways_and_cannot_sign_what_they_sign(
    server: GuardedServer, operator: Bus, user: str
) -> None:
    """They can read the key for replicas, which is derived from the secret that signs, and no other secret."""
    async with (
        await Bus.connect(address(server, "gateway"), "main") as gateway,
        await Bus.connect(address(server, user), "main") as bus,
        client(address(server, user), user) as connected,
    ):
        await gateway.hand_out_replica_key()
        secret = await gateway.secret(SIGNING_SECRET)
        assert await bus.replica_key() == await gateway.replica_key() == replica_key(secret)
        with pytest.raises(BusUnavailable, match=r"no (responder|answer)"):
            await bus.last(STREAMS["secrets"], SUBJECTS["signing secret"])
        api = f"BOMBUS.API.DIRECT.GET.{STREAMS['secrets']}"
        allowed, signing = (f"{api}.{SUBJECTS[name]}" for name in ("replica key", "signing secret"))
        assert await is_granted(connected, allowed, b"")
        assert not await is_granted(connected, signing, b"")
        for asked in ({"last_by_subj": SUBJECTS["signing secret"]}, {"seq": 1, "batch": 9}, {"multi_last": ["$KV.>"]}):
            answer = await connected.request(allowed, json.dumps(asked).encode(), timeout=2)
            assert secret not in answer.data, asked


async def test_a_replica_waits_until_a_gateway_has_written_its_key(tmp_path: Path) -> None:
    with guarded_server(tmp_path, "main") as server:
        async with (
            await Bus.connect(address(server, "operator"), "main") as operator,
            await Bus.connect(address(server, "inference"), "main") as bus,
        ):
            await operator.ensure_streams(SMALL_STREAMS)
            waiting = asyncio.create_task(bus.replica_key())
            await bus.state(STREAMS["secrets"])  # answered after the first attempt to read the key
            assert not waiting.done()
            await operator.hand_out_replica_key()
            assert await waiting == await operator.replica_key()


async def test_a_replica_with_the_permissions_of_an_earlier_release_derives_its_key(tmp_path: Path) -> None:
    """Before `bombus init` is run again, its login can read the secret, but not the key alone."""
    with guarded_server(tmp_path, "main") as server:
        accounts = tmp_path / "main" / "accounts.conf"
        narrow = f"DIRECT.GET.{STREAMS['secrets']}.{SUBJECTS['replica key']}"
        broad = f"STREAM.MSG.GET.{STREAMS['secrets']}"
        earlier = json.loads(f"{{{accounts.read_text()}}}")
        for each in earlier["main"]["exports"]:
            if each.get("service") == f"$JS.API.{broad}":
                each["accounts"].append("main.inference")
        for each in earlier["main.inference"]["imports"]:
            service = each.get("service", {})
            if service.get("subject") == f"$JS.API.{narrow}":
                service["subject"], each["to"] = f"$JS.API.{broad}", f"BOMBUS.API.{broad}"
        accounts.write_text(json.dumps(earlier)[1:-1])
        server.reload()
        async with (
            await Bus.connect(address(server, "operator"), "main") as operator,
            await Bus.connect(address(server, "inference"), "main") as bus,
        ):
            await operator.ensure_streams(SMALL_STREAMS)
            await operator.secret(SIGNING_SECRET)
            assert await bus.replica_key() == await operator.replica_key()


async def test_a_replaced_password_stays_valid_until_the_next_one(tmp_path: Path) -> None:
    with guarded_server(tmp_path, "main") as server:
        first = address(server, "gateway")
        async with await Bus.connect(first, "main") as connected:
            make_credentials(tmp_path, "main", rotate=True)
            server.reload()
            second = address(server, "gateway")
            assert second != first
            async with await Bus.connect(first, "main"), await Bus.connect(second, "main"):
                assert connected.is_connected
            make_credentials(tmp_path, "main", rotate=True)
            server.reload()
            with pytest.raises(BusUnavailable, match="are the user and password right"):
                await Bus.connect(first, "main", timeout_s=0.5)
            async with await Bus.connect(second, "main"), await Bus.connect(address(server, "gateway"), "main"):
                pass
            async with asyncio.timeout(10):
                while connected.is_connected:
                    await asyncio.sleep(0.01)


def test_a_second_call_of_init_changes_nothing(tmp_path: Path) -> None:
    def contents() -> dict[str, str]:
        return {str(path): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}

    make_credentials(tmp_path, "main", "nats://bus:4222")
    before = contents()
    make_credentials(tmp_path, "main")
    assert contents() == before
    assert all(path.stat().st_mode & 0o77 == 0 for path in tmp_path.rglob("*"))


def test_a_second_hive_of_a_folder_is_on_the_same_server(tmp_path: Path) -> None:
    make_credentials(tmp_path, "main", "nats://bus:4222")
    make_credentials(tmp_path, "next")
    assert without_login(read_environment(tmp_path, "next", BusUser.OBSERVER)[VARIABLE]) == "nats://bus:4222"


def test_the_server_keeps_its_streams_in_the_same_place_wherever_it_is_started(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / 'the $HOME\'s "ü" folder', tmp_path / "elsewhere"
    elsewhere.mkdir()
    with guarded_server(folder, "main", started_in=elsewhere):
        assert (folder / "jetstream").is_dir()
        assert list(elsewhere.iterdir()) == []


def test_the_user_of_an_address_is_found() -> None:
    assert user_of("nats://main.gateway.2:x@bus:4222,nats://main.gateway.2:x@other:4222", "main") is BusUser.GATEWAY
    for other in ("nats://bus:4222", "nats://bombus:x@bus", "nats://next.gateway.1:x@bus", "nats://main.else.1:x@bus"):
        assert user_of(other, "main") is None
    assert SUBJECTS["signing secret"].endswith(SIGNING_SECRET)
    assert SUBJECTS["replica key"].endswith(REPLICA_KEY)
    assert set(STREAMS.values()) >= {Subjects("main").inbox_stream, Subjects("main").calls_stream}


def test_init_takes_the_address_and_the_hive_from_where_other_commands_take_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, cluster = tmp_path / "secrets", tmp_path / "cluster.yaml"
    cluster.write_text(json.dumps({"nats": "$BOMBUS_NATS", "engines": {"main": {}}}))
    monkeypatch.delenv(VARIABLE, raising=False)
    assert main(["init", str(folder), "--config", str(cluster)]) == 2
    assert "the variable is not set" in capsys.readouterr().err
    monkeypatch.setenv(VARIABLE, "nats://bus:4222")
    assert main(["init", str(folder), "--config", str(cluster)]) == 0
    assert without_login(read_environment(folder, "main", BusUser.GATEWAY)[VARIABLE]) == "nats://bus:4222"
    monkeypatch.setenv("BOMBUS_HIVE", "next")
    assert main(["init", str(folder), "--config", str(cluster)]) == 0
    assert without_login(read_environment(folder, "next", BusUser.GATEWAY)[VARIABLE]) == "nats://bus:4222"


@pytest.mark.parametrize("nats", ["nats://a:4222, nats://b:4222", "nats://a:4222\nBOMBUS_ADMIN_KEY=x"])
def test_init_refuses_an_address_that_would_spoil_its_files(
    tmp_path: Path, nats: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(tmp_path / "secrets"), "--nats", nats]) == 2
    assert "--nats must have no spaces" in capsys.readouterr().err


def test_init_says_in_a_sentence_which_folder_it_cannot_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["init", str(file)]) == 2
    assert f"{file} cannot be written: File exists" in capsys.readouterr().err
