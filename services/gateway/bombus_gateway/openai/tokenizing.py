"""vLLM's routes that convert texts and conversations to tokens of the episode's model, and tokens back to text."""

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from starlette.types import ASGIApp, Receive

from bombus.errors import Code
from bombus_gateway.access import EpisodeGuard, HeaderMap, episode_key
from bombus_gateway.call.admission import Admitted
from bombus_gateway.call.calls import Calls
from bombus_gateway.call.http import ErrorEncoder, Responder, route
from bombus_gateway.call.request import CallRequest, CompletionRequest
from bombus_gateway.decoding.json_body import BadParameter, check_depth, decode_body, raw_fields
from bombus_gateway.openai.request import read_chat


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Either a `prompt`, or the `messages`, tools and variables of a chat, which are read by `read_chat`."""

    prompt: str | None = None
    messages: Any = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct):
    tokens: list[Annotated[int, Meta(ge=0)]]


_BodyT = TypeVar("_BodyT")
_tokenize = msgspec.json.Decoder(TokenizeBody)
_detokenize = msgspec.json.Decoder(DetokenizeBody)


class TokenRoutes:
    """The two routes. `tokenize` and `detokenize` are ASGI applications that require an episode's key."""

    def __init__(self, calls: Calls, agents: EpisodeGuard, errors: ErrorEncoder) -> None:
        self._calls = calls
        self._agents = agents
        self.tokenize: ASGIApp = route("POST", errors, self._answer_tokenize, calls.metrics.refusals)
        self.detokenize: ASGIApp = route("POST", errors, self._answer_detokenize, calls.metrics.refusals)

    async def _answer_tokenize(self, headers: HeaderMap, receive: Receive, response: Responder) -> None:
        (found, completion), request = await self._received(headers, receive, read_tokenize)
        request = msgspec.structs.replace(request, completion=completion)
        request, admitted = await self._calls.admission.admit(request)
        work = partial(_tokenized, admitted, found, request.completion, request.body_bytes)
        tokens, strings = await self._calls.workers.run(request.claims.episode, request.body_bytes, work)
        answer = {
            "count": len(tokens),
            "max_model_len": min(admitted.job.rollout.max_model_len, admitted.model.context_tokens),
            "tokens": tokens,
            "token_strs": strings,
        }
        await response.whole(msgspec.json.encode(answer))

    async def _answer_detokenize(self, headers: HeaderMap, receive: Receive, response: Responder) -> None:
        found, request = await self._received(headers, receive, partial(decode_body, _detokenize))
        _, admitted = await self._calls.admission.admit(request)
        work = partial(_detokenized, admitted, found.tokens)
        text = await self._calls.workers.run(request.claims.episode, request.body_bytes, work)
        await response.whole(msgspec.json.encode({"prompt": text}))

    async def _received(
        self, headers: HeaderMap, receive: Receive, decode: Callable[[bytes], _BodyT]
    ) -> tuple[_BodyT, CallRequest]:
        """Return the decoded body of an agent's request, and an empty call request to be admitted."""
        now_ns = time.time_ns()
        self._calls.check_ready()
        claims = self._agents.verify(episode_key(headers), now_ns)
        self._calls.admission.check_episode(claims)
        bodies = self._calls.bodies

        def work(body: bytes) -> tuple[_BodyT, int]:
            check_depth(body)
            return decode(body), len(body)

        found, size = await bodies.decoded(headers, receive, bodies.calls, work, claims.episode)
        nothing = CompletionRequest(chat=False)
        return found, CallRequest(claims=claims, completion=nothing, digest=b"", body_bytes=size, received_ns=now_ns)


def read_tokenize(body: bytes) -> tuple[TokenizeBody, CompletionRequest]:
    """Decode the body of `POST /tokenize`. Raises `Refused`, naming the parameter that is invalid."""
    found = decode_body(_tokenize, body)
    if (found.prompt is None) == (found.messages is None):
        raise BadParameter(Code.MALFORMED, "prompt", "Send either prompt or messages.")
    if found.prompt is not None:
        return found, CompletionRequest(chat=False, prompt=found.prompt)
    fields = decode_body(raw_fields, body)
    fields.setdefault("model", msgspec.Raw(b'""'))  # vLLM does not require a model
    return found, read_chat(msgspec.json.encode(fields)).completion


def _tokenized(
    admitted: Admitted, found: TokenizeBody, completion: CompletionRequest, body_bytes: int
) -> tuple[list[int], list[str] | None]:
    """Return the tokens, and the text of each token if requested. Raises `InvalidField` PROMPT_TOO_LONG if there are
    too many tokens."""
    admitted.check_characters(completion)
    tokens = _tokens(admitted, completion, found.add_generation_prompt)
    decode = partial(admitted.model.tokenizer.decode, with_specials=True)
    return tokens, [decode([token]) for token in tokens] if found.return_token_strs else None


def _detokenized(admitted: Admitted, tokens: list[int]) -> str:
    """Return the text of tokens. Raises `BadParameter` for ids outside the vocabulary."""
    tokenizer = admitted.model.tokenizer
    if tokens and max(tokens) >= len(tokenizer.pieces):
        raise BadParameter(Code.MALFORMED, "tokens", f"tokens contains {max(tokens)}, which is outside the vocabulary.")
    return tokenizer.decode(tokens, with_specials=True)


def _tokens(admitted: Admitted, completion: CompletionRequest, generate: bool) -> list[int]:
    """Return the tokens in the prompt of a call with these messages or this text."""
    model = admitted.model
    if isinstance(completion.prompt, str) and not completion.chat:
        return model.tokenizer.encode(completion.prompt)
    renderer = model.renderer.given(completion.chat_template_kwargs)
    return renderer.render(renderer.adapted(completion.messages), completion.tools, generate)
