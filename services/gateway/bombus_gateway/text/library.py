"""Adapts the `renderers` library to our `Renderer`, for models whose templates are more than ChatML."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from renderers.base import MODEL_RENDERER_MAP, create_renderer
from renderers.configs import config_from_name

from bombus.errors import EngineFault
from bombus.hive.records import unpack_tokens
from bombus_gateway.text.chatml import stop_tokens
from bombus_gateway.text.message import ChatMessage
from bombus_gateway.text.tokenizer import Tokenizer
from bombus_gateway.text.tool_calls import Delta, ReasoningDelta, TextDelta, ToolCallDelta

log = logging.getLogger(__name__)

PARSE_AGAIN_SHARE = 8  # a completion is parsed again when it has grown by an eighth
_OK = "ok"


class TokenizerForLibrary:
    """The part of a transformers tokenizer that the library uses.

    `split_specials`: whether the name of a special token in a text becomes that token, as in transformers.
    """

    def __init__(self, tokenizer: Tokenizer, name: str, split_specials: bool) -> None:
        self._tokenizer = tokenizer
        self._split_specials = split_specials
        self.name_or_path = name
        eos = stop_tokens(tokenizer)
        self.eos_token_id = eos[0] if eos else None
        self.unk_token_id = None

    def encode(self, text: str, *args: object, **kwargs: object) -> list[int]:
        return self._tokenizer.encode_marked_up(text) if self._split_specials else self._tokenizer.encode(text)

    def decode(self, token_ids: Any, *args: object, **kwargs: object) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, with_specials=not kwargs.get("skip_special_tokens", False))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_id(tokens)
        return [self._tokenizer.token_id(token) for token in tokens]


def library_renderer(tokenizer: Tokenizer, name: str) -> "LibraryRenderer | None":
    """Return the library's renderer for a model, or None when it has none.

    `name` is the model's on the hub, or a folder whose last part is the same.
    """
    kind = MODEL_RENDERER_MAP.get(name)
    if kind is None:
        folder = PurePath(name).name
        kinds = {kind for known, kind in MODEL_RENDERER_MAP.items() if PurePath(known).name == folder}
        kind = kinds.pop() if len(kinds) == 1 else None
    return LibraryRenderer(tokenizer, name, kind) if kind is not None else None


class LibraryRenderer:
    """The renderer of one model of the library.

    Where the library inserts special tokens by id, text in messages cannot forge them. Where it writes them as text,
    which is found out by rendering examples, names of special tokens in messages become tokens, as they do in the
    models' own templates.
    """

    def __init__(self, tokenizer: Tokenizer, name: str, kind: str) -> None:
        self.name = kind
        try:
            safe = create_renderer(TokenizerForLibrary(tokenizer, name, False), config_from_name(kind))
            plain = create_renderer(TokenizerForLibrary(tokenizer, name, True), config_from_name(kind))
            same = all(_rendered(safe, *probe) == _rendered(plain, *probe) for probe in _PROBES)
        except (AssertionError, ValueError, TypeError, KeyError, ImportError) as error:
            raise EngineFault(f"the {kind} renderer cannot be used with the tokenizer of {name!r}: {error}") from error
        if not same:
            log.warning("special tokens in messages are read as tokens", extra={"model": name, "renderer": kind})
        self._renderer = safe if same else plain
        self.stop_token_ids = tuple(self._renderer.get_stop_token_ids())

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        ids = self._renderer.render_ids(_for_library(messages), tools=list(tools) or None, add_generation_prompt=True)
        return list(ids)

    def extend(
        self,
        history: bytes,
        completion_at: int,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
    ) -> list[int] | None:
        """See `Renderer`. The library returns None where the template would change earlier tokens."""
        tokens = unpack_tokens(history)
        bridged = self._renderer.bridge_to_next_turn(
            tokens[:completion_at], tokens[completion_at:], _for_library(messages), tools=list(tools) or None
        )
        if bridged is None or list(bridged.token_ids[: len(tokens)]) != tokens:
            return None
        return list(bridged.token_ids[len(tokens) :])

    def reader(self, prompt: bytes, tools: Sequence[Mapping[str, Any]], stops: Sequence[str]) -> "LibraryReader":
        return LibraryReader(self._renderer, prompt, tools, stops)


class LibraryReader:
    """Parses the whole completion again as it grows, and returns the deltas that can no longer change."""

    def __init__(self, renderer: Any, prompt: bytes, tools: Sequence[Mapping[str, Any]], stops: Sequence[str]) -> None:
        self._renderer = renderer
        self._prompt = unpack_tokens(prompt)
        self._tools = list(tools)
        self._stops = tuple(stops)
        self._tokens: list[int] = []
        self._parse_at = 0
        self._text = ""
        self._reasoning = ""

    def feed(self, text: str, tokens: list[int]) -> list[Delta]:
        self._tokens += tokens
        if len(self._tokens) < self._parse_at:
            return []
        self._parse_at = len(self._tokens) + max(1, len(self._tokens) // PARSE_AGAIN_SHARE)
        return self._new_deltas(self._parse(), final=False)

    def finish(self) -> list[Delta]:
        parsed = self._parse()
        out = self._new_deltas(parsed, final=True)
        for call in parsed.tool_calls:
            if self._tools and str(call.status) == _OK and call.name:
                arguments = call.arguments
                text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
                out.append(ToolCallDelta(call.name, text, call.id or ""))
            else:
                out.append(TextDelta(call.raw))
        return out

    def _parse(self) -> Any:
        return self._renderer.parse_response(self._tokens, tools=self._tools or None, prompt_ids=self._prompt)

    def _new_deltas(self, parsed: Any, final: bool) -> list[Delta]:
        # White space around reasoning belongs to the format, and the library drops it once the reasoning is closed.
        reasoning = _settled(parsed.reasoning_content or "", final).strip()
        content = self._before_stop(_settled(parsed.content or "", final), final)
        if reasoning:
            content = content.lstrip()
        out: list[Delta] = []
        if added := _added(self._reasoning, reasoning, final):
            out.append(ReasoningDelta(added))
            self._reasoning = reasoning
        if added := _added(self._text, content, final):
            out.append(TextDelta(added))
            self._text = content
        return out

    def _before_stop(self, text: str, final: bool) -> str:
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            return text[: min(found)]
        longest = max((len(stop) for stop in self._stops), default=1)
        return text if final else text[: max(0, len(text) - longest + 1)]


def _added(before: str, now: str, final: bool) -> str:
    if now.startswith(before):
        return now[len(before) :]
    if final:
        log.warning("a completion reads otherwise at its end than while it came", extra={"before": before, "now": now})
    return ""


def _settled(text: str, final: bool) -> str:
    """Return the text without white space and half characters at its end, which may still change."""
    return text if final else text.rstrip().rstrip("\ufffd").rstrip()


def _for_library(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as the library takes them: with a content each, and arguments as mappings."""
    out = []
    for message in messages:
        copy = {**message, "content": message.get("content") or ""}
        if message.get("tool_calls"):
            copy["tool_calls"] = [_call_for_library(call) for call in message["tool_calls"]]
        out.append(copy)
    return out


def _call_for_library(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        arguments = function["arguments"]
    return {**call, "function": {"name": function["name"], "arguments": arguments}}


_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_PROBES: list[tuple[list[ChatMessage], list[dict[str, Any]]]] = [
    ([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], []),
    (
        [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "a", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "t"},
        ],
        [_TOOL],
    ),
]


def _rendered(renderer: Any, messages: list[ChatMessage], tools: list[dict[str, Any]]) -> list[int]:
    return list(renderer.render_ids(_for_library(messages), tools=tools or None, add_generation_prompt=True))
