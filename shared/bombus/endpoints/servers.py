"""Find out which server answers at an address, and let it load weights by its own routes, from files that it sees."""

from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec
from msgspec import Struct

from bombus.errors import BombusError, EngineFault

DETECT_TIMEOUT_S = 10.0
ERROR_CHARS_MAX = 400


class LoadFailed(BombusError):
    """The server did not load the weights."""


class ServerKind(StrEnum):
    SGLANG = "sglang"
    VLLM = "vllm"  # or another server with vLLM's completions of token ids
    REPLICA = "bombus"  # which takes adapters beside its own policy


class FoundServer(Struct, frozen=True, kw_only=True):
    """`can_load` says whether it has a route to change its weights; `context` is its limit in tokens, 0 if unknown."""

    kind: ServerKind
    model: str = ""
    context: int = 0
    can_load: bool = True


class _ListedModel(Struct):
    id: str
    max_model_len: int | None = None


class _ModelList(Struct):
    data: list[_ListedModel]


class _ModelInfo(Struct):
    model_path: str = ""


class _Adapters(Struct):
    adapters: list[msgspec.Raw]


class _Update(Struct):
    success: bool = False
    message: str = ""


class _Refusal(Struct):
    why: str = ""


_AnswerT = TypeVar("_AnswerT", _Update, _Refusal)


async def find_server(client: httpx.AsyncClient, model: str = "") -> FoundServer:
    """Find out which kind of server answers; it is to have `model`, if that is given.

    Raises `EngineFault` if none does, or an unknown one.
    """
    where = str(client.base_url).rstrip("/")
    try:
        for path in ("/model_info", "/get_model_info"):
            response = await client.get(path, timeout=DETECT_TIMEOUT_S)
            if response.status_code == 200:
                found = msgspec.json.decode(response.content, type=_ModelInfo)
                return FoundServer(kind=ServerKind.SGLANG, model=found.model_path)
        response = await client.get("/v1/models", timeout=DETECT_TIMEOUT_S)
        if response.status_code != 200:
            raise EngineFault(
                f"{where} answers {response.status_code} at /v1/models: it is not a vLLM or SGLang server, "
                "or it wants a key"
            )
        models = msgspec.json.decode(response.content, type=_ModelList).data
        can_load = (await client.get("/weight_info", timeout=DETECT_TIMEOUT_S)).status_code == 200
    except (httpx.HTTPError, msgspec.MsgspecError) as error:
        raise EngineFault(f"no server can be used at {where}: {str(error) or type(error).__name__}") from error
    listed = next((one for one in models if not model or one.id == model), None)
    if listed is None:
        raise EngineFault(f"{where} serves {', '.join(one.id for one in models) or 'no model'}, not {model!r}")
    return FoundServer(kind=ServerKind.VLLM, model=listed.id, context=listed.max_model_len or 0, can_load=can_load)


async def is_replica(client: httpx.AsyncClient) -> bool:
    """Return whether a replica of ours answers. Raises `EngineFault` where nothing does."""
    try:
        response = await client.get("/adapters", timeout=DETECT_TIMEOUT_S)
        if response.status_code != 200:
            return False
        msgspec.json.decode(response.content, type=_Adapters)
    except msgspec.MsgspecError:
        return False
    except httpx.HTTPError as error:
        where = str(client.base_url).rstrip("/")
        raise EngineFault(f"no server can be used at {where}: {str(error) or type(error).__name__}") from error
    return True


async def load_folder(client: httpx.AsyncClient, kind: ServerKind, folder: Path, label: str, timeout_s: float) -> None:
    """Let a server load the model in a folder, which it must see under the same path, and forget what it has cached.

    `label` is what it calls these weights. Raises `LoadFailed`, or `httpx.HTTPError`.
    """
    if kind is ServerKind.SGLANG:
        await _load_into_sglang(client, folder, label, timeout_s)
    elif kind is ServerKind.VLLM:
        await _load_into_vllm(client, folder, label, timeout_s)
    else:
        raise LoadFailed("it takes adapters only, and this is a whole model")


async def _load_into_sglang(client: httpx.AsyncClient, folder: Path, label: str, timeout_s: float) -> None:
    wanted = {"model_path": str(folder), "weight_version": label, "flush_cache": True}
    response = await client.post("/update_weights_from_disk", json=wanted, timeout=timeout_s)
    if response.status_code not in (200, 400):
        raise LoadFailed(_answered("/update_weights_from_disk", response))
    loaded = _decoded(response, _Update)
    if not loaded.success:
        raise LoadFailed(f"it did not load the weights: {loaded.message[:ERROR_CHARS_MAX]}")


async def _load_into_vllm(client: httpx.AsyncClient, folder: Path, label: str, timeout_s: float) -> None:
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    for path, json in (
        ("/collective_rpc", reload),
        ("/update_weight_version", {"new_version": label}),
        ("/reset_prefix_cache?reset_running_requests=true", None),
    ):
        response = await client.post(path, json=json, timeout=timeout_s)
        if response.status_code != 200 or b'"success":false' in response.content:
            raise LoadFailed(_answered(path, response))


async def load_adapter(client: httpx.AsyncClient, folder: Path, address: str, timeout_s: float) -> None:
    """Let a replica of ours load an adapter by its address. Raises `LoadFailed`, or `httpx.HTTPError`."""
    response = await client.post("/adapters", json={"address": address, "folder": str(folder)}, timeout=timeout_s)
    if response.status_code != 200:
        raise LoadFailed(_decoded(response, _Refusal).why[:ERROR_CHARS_MAX] or _answered("/adapters", response))


def _decoded(response: httpx.Response, kind: type[_AnswerT]) -> _AnswerT:
    try:
        return msgspec.json.decode(response.content, type=kind)
    except msgspec.MsgspecError as error:
        raise LoadFailed(f"its answer cannot be read ({error}): {response.text[:ERROR_CHARS_MAX]}") from error


def _answered(path: str, response: httpx.Response) -> str:
    return f"{path} answered {response.status_code}: {response.text[:ERROR_CHARS_MAX]}"
