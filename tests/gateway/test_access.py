"""Access control: every route, every key, every way to present a key, and where a gateway may listen."""

import argparse
import logging
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fastapi.routing import iter_route_contexts
from openai import AsyncOpenAI, AuthenticationError
from pydantic import ValidationError

from bombus.bus import Bus
from bombus.config.cluster import Cluster
from bombus.errors import Code, Refused
from bombus.host.layout import Layout, services
from bombus.machine.hive_keys import HiveKeys, KeyFiles, KeyRing, NamedKey, add_key_arguments, keys_for
from bombus_gateway.access import Access, Guard, KeyHolder
from bombus_gateway.app import GatewayApp
from bombus_gateway.keys import Keys
from bombus_gateway.settings import GatewaySettings
from tests.gateway.openai_hive import gateway_hive, says
from tests.gateway.swarm_hive import PlayedHive, played_hive

ADMIN, CLIENT, WRONG = "an-admin-key-for-tests", "a-client-key-for-tests", "neither-of-the-two-keys"
OF_BOTH = {"/generate", "/v1/models", "/v1/models/x"}  # clients and agents may use these
LATER_NS = 2**62
BOTH = HiveKeys(admin=ADMIN, client=CLIENT)

OPEN = {"/health", "/ready", "/docs", "/openapi.json", "/v1/embeddings", "/v1/x", "/v1/messages/x"}
OPEN |= {"/api/v1/downloads/{link}/{file}"}  # its links are signed
TOKENS = {"/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"}
CALL = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/responses/x",
    *TOKENS,
}  # these need an episode's key
CONTROL = {"/sync_train_config", "/start_engine", "/stop_engine", "/resume_engine", "/sync_train_code"}
CONTROL |= {"/register", "/reset_data", "/stop_episode", "/events", "/call_record"}
CONTROL |= {"/sleep", "/wake_up"}
CLIENTS = {
    "/get_engine_status",
    "/compare_train_config",
    "/claim_episode",
    "/end_episode",
    "/abort_episode",
    "/can_continue_episode",
    "/get_episode_buffer",
    "/get_current_batch_rollout_pool_information",
    "/replay_latest_llm_call",
    "/agree_sync_weight",
    "/get_server_experiment_dir",
    "/push_verbose_log",
    "/claim_episodes",
    "/end_episodes",
    "/abort_episodes",
    "/touch_episodes",
    "/touch_client",
    "/read_ended_episodes",
    "/take_ended_episodes",
    "/v1/models",
    "/v1/models/x",
}

TRAINING = {
    "/abort_gradient_epoch",
    "/checkpoints",
    "/client/config",
    "/client/dynamic_config",
    "/create_model",
    "/create_session",
    "/delete_checkpoint",
    "/forward",
    "/forward_backward",
    "/get_info",
    "/get_server_capabilities",
    "/healthz",
    "/kill_session",
    "/list_checkpoints",
    "/load_weights",
    "/optim_step",
    "/retrieve_future",
    "/save_weights",
    "/save_weights_external",
    "/save_weights_for_sampler",
    "/session_heartbeat",
    "/session_info",
    "/sessions",
    "/sessions/{session}",
    "/sessions/{session}/finish",
    "/telemetry",
    "/training_runs",
    "/training_runs/{model}",
    "/training_runs/{model}/checkpoints",
    "/training_runs/{model}/checkpoints/{kind}/{name}",
    "/unload_model",
    "/weights_info",
}  # below /api/v1, for clients
CHECKPOINT = "/training_runs/{model}/checkpoints/{kind}/{name}"
REST = {f"{CHECKPOINT}/{what}" for what in ("archive", "external_weights_urls", "publish", "ttl")} | {
    "/audit",
    "/billing/usage/checkpoints/current",
    "/billing/usage/events",
    "/copy_weights",
    "/sessions/search",
    "/sessions/{session}/project",
    "/sessions/{session}/trace_export",
}
ENDPOINTS = {"/add_inference_endpoint", "/remove_inference_endpoint", "/list_inference_endpoints"}
SYNC = "/sync_inference_weights"
SAMPLING = {"/create_sampling_session", "/asample", "/samplers/{sampler}"}
CLIENTS |= {f"/api/v1{path}" for path in TRAINING | REST | SAMPLING | {SYNC}} | {"/generate", SYNC} | ENDPOINTS
CLIENTS |= {"/", "/batch", "/disconnect-env", "/info", "/latest_example", "/register-env", "/scored_data"}
CLIENTS |= {"/scored_data_list", "/status", "/status-env", "/wandb_info"}


