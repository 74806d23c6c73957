"""Find out which kind of server answers at an address, and have it load weights from shared files through its own
routes."""

import asyncio
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec import Struct

from bombus.errors import BombusError, EngineFault

if TYPE_CHECKING:
    import httpx

DETECT_TIMEOUT_S = 10.0
ERROR_CHARS_MAX = 400
ANSWER_BYTES_MAX = 1 << 20  # more than enough: a list of models or adapters takes a few kilobytes

# Raised when decoding an answer that is not the expected JSON, not UTF-8, or nested too deeply.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class LoadFailed(BombusError):
    """A server did not load the weights."""


class ServerKind(StrEnum):
    SGLANG = "sglang"
    VLLM = "vllm"  # also any other server with vLLM's token-id completions
    REPLICA = "bombus"  # loads adapters in addition to its own policy


class FoundServer(Struct, frozen=True, kw_only=True):
    """An inference server. `can_load` says whether it has a route to change its weights; `context` is its context
    length in tokens, or 0 if unknown."""

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


class _Update(Struct):
    success: bool = False
    message: str = ""


class _Refusal(Struct):
    why: str = ""


class _WholeAnswer(Struct, frozen=True):
    status: int
    body: bytes

    @property
    def text(self) -> str:
        return self.body[: 4 * ERROR_CHARS_MAX].decode(errors="replace")[:ERROR_CHARS_MAX]


_AnswerT = TypeVar("_AnswerT", _Update, _Refusal)


async def find_server(client: "httpx.AsyncClient", model: str = "") -> FoundServer:
    """Find out which kind of server answers.

    Raises `EngineFault` if it is not a known kind, or if `model` is given and a vLLM server does not serve it.
    """
    import httpx  # imported late: it takes 5 MB of memory, and few gateways need it

    where = str(client.base_url).rstrip("/")
    try:
        for path in ("/model_info", "/get_model_info"):
            answer = await _asked(client, "GET", path, DETECT_TIMEOUT_S)
            if answer.status == 200:
                found = msgspec.json.decode(answer.body, type=_ModelInfo)
                return FoundServer(kind=ServerKind.SGLANG, model=found.model_path)
        answer = await _asked(client, "GET", "/v1/models", DETECT_TIMEOUT_S)
        if answer.status != 200:
            raise EngineFault(
                f"{where} answered {answer.status} at /v1/models: it is not a vLLM or SGLang server, or it needs a key"
            )
        models = msgspec.json.decode(answer.body, type=_ModelList).data
        can_load = (await _asked(client, "GET", "/weight_info", DETECT_TIMEOUT_S)).status == 200
    except (httpx.HTTPError, *_UNREADABLE) as error:
        raise EngineFault(f"no server can be used at {where}: {str(error) or type(error).__name__}") from error
    listed = next((one for one in models if not model or one.id == model), None)
    if listed is None:
        raise EngineFault(f"{where} serves {', '.join(one.id for one in models) or 'no model'}, not {model!r}")
    return FoundServer(kind=ServerKind.VLLM, model=listed.id, context=listed.max_model_len or 0, can_load=can_load)


async def load_folder(
    client: "httpx.AsyncClient", kind: ServerKind, folder: Path, label: str, timeout_s: float
) -> None:
    """Make a server load the model in a folder, which the server must see under the same path, and clear its cache.

    `label` is the version that the server reports for these weights. Raises `LoadFailed` if the server does not load
    the model, or `httpx.HTTPError` if it does not answer properly.
    """
    if kind is ServerKind.SGLANG:
        await _load_into_sglang(client, folder, label, timeout_s)
    elif kind is ServerKind.VLLM:
        await _load_into_vllm(client, folder, label, timeout_s)
    else:
        raise LoadFailed("it loads only adapters, but this is a whole model")


async def _load_into_sglang(client: "httpx.AsyncClient", folder: Path, label: str, timeout_s: float) -> None:
    wanted = {"model_path": str(folder), "weight_version": label, "flush_cache": True}
    answer = await _asked(client, "POST", "/update_weights_from_disk", timeout_s, wanted)
    if answer.status not in (200, 400):
        raise LoadFailed(_answered("/update_weights_from_disk", answer))
    loaded = _decoded(answer, _Update)
    if not loaded.success:
        raise LoadFailed(f"it did not load the weights: {loaded.message[:ERROR_CHARS_MAX]}")


async def _load_into_vllm(client: "httpx.AsyncClient", folder: Path, label: str, timeout_s: float) -> None:
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    for path, json in (
        ("/collective_rpc", reload),
        ("/update_weight_version", {"new_version": label}),
        ("/reset_prefix_cache?reset_running_requests=true", None),
    ):
        answer = await _asked(client, "POST", path, timeout_s, json)
        if answer.status != 200 or b'"success":false' in answer.body:
            raise LoadFailed(_answered(path, answer))


async def load_adapter(client: "httpx.AsyncClient", folder: Path, address: str, timeout_s: float) -> None:
    """Make one of our replicas load the adapter with this address from a folder.

    Raises `LoadFailed` if the replica does not load it, or `httpx.HTTPError` if the replica does not answer properly.
    """
    wanted = {"address": address, "folder": str(folder)}
    answer = await _asked(client, "POST", "/adapters", timeout_s, wanted)
    if answer.status != 200:
        raise LoadFailed(_decoded(answer, _Refusal).why[:ERROR_CHARS_MAX] or _answered("/adapters", answer))


async def _asked(
    client: "httpx.AsyncClient", method: str, path: str, timeout_s: float, json: Mapping[str, object] | None = None
) -> _WholeAnswer:
    """Return a server's whole answer. Raises `httpx.HTTPError`, including for an answer that is too large or too
    late."""
    import httpx

    body = bytearray()
    headers = {"accept-encoding": "identity"}  # a small answer could unpack to a huge one
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.stream(method, path, json=json, headers=headers, timeout=timeout_s) as response,
        ):
            if response.headers.get("content-encoding", "identity") != "identity":
                raise httpx.DecodingError(f"the answer at {path} is encoded, which was not requested")
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > ANSWER_BYTES_MAX:
                    raise httpx.DecodingError(f"the answer at {path} has more than {ANSWER_BYTES_MAX} bytes")
    except TimeoutError as error:
        raise httpx.ReadTimeout(f"the answer at {path} was not complete within {timeout_s:g} s") from error
    return _WholeAnswer(response.status_code, bytes(body))


def _decoded(answer: _WholeAnswer, kind: type[_AnswerT]) -> _AnswerT:
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except _UNREADABLE as error:
        raise LoadFailed(f"its answer cannot be read ({error}): {answer.text}") from error


def _answered(path: str, answer: _WholeAnswer) -> str:
    return f"{path} answered {answer.status}: {answer.text}"
