"""Lifetimes, marks, downloads and searches, as Tinker's REST client asks for them."""

import io
import tarfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from bombus.errors import Refused
from bombus.operations import CheckpointSaved, Operation, Result, SaveWeights
from bombus.weights.checkpoints import MANIFEST, Seal, encode_manifest
from bombus_gateway.keys import Keys
from bombus_gateway.operations.rest.downloads import LINK_S, OPEN_MAX, Archive, DownloadLink, Downloads
from tests.gateway.operations.scripted_trainer import Answering, OperationHive, plain_results
from tests.gateway.operations.test_routes import BASE, ask, open_model, result

FILES = {"adapter_model.safetensors": b"w" * 1000, "adapter_config.json": b"{}", "empty.json": b""}


@pytest.fixture
def answering(tmp_path: Path) -> Answering:
    """A trainer that writes checkpoints into a folder of this machine."""

    def writing(operation: Operation) -> Result:
        if not isinstance(operation, SaveWeights):
            return plain_results(operation)
        folder = tmp_path / operation.name
        folder.mkdir(exist_ok=True)
        for name, content in FILES.items():
            (folder / name).write_bytes(content)
        (folder / "secret").write_bytes(b"not listed")
        (folder / MANIFEST).write_bytes(encode_manifest({}, dict.fromkeys([*FILES, "../up"], Seal(1, "aa"))))
        return CheckpointSaved(
            checkpoint=operation.checkpoint, name=operation.name, folder=str(folder), address="aa", size_bytes=1002
        )

    return writing


async def saved(client: httpx.AsyncClient, name: str = "one", **more: Any) -> str:
    """Save a model for others, and return the path of its checkpoint below /api/v1."""
    model = await open_model(client)
    accepted = await ask(client, "save_weights_external", model_id=model, seq_id=1, path=name, **more)
    assert (await result(client, accepted)).json()["path"] == f"tinker://{model}/external_weights/{name}"
    return f"training_runs/{model}/checkpoints/external_weights/{name}"


async def listed(client: httpx.AsyncClient) -> dict[str, Any]:
    (entry,) = (await client.get("checkpoints")).json()["checkpoints"]
    found: dict[str, Any] = entry
    return found