MULTI_MODEL = {f"/{what}_multi_model_episodes" for what in ("claim", "end", "abort", "touch")}
OF_HIVE = MULTI_MODEL | {"/events", "/call_record"}  # not below /e/main

METRICS = {"/metrics", "/metrics/replicas"}  # of no engine


@pytest.fixture
async def keyed(bus: Bus) -> AsyncIterator[PlayedHive]:
    async with played_hive(bus, keys=BOTH) as played:
        yield played


def routes_of(app: GatewayApp) -> list[tuple[str, str]]:
    """Return (method, path) of everything that the app answers."""
    found = [(method, route.path or "") for route in iter_route_contexts(app.routes) for method in route.methods or ()]
    found += [("GET" if path.endswith(("/models", "/status-env")) else "POST", path) for path in app.hot]
    return found + [("GET", f"{prefix}x") for prefix, _ in app.below]


# ---- routes -----------------------------------------------------------------------------------------------------


async def test_every_route_has_its_guard(keyed: PlayedHive) -> None:
    """A new route has to be added to one of the sets above, and be guarded accordingly."""
    keyed.gateway.ready = False  # a request that passes gets a 503 and changes nothing
    routes = routes_of(keyed.app)
    assert {
        path.removeprefix("/e/main") for _, path in routes
    } == OPEN | CALL | CONTROL | CLIENTS | MULTI_MODEL | METRICS
    assert {path for _, path in routes if path.startswith("/e/")} >= {
        f"/e/main{one}" for one in (CALL | CONTROL | CLIENTS) - OF_HIVE
    }
    for method, path in routes:
        statuses = [
            (await keyed.http.request(method, path, headers={"Authorization": f"Bearer {key}"})).status_code
            for key in (WRONG, CLIENT, ADMIN)
        ]
        bare = path.removeprefix("/e/main")
        if bare in OPEN:
            assert 401 not in statuses, path
        elif bare in CALL:
            assert statuses == [503, 503, 503], path  # before a key is looked at
        else:
            passed = 200 if bare.startswith("/v1/models") else 503
            assert statuses == [401, 401 if bare in CONTROL else passed, passed], path


async def test_no_key_of_anybody_else_opens_a_route(keyed: PlayedHive) -> None:
    """Nothing, an agent's expired key, one of a neighbour hive, one of another engine, and the keys of other roles."""
    keys, neighbours = keyed.gateway.keys, Keys(b"the secret of another hive, 32 B")
    valid = keys.sign("main", 1, "main-1-1", LATER_NS)
    of_agents = (keys.sign("main", 1, "main-1-1", 1), neighbours.sign("main", 1, "main-1-1", LATER_NS), valid[:-2])
    for method, path in routes_of(keyed.app):
        bare = path.removeprefix("/e/main")
        if bare in OPEN:
            continue
        closed = ["", WRONG, neighbours.for_replicas, keys.for_replicas, *of_agents]
        if bare in CALL:
            closed += [CLIENT, ADMIN] + [keys.sign("other", 1, "other-1-1", LATER_NS)] * path.startswith("/e/")
        elif bare not in OF_BOTH:
            closed.append(valid)
        for key in closed:
            reply = await keyed.http.request(method, path, headers={"Authorization": f"Bearer {key}"} if key else {})
            assert reply.status_code == 401, (method, path, key, reply.text)


@pytest.mark.parametrize("way", ["bearer", "x-api-key", "path"])
@pytest.mark.parametrize(
    ("key", "client", "control"), [("", 401, 401), (WRONG, 401, 401), (CLIENT, 503, 401), (ADMIN, 503, 503)]
)
async def test_a_key_counts_however_it_is_presented(
    keyed: PlayedHive, way: str, key: str, client: int, control: int
) -> None:
    keyed.gateway.ready = False
    headers = {"bearer": {"Authorization": f"Bearer {key}"}, "x-api-key": {"X-API-Key": key}, "path": {}}[way]
    prefix = f"/k/{key}" if way == "path" and key else ""
    for path, status in (("/claim_episode", client), ("/e/main/claim_episode", client), ("/stop_engine", control)):
        reply = await keyed.http.post(prefix + path, headers=headers)
        assert reply.status_code == status, path


