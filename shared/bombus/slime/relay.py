"""Gives each running sample its own address, where hook files find SGLang's `/generate`.

Requests to an address become calls of the sample's episode, whichever HTTP client, thread or process sends them,
because the port identifies the sample.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import httpx
import msgspec

from bombus.errors import Code, Refused, in_one_line
from bombus.hive.decoding import decoded
from bombus.machine.certificates import certificates
from bombus.machine.host_names import is_loopback
from bombus.sdk.transport import HttpPools
from bombus.sdk.types import Credentials
from bombus.slime.local_server import JSON, LocalAnswer, LocalServer

TEXTS_MAX = 128  # texts per sample whose tokens are remembered; an answer that was not shown in full takes two
RETIRED_MAX = 256  # ports of ended samples that stay open, so that other samples do not get them too soon
OVER = 403  # status that a gateway returns once an episode is over
SHOWN_OTHERWISE = ("skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens", "custom_params")
HALF_A_CHARACTER = "\ufffd"  # what a decoder returns for the bytes of an incomplete character
UNSUPPORTED = ("image_data", "video_data", "audio_data", "input_embeds")


class SampledCall(msgspec.Struct, frozen=True):
    """A model call made for a sample, with its answer: the id of the call on the log, the prompt's tokens, and the
    sampled tokens."""

    id: str
    prompt: list[int]
    sampled: list[int]


class SampleAddress:
    """The address of one sample. `calls` contains the calls made at this address, in the order of their answers.

    An address without credentials belongs to no sample, and refuses all model calls.
    """

    def __init__(self, pools: HttpPools[httpx.AsyncClient], tokenizer: Any, credentials: Credentials | None) -> None:
        self.calls: list[SampledCall] = []
        self.port = 0
        self._pools = pools
        self._tokenizer = tokenizer
        self._before = list(tokenizer.encode("a", add_special_tokens=False))  # prepended to tokens when decoding
        self._before_text = str(tokenizer.decode(self._before))
        self._credentials = credentials
        self._known: deque[tuple[str, list[int]]] = deque(maxlen=TEXTS_MAX)  # texts so far, and their tokens
        self._server = LocalServer(self._answer)
        self._is_over = False

    async def open(self) -> None:
        self.port = await self._server.open()

    def retire(self) -> None:
        """End the sample: from now on, answer calls as aborted or refuse them."""
        self._is_over = True

    async def close(self) -> None:
        await self._server.close()

    # ---- requests ---------------------------------------------------------------------------------------------

    async def _answer(self, method: str, path: str, body: bytes) -> LocalAnswer:
        try:
            match method, path.partition("?")[0]:
                case "GET", "/health" | "/health_generate":
                    return LocalAnswer(200, b"{}")
                case "POST", "/generate":
                    return await self._generate(body)
                case _, called if called.startswith("/v1/"):
                    return await self._pass_on(method, path, body)
                case _:
                    why = f"{method} {path} is not offered to a sample: use POST /generate, or a path below /v1/"
                    raise Refused(Code.UNKNOWN_PATH, why)
        except httpx.RequestError as error:
            why = f"the hive cannot be reached: {in_one_line(error)}"
            return LocalAnswer(503, msgspec.json.encode({"error": {"message": why}}))

    async def _pass_on(self, method: str, path: str, body: bytes) -> LocalAnswer:
        if self._is_over:
            raise Refused(Code.EPISODE_OVER, "this sample is over: its generate function has returned")
        response = await self._ask(method, path, body)
        return LocalAnswer(response.status_code, response.content, response.headers.get("content-type", JSON))

    async def _ask(self, method: str, path: str, body: bytes) -> httpx.Response:
        if self._credentials is None:
            why = "the model answers only for samples: use the args that the generate function was called with"
            raise Refused(Code.UNSUPPORTED, why)
        root = self._credentials.base_url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {self._credentials.api_key}", "content-type": JSON}
        with self._pools.client() as http:
            return await http.request(method, root + path, content=body, headers=headers)

    async def _generate(self, body: bytes) -> LocalAnswer:
        asked = _fields(body)
        if self._is_over:
            return _aborted()
        params = dict(asked.get("sampling_params") or {})
        shown = {name: params.pop(name) for name in SHOWN_OTHERWISE if name in params}
        prompt, text = self._prompt(asked)
        sent = {
            "input_ids": prompt,
            "sampling_params": {name: value for name, value in params.items() if value is not None},
            "return_logprob": True,
        }
        content = msgspec.json.encode({**asked, **sent})
        response = await self._ask("POST", "/generate", content)
        if response.status_code == OVER:
            return _aborted()
        if response.status_code != 200:
            return LocalAnswer(response.status_code, response.content)
        answers = msgspec.json.decode(response.content)
        for answer in answers if isinstance(answers, list) else [answers]:
            self._note(response.headers.get("x-request-id", ""), prompt, answer)
            if shown.get("no_stop_trim"):
                skips = bool(shown.get("skip_special_tokens", True))
                answer["text"] = self._decoded(answer["output_ids"], skips)
            if text is not None:
                self._remember(text, prompt, answer["text"], list(answer["output_ids"]))
            if not asked.get("return_logprob"):
                del answer["meta_info"]["output_token_logprobs"]
        return LocalAnswer(200, msgspec.json.encode(answers))

    def _note(self, call: str, prompt: list[int], answer: Mapping[str, Any]) -> None:
        self.calls.append(SampledCall(call, prompt, list(answer["output_ids"])))

    def _remember(self, text: str, prompt: list[int], shown: str, sampled: list[int]) -> None:
        """Remember the tokens of a prompt and its answer, for a later prompt that continues this text.

        An answer may be shown without its last tokens, such as a stop string or `<|im_end|>`. If a later prompt
        contains the text of those tokens, they are kept in that prompt; in any other prompt, only the tokens that were
        shown are kept.
        """
        whole = self._decoded(sampled)
        self._known.append((text + whole, prompt + sampled))
        if whole != shown:
            kept = sampled[: self._shown(sampled, shown)]
            self._known.append((text + self._decoded(kept), prompt + kept))

    def _shown(self, sampled: list[int], shown: str) -> int:
        """Return how many of the sampled tokens, from the first, decode to the beginning of the shown text."""

        def ends_after(count: int) -> bool:
            return not shown.startswith(self._decoded(sampled[:count]).rstrip(HALF_A_CHARACTER))

        back = 1  # nearly always, only the last token was not shown
        while back < len(sampled) and ends_after(len(sampled) - back):
            back *= 2
        count = bisect_left(range(len(sampled) + 1), True, lo=max(len(sampled) - back, 0), key=ends_after) - 1
        while count > 0 and not shown.startswith(self._decoded(sampled[:count])):
            count -= 1  # the last character is incomplete
        return max(count, 0)

    def _decoded(self, tokens: list[int], skips: bool = False) -> str:
        """Return the text of tokens that follow others. SentencePiece tokens decoded alone would lose a leading
        space."""
        whole = str(self._tokenizer.decode(self._before + tokens, skip_special_tokens=skips))
        return whole[len(self._before_text) :]

    def _prompt(self, asked: dict[str, Any]) -> tuple[list[int], str | None]:
        """Return the tokens of a prompt, and the prompt's text if it was given as text.

        A text that continues an answer keeps the answer's sampled tokens, so that the next answer is conditioned on
        exactly the tokens that are trained on.
        """
        text = asked.pop("text", None)
        if text is None and isinstance(asked.get("input_ids"), list):
            return asked["input_ids"], None
        if not isinstance(text, str) or asked.get("input_ids"):
            raise Refused(Code.MALFORMED, "send one prompt at a time, as a text or as input_ids")
        before, tokens = max(
            ((known, ids) for known, ids in self._known if text.startswith(known)),
            key=lambda found: len(found[0]),
            default=("", []),
        )
        rest = text[len(before) :]
        return tokens + (list(self._tokenizer.encode(rest, add_special_tokens=False)) if rest else []), text


class SampleRelay:
    """Provides samples with their addresses while the block runs."""

    def __init__(self, server_url: str, tokenizer: Any) -> None:
        trusts = not is_loopback(httpx.URL(server_url).host)
        timeout, checks = httpx.Timeout(None, connect=10.0), certificates(trusts)
        self._pools = HttpPools(lambda: httpx.AsyncClient(timeout=timeout, trust_env=trusts, verify=checks))
        self._tokenizer = tokenizer
        self._retired: deque[SampleAddress] = deque()
        self._current: set[SampleAddress] = set()

    async def __aenter__(self) -> "SampleRelay":
        return self

    async def __aexit__(self, *_: object) -> None:
        for address in (*self._current, *self._retired):
            await address.close()
        for http in self._pools.made:
            await http.aclose()

    async def open(self, credentials: Credentials | None) -> SampleAddress:
        address = SampleAddress(self._pools, self._tokenizer, credentials)
        await address.open()
        self._current.add(address)
        return address

    async def retire(self, address: SampleAddress) -> None:
        """Retire an address. Its port stays open for a while, so that late requests do not reach another sample."""
        address.retire()
        self._current.discard(address)
        self._retired.append(address)
        while len(self._retired) > RETIRED_MAX:
            await self._retired.popleft().close()


def _fields(body: bytes) -> dict[str, Any]:
    with suppress(msgspec.DecodeError):
        fields = decoded(msgspec.json.decode, body)
        params = fields.get("sampling_params") if isinstance(fields, dict) else None
        if isinstance(fields, dict) and isinstance(params, dict | None):
            if named := next((name for name in UNSUPPORTED if fields.get(name)), ""):
                raise Refused(Code.UNSUPPORTED, f"{named} is not offered here: prompts are text or token ids")
            return fields
    raise Refused(Code.MALFORMED, "the body is not a JSON object with a prompt and sampling_params")


def _aborted() -> LocalAnswer:
    """Return what SGLang answers to an aborted request, with no sampled tokens, so that the hook gives up."""
    meta = {"finish_reason": {"type": "abort"}, "prompt_tokens": 0, "completion_tokens": 0, "output_token_logprobs": []}
    return LocalAnswer(200, msgspec.json.encode({"text": "", "output_ids": [], "meta_info": meta}))