async def test_the_time_to_live_of_a_checkpoint_is_set_and_taken_away(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    path = await saved(client)
    before = await listed(client)
    assert before["expires_at"] is None
    assert (await client.put(f"{path}/ttl", json={"ttl_seconds": 3600})).status_code == 204
    after = await listed(client)
    assert after["expires_at"] > before["time"] == after["time"]
    assert (await client.put(f"{path}/ttl", json={"ttl_seconds": None})).status_code == 204
    assert (await listed(client))["expires_at"] is None
    wrong = await client.put(f"{path}/ttl", json={"ttl_seconds": -1})
    assert (wrong.status_code, "ttl_seconds is -1.0" in wrong.text) == (400, True)
    assert (await client.put(f"{path}x/ttl", json={"ttl_seconds": 1})).status_code == 404


async def test_a_checkpoint_is_marked_as_public_and_not_any_more(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    path = await saved(client, user_metadata={"note": "first"})
    assert (await client.post(f"{path}/publish")).status_code == 204
    entry = await listed(client)
    assert (entry["public"], entry["user_metadata"]) == (True, {"note": "first"})
    assert (await client.delete(f"{path}/publish")).status_code == 204
    assert (await listed(client))["public"] is False
    assert (await client.post(f"{path}x/publish")).status_code == 404


async def test_each_file_of_a_checkpoint_has_a_link_that_needs_no_key(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    answer = (await client.get(f"{await saved(client)}/external_weights_urls")).json()
    assert sorted(answer["urls"]) == sorted(FILES)
    async with httpx.AsyncClient() as stranger:
        for name, content in FILES.items():
            got = await stranger.get(answer["urls"][name])
            assert (got.status_code, got.content) == (200, content)
        part = await stranger.get(answer["urls"]["adapter_model.safetensors"], headers={"range": "bytes=0-9"})
        assert (part.status_code, part.content) == (206, b"w" * 10)
        link = answer["urls"]["empty.json"].removesuffix("/empty.json")
        for name in ("secret", MANIFEST, "..%2Fup", "nothing"):
            assert (await stranger.get(f"{link}/{name}")).status_code == 404
        forged = await stranger.get(f"{link[:-4]}AAAA/empty.json")
        assert (forged.status_code, "not made by this hive" in forged.text) == (401, True)


async def test_a_checkpoint_is_downloaded_whole_as_a_tar(hive: OperationHive, client: httpx.AsyncClient) -> None:
    led = await client.get(f"{await saved(client)}/archive")
    assert led.status_code == 302
    async with httpx.AsyncClient() as stranger:
        got = await stranger.get(led.headers["location"])
    assert int(got.headers["content-length"]) == len(got.content)
    with tarfile.open(fileobj=io.BytesIO(got.content)) as tar:
        found = {member.name: tar.extractfile(member) for member in tar.getmembers()}
    assert {name: file.read() for name, file in found.items() if file} == {f"one/{n}": c for n, c in FILES.items()}


async def test_a_link_is_to_the_weights_as_they_were_and_for_a_while(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    await saved(client)
    assert hive.gateway is not None
    downloads = Downloads(hive.gateway.keys, "main")
    (kept,) = hive.engine.clients.kept.values()
    now_ns = time.time_ns()
    link = downloads.link(kept, now_ns + 5)
    assert downloads.linked(hive.engine, link, now_ns) == kept
    late = await client.get(f"downloads/{downloads.link(kept, now_ns)}/empty.json")
    assert (late.status_code, f"for {LINK_S / 60:.0f} minutes" in late.text) == (401, True)
    other = Downloads(hive.gateway.keys, "other").link(kept, now_ns + 10**12)
    assert "engine other" in (await client.get(f"downloads/{other}/empty.json")).text
    path = f"{kept.noted.model}/external/one"
    changed = hive.gateway.keys.sign_link(msgspec.msgpack.encode(DownloadLink("main", path, "bb", now_ns + 10**12)))
    assert "was saved again" in (await client.get(f"downloads/{changed}/empty.json")).text


async def test_a_folder_that_this_machine_does_not_have_is_named(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    hive.answering = plain_results
    path = await saved(client)
    for what in ("external_weights_urls", "archive"):
        answer = await client.get(f"{path}/{what}")
        assert answer.status_code == 400
        assert "is in /w/one on its trainer's machine" in answer.text


def test_downloads_at_once_have_a_limit() -> None:
    downloads = Downloads(Keys(b"s" * 32), "main")
    with ExitStack() as open_ones:
        for _ in range(OPEN_MAX):
            open_ones.enter_context(downloads.room())
        with pytest.raises(Refused, match="16 downloads are open here"), downloads.room():
            pass
    with downloads.room():
        pass


async def test_an_archive_of_files_that_are_removed_meanwhile_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"x" * 700)
    archive = Archive({"a.bin": path}, "saved")
    path.unlink()
    content = b"".join([chunk async for chunk in archive.chunks()])
    archive.close()
    assert len(content) == archive.size == 512 + 1024 + 1024
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        file = tar.extractfile("saved/a.bin")
        assert file is not None
        assert file.read() == b"x" * 700


async def test_models_have_the_metadata_of_their_clients(hive: OperationHive, client: httpx.AsyncClient) -> None:
    session = (await ask(client, "create_session", sdk_version="0.38.0", display_name="nightly run"))["session_id"]
    metadata = {"project": "bees"}
    made = await ask(
        client, "create_model", session_id=session, model_seq_id=0, base_model=BASE, user_metadata=metadata
    )
    await result(client, made)
    (run,) = (await client.get("training_runs")).json()["training_runs"]
    assert run["user_metadata"] == metadata
    shown = (await client.get(f"sessions/{session}")).json()
    assert (shown["training_run_ids"], shown["display_name"]) == ([f"{session}:train:0"], "nightly run")


async def found(client: httpx.AsyncClient, **search: Any) -> list[str]:
    page = await ask(client, "sessions/search", **search)
    return [session["session_id"] for session in page["sessions"]]


async def test_sessions_are_searched_by_what_is_known_of_them_newest_first(
    hive: OperationHive, client: httpx.AsyncClient
) -> None:
    given = ({"display_name": "Nightly Bees"}, {"display_name": "daily"}, {"user_metadata": {"k": "v"}})
    first, second, third = [
        (await ask(client, "create_session", sdk_version="0.38.0", **each))["session_id"] for each in given
    ]
    assert await found(client) == [third, second, first]
    assert await found(client, display_name="bees night") == [first]
    assert await found(client, display_name="daily", session_id=third) == [third, second]
    assert await found(client, user_metadata={"k": "v"}) == [third]
    assert await found(client, user_metadata={"k": "w"}) == []
    assert await found(client, project_ids=["p"]) == []
    assert await found(client, owner={"type": "user", "owner_urns": ["somebody"]}) == []
    await ask(client, f"sessions/{second}/finish", reason={"type": "errored"}, detail="out of data")
    finished = {"type": "client_finished", "reasons": ["errored"]}
    assert await found(client, statuses=[finished]) == [second]
    assert await found(client, statuses=[{"type": "active"}]) == [third, first]
    page = await ask(client, "sessions/search", limit=2)
    status = {"type": "client_finished", "reason": {"type": "errored"}, "detail": "out of data"}
    assert page["sessions"][1]["status"] == status
    assert await found(client, limit=2, cursor=page["next_cursor"]) == [first]


async def test_what_a_hive_does_not_have_is_refused_in_words(hive: OperationHive, client: httpx.AsyncClient) -> None:
    asked = (
        ("PUT", "sessions/s/project", "no projects"),
        ("POST", "copy_weights", "not copied here"),
        ("GET", "audit", "has no billing"),
        ("GET", "billing/usage/events", "has no billing"),
    )
    for method, path, why in asked:
        answer = await client.request(method, path, json={})
        assert (answer.status_code, why in answer.text) == (400, True), answer.text
    assert (await client.get("sessions/s/trace_export")).json()["status"] == "failed"