async def test_tinkers_prefix_may_stand_before_a_key(keyed: PlayedHive) -> None:
    for key, status in ((f"tml-{CLIENT}", 200), (CLIENT, 200), (f"tml-{WRONG}", 401), ("tml-", 401)):
        reply = await keyed.http.post("/api/v1/client/config", headers={"X-API-Key": key})
        assert reply.status_code == status, key


async def test_one_right_key_is_enough_beside_a_wrong_one(keyed: PlayedHive) -> None:
    """Clients of other vendors send their own key in a header, whatever is in the path."""
    reply = await keyed.http.get(f"/k/{CLIENT}/get_engine_status", headers={"X-API-Key": "tml-theirs"})
    assert reply.status_code == 200


@pytest.mark.parametrize(
    ("keys", "access", "opening"),
    [
        (HiveKeys(), Access.CLIENT, {"", CLIENT, ADMIN}),
        (HiveKeys(), Access.CONTROL, {"", CLIENT, ADMIN}),
        (HiveKeys(admin=ADMIN), Access.CLIENT, {"", CLIENT, ADMIN}),
        (HiveKeys(admin=ADMIN), Access.CONTROL, {ADMIN}),
        (HiveKeys(client=CLIENT), Access.CLIENT, {CLIENT}),
        (HiveKeys(client=CLIENT), Access.CONTROL, {CLIENT}),
        (BOTH, Access.CLIENT, {CLIENT, ADMIN}),
        (BOTH, Access.CONTROL, {ADMIN}),
    ],
)
def test_a_route_needs_only_keys_that_are_set(keys: HiveKeys, access: Access, opening: set[str]) -> None:
    guard = Guard(access, KeyRing(keys), "")
    passing = {
        key
        for key in ("", CLIENT, ADMIN)
        if guard.refusal([(b"authorization", f"bearer {key}".encode())] if key else []) is None
    }
    assert passing == opening


async def test_a_refusal_says_which_key_and_how_to_send_it(keyed: PlayedHive) -> None:
    reply = await keyed.http.post(f"/k/{CLIENT}/start_engine")
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.json()["code"] == "bad_key"
    assert all(
        word in reply.json()["detail"]
        for word in ("admin key", "another key was sent", "Authorization: Bearer", "/k/<key>")
    )
    assert CLIENT not in reply.text
    nothing = await keyed.post("/claim_episode")
    assert "client key, but no key was sent" in nothing.json()["detail"]


async def test_the_models_are_listed_to_clients_and_agents(keyed: PlayedHive) -> None:
    key = keyed.gateway.keys.sign("main", 1, "main-1-1", 2**62)
    for sent, status in ((key, 200), (CLIENT, 200), (WRONG, 401)):
        reply = await keyed.http.get("/v1/models", headers={"Authorization": f"Bearer {sent}"})
        assert reply.status_code == status
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.json()["error"]["code"] == "invalid_api_key"


# ---- the key in the path ----------------------------------------------------------------------------------------


async def test_a_client_with_nothing_but_a_url_claims_and_its_agent_calls(bus: Bus) -> None:
    """AgentJet's client puts its server's URL before every path, including that of the base URL."""
    async with gateway_hive(bus, keys=BOTH) as hive, httpx.AsyncClient() as http:
        server_url = f"{hive.base_url}/k/{CLIENT}"
        body = {"client_uuid": "c1", "episode_type": "train", "discard_episode_timeout": 60.0, "throttle_policy": None}
        claim = (await http.post(f"{server_url}/claim_episode", json=body)).json()
        assert claim["openai_base_url"] == f"{hive.base_url}/v1"
        hive.replica.scripts += [says("it rains"), says("it snows")]
        theirs = re.sub(r"^https?://[^/]+", server_url, claim["openai_base_url"])
        for base_url, text in ((theirs, "it rains"), (claim["openai_base_url"], "it snows")):
            async with AsyncOpenAI(base_url=base_url, api_key=claim["openai_api_key"], max_retries=0) as agent:
                answer = await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
            assert answer.choices[0].message.content == text
        async with AsyncOpenAI(base_url=theirs, api_key=CLIENT, max_retries=0) as stranger:
            with pytest.raises(AuthenticationError) as refused:  # a client's key is not an episode's
                await stranger.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        assert refused.value.response.headers["www-authenticate"] == "Bearer"


async def test_agents_of_the_second_engine_call_it_at_the_base_url_of_their_claim(bus: Bus) -> None:
    """AgentJet's client, whose address of the server ends with the engine, joins it and the path of the base URL."""
    async with gateway_hive(bus, engines=("another", "main"), strict_model_names=True) as hive:
        async with httpx.AsyncClient() as http:
            server_url = f"{hive.base_url}/e/main"
            body = {"client_uuid": "c1", "episode_type": "train", "discard_episode_timeout": 60.0}
            claim = (await http.post(f"{server_url}/claim_episode", json=body)).json()
        theirs = re.sub(r"^https?://[^/]+", server_url, claim["openai_base_url"])
        for base_url in (theirs, claim["openai_base_url"]):
            async with AsyncOpenAI(base_url=base_url, api_key=claim["openai_api_key"], max_retries=0) as agent:
                answer = await agent.chat.completions.create(model="main", messages=[{"role": "user", "content": "hi"}])
            assert answer.choices[0].message.content == "ok"


async def test_a_key_in_a_path_is_nowhere_in_answers_or_logs(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # the test's own client, which has the URL
    logging.getLogger("httpcore").setLevel(logging.WARNING)
    answers = ""
    async with gateway_hive(bus, keys=BOTH) as hive, httpx.AsyncClient() as http:
        for path in ("/health/", "/get_engine_status", "/nowhere", "/claim_episode", "/start_engine", "/v1/models", ""):
            for key in (ADMIN, WRONG):
                reply = await http.post(f"{hive.base_url}/k/{key}{path}", json={"client_uuid": 3})
                answers += f"{reply.status_code} {dict(reply.headers)} {reply.text}\n"
    assert "307" in answers
    for text in (answers, caplog.text):
        assert ADMIN not in text
        assert WRONG not in text


async def test_a_path_key_is_ignored_where_no_key_is_set(bus: Bus) -> None:
    async with played_hive(bus) as played:
        assert (await played.http.get(f"/k/{CLIENT}/e/main/get_engine_status")).status_code == 200
        assert (await played.http.get(f"/k/{CLIENT}/k/{CLIENT}/get_engine_status")).status_code == 404


# ---- web pages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("site", "referer", "reads", "changes"),
    [
        ("", "", True, True),  # no browser
        ("none", "", True, True),  # typed by a person
        ("same-origin", "http://127.0.0.1:1/docs", True, True),
        ("cross-site", "", False, False),
        ("same-site", "", False, False),
        ("", "https://evil.example/page", True, False),  # browsers leave Sec-Fetch-Site out of plain HTTP elsewhere
        ("", "evil", True, False),
        ("", "https://hive.example/page", True, True),  # the public URL
    ],
)
def test_an_image_or_a_link_of_another_site_cannot_use_what_needs_no_key(
    site: str, referer: str, reads: bool, changes: bool
) -> None:
    given = {"host": "127.0.0.1:1", "sec-fetch-site": site, "referer": referer}
    headers = [(name.encode(), value.encode()) for name, value in given.items() if value]
    for changing, passes in ((False, reads), (True, changes)):
        guard = Guard(Access.CLIENT, KeyRing(HiveKeys()), "https://hive.example", changing_get=changing)
        assert (guard.refusal(headers) is None) == passes, changing


@pytest.mark.parametrize(("changing", "passes"), [(False, True), (True, False)])
def test_a_person_may_follow_a_link_of_another_site_to_what_changes_nothing(changing: bool, passes: bool) -> None:
    headers = [(b"host", b"127.0.0.1:1"), (b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"navigate")]
    guard = Guard(Access.CLIENT, KeyRing(HiveKeys()), "https://hive.example", changing_get=changing)
    assert (guard.refusal(headers) is None) == passes


@pytest.mark.parametrize(
    ("origin", "host", "passes"),
    [
        ("", "anything:1", True),  # not a browser
        ("http://127.0.0.1:10086", "127.0.0.1:10086", True),
        ("http://localhost:10086", "localhost:10086", True),
        ("http://[::1]:10086", "[::1]:10086", True),
        ("https://hive.example", "127.0.0.1:10086", True),  # the public URL
        ("http://evil.example", "127.0.0.1:10086", False),  # a form that posts here
        ("http://evil.example:10086", "evil.example:10086", False),  # a name that points here
        ("http://localhost:3000", "localhost:10086", False),
        ("null", "127.0.0.1:10086", False),
        ("http://[", "[", False),
    ],
)
def test_a_route_without_a_key_is_closed_to_pages_from_elsewhere(origin: str, host: str, passes: bool) -> None:
    headers = [(b"host", host.encode())] + ([(b"origin", origin.encode())] if origin else [])
    for access in Access:
        refusal = Guard(access, KeyRing(HiveKeys()), "https://hive.example/").refusal(headers)
        assert (refusal is None) == passes
        assert refusal is None or "--public-url" in refusal.why


def test_a_page_from_anywhere_may_use_a_key() -> None:
    headers = [(b"host", b"hive:1"), (b"origin", b"http://evil.example"), (b"x-api-key", ADMIN.encode())]
    assert Guard(Access.CONTROL, KeyRing(BOTH), "").refusal(headers) is None


# ---- where keys come from, and where they are needed ------------------------------------------------------------


def arguments(*words: str, host: str = "127.0.0.1") -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_key_arguments(parser)
    parser.set_defaults(host=host)
    return parser.parse_args(words)


def key_file(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "key"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_key_is_the_whole_file_without_its_line_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = keys_for(arguments("--admin-key-file", key_file(tmp_path, f"{ADMIN}\n")), {"BOMBUS_CLIENT_KEY": CLIENT})
    assert keys == BOTH
    assert not caplog.records
    keys_for(arguments("--admin-key-file", key_file(tmp_path, ADMIN, 0o644)), {})
    assert "chmod o-r" in caplog.text


def test_a_file_and_the_environment_may_agree(tmp_path: Path) -> None:
    given = arguments("--client-key-file", key_file(tmp_path, CLIENT))
    assert keys_for(given, {"BOMBUS_CLIENT_KEY": CLIENT}).client == CLIENT
    with pytest.raises(Refused, match=r"BOMBUS_CLIENT_KEY hold different client keys"):
        keys_for(given, {"BOMBUS_CLIENT_KEY": WRONG})


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "is empty"), (" \n", "is empty"), ("short", "16 to 256"), ("with a space in it", "A-Z"), ("ü" * 20, "A-Z")],
)
def test_an_invalid_key_is_refused_without_being_shown(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(Refused, match=why) as refused:
        keys_for(arguments("--admin-key-file", key_file(tmp_path, text)), {})
    assert not text.strip() or text not in refused.value.why


def test_a_missing_file_and_one_key_for_both_roles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="No such file"):
        keys_for(arguments("--admin-key-file", str(tmp_path / "none")), {})
    with pytest.raises(Refused, match="are the same"):
        keys_for(arguments(), {"BOMBUS_ADMIN_KEY": ADMIN, "BOMBUS_CLIENT_KEY": ADMIN})


def test_client_keys_have_names_and_caps(tmp_path: Path) -> None:
    text = f'{{"alice": {{"key": "{CLIENT}", "open_max": 64, "waiting_max": 16}}, "bob": {{"key": "{WRONG}"}}}}'
    keys = keys_for(arguments("--client-keys-file", key_file(tmp_path, text)), {})
    assert keys.clients == {"alice": NamedKey(key=CLIENT, open_max=64, waiting_max=16), "bob": NamedKey(key=WRONG)}
    variables = replace(keys, files=KeyFiles()).environment()
    assert keys_for(arguments(), variables) == keys
    assert keys_for(arguments(host="0.0.0.0"), {**variables, "BOMBUS_ADMIN_KEY": ADMIN}).clients == keys.clients
    guard = Guard(Access.CLIENT, KeyRing(keys), "")
    assert guard.refusal([]) is not None
    assert guard.holder([(b"x-api-key", CLIENT.encode())]) == KeyHolder("alice", 64, 16)
    assert CLIENT not in repr(keys) + repr(guard)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "JSON"),
        ("[]", "object"),
        (f'{{"alice": "{CLIENT}"}}', "alice"),
        (f'{{"Alice": {{"key": "{CLIENT}"}}}}', "not a valid name"),
        (f'{{"alice": {{"key": "{CLIENT}", "openmax": 1}}}}', "openmax"),
        (f'{{"alice": {{"key": "{CLIENT}", "open_max": -1}}}}', "open_max"),
        ('{"alice": {"key": ""}}', "16 to 256"),
        (f'{{"alice": {{"key": "{CLIENT}"}}, "bob": {{"key": "{CLIENT}"}}}}', "are the same"),
        (f'{{"alice": {{"key": "{ADMIN}"}}}}', "are the same"),
    ],
)
def test_client_keys_that_cannot_be_used_are_refused_without_being_shown(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(Refused, match=why) as refused:
        keys_for(arguments("--client-keys-file", key_file(tmp_path, text)), {"BOMBUS_ADMIN_KEY": ADMIN})
    assert refused.value.code == Code.BAD_CONFIG
    assert CLIENT not in refused.value.why


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_on_loopback_no_key_is_needed(host: str) -> None:
    assert keys_for(arguments(host=host), {}) == HiveKeys()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.7", "2001:db8::1"])
def test_beyond_loopback_both_keys_or_a_trusted_network_are_needed(host: str) -> None:
    admin, client = {"BOMBUS_ADMIN_KEY": ADMIN}, {"BOMBUS_CLIENT_KEY": CLIENT}
    for environment, missing in (
        ({}, "--admin-key-file and --client-key-file"),
        (admin, "pass --client-key-file,"),
        (client, "pass --admin-key-file,"),
    ):
        with pytest.raises(Refused, match=missing) as refused:
            keys_for(arguments(host=host), environment)
        assert refused.value.code == Code.BAD_CONFIG
        assert keys_for(arguments("--trusted-network", host=host), environment) == HiveKeys(
            environment.get("BOMBUS_ADMIN_KEY", ""), environment.get("BOMBUS_CLIENT_KEY", "")
        )
    assert keys_for(arguments(host=host), admin | client) == BOTH


def test_a_host_that_cannot_be_resolved_is_refused() -> None:
    with pytest.raises(Refused, match=r"Cannot listen at no-such-host\.invalid"):
        keys_for(arguments(host="no-such-host.invalid"), {})


def test_a_gateway_that_would_open_the_hive_to_the_network_does_not_start() -> None:
    command = [sys.executable, "-m", "bombus", "gateway", "--host", "0.0.0.0", "--port", "0"]
    ended = subprocess.run(command, env={}, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("bombus gateway: Listening at 0.0.0.0 exposes the hive to the network")


def test_neither_reprs_nor_errors_of_the_settings_show_a_key() -> None:
    settings = GatewaySettings(keys=BOTH)
    with pytest.raises(ValidationError) as invalid:
        GatewaySettings(keys=BOTH, engines=("main", "main"))
    for text in (
        repr(BOTH),
        repr(settings),
        str(settings),
        str(invalid.value),
        repr(Guard(Access.CONTROL, KeyRing(BOTH), "")),
    ):
        assert ADMIN not in text
        assert CLIENT not in text


def test_under_a_supervisor_only_gateways_get_the_keys() -> None:
    cluster = Cluster.model_validate({"gateway": {"count": 2}, "engines": {"main": {"trainer": {}}}})
    found = services(Layout(cluster=cluster, keys=BOTH, trusted_network=True), "nats://nowhere")
    for one in found:
        is_gateway = one.kind == "gateway"
        assert (ADMIN in one.environment.values()) == (CLIENT in one.environment.values()) == is_gateway
        assert ("--trusted-network" in one.command) == is_gateway
        assert ADMIN not in str(one)
    assert [one.name for one in found][-2:] == ["gateway 1", "gateway 2"]
