"""Determines which of a harness's agents is making a call, and whether the call is an auxiliary call of the harness.
Pure."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from bombus.hive.decoding import decoded
from bombus_gateway import limits
from bombus_gateway.access import HeaderMap
from bombus_gateway.call.request import CompletionRequest
from bombus_gateway.harnesses.rules import AUXILIARY_CALL_RULES, AuxiliaryCallRule
from bombus_gateway.text.message import ChatMessage

CODEX_TURN = b"x-codex-turn-metadata"


class Marks(NamedTuple):
    """Which agent makes a call, and for what purpose.

    `role` names the agent within its episode and is empty for the main agent. `auxiliary_call` is the purpose of an
    auxiliary call that the harness makes, such as `title`, and is empty for all other calls.
    """

    role: str = ""
    auxiliary_call: str = ""


class _Request(NamedTuple):
    """The parts of a request that the rules check."""

    headers: HeaderMap
    completion: CompletionRequest
    server_tools: Sequence[str]
    answer: frozenset[str] | None


class _CodexTurn(msgspec.Struct):
    request_kind: str = ""


_codex_turn = msgspec.json.Decoder(_CodexTurn)
_HEADERS = (CODEX_TURN, *{rule.header for rule in AUXILIARY_CALL_RULES if rule.header})
_SYSTEMS = tuple(rule.system for rule in AUXILIARY_CALL_RULES if rule.system)


def marks_of(
    headers: HeaderMap,
    completion: CompletionRequest,
    server_tools: Sequence[str] = (),
    answer: frozenset[str] | None = None,
) -> Marks:
    """Return a call's marks. The role of an auxiliary call is the sub-agent that makes the call or, if no sub-agent
    makes it, the call's purpose.

    `server_tools` are the types of the tools that the server would run, which are not in `completion.tools`. If the
    answer must be JSON, `answer` contains the field names; it is None if the answer may be any text.
    """
    auxiliary_call = ""
    if any(header in headers for header in _HEADERS) or _system(completion.messages).startswith(_SYSTEMS):
        request = _Request(headers, completion, server_tools, answer)
        auxiliary_call = next((rule.auxiliary_call for rule in AUXILIARY_CALL_RULES if _applies(rule, request)), "")
    return Marks((_subagent(headers) or auxiliary_call)[: limits.ROLE_CHARACTERS], auxiliary_call)


def _subagent(headers: HeaderMap) -> str:
    """Return the name that a harness's headers give to the sub-agent, or "" for the main agent.

    Claude Code gives each sub-agent an id, Codex gives it a separate thread in the session, and opencode gives it a
    session with a parent.
    """
    thread, session = headers.get(b"thread-id", b""), headers.get(b"session-id", b"")
    of_codex = thread if session and thread != session else b""
    of_opencode = headers.get(b"x-session-id", b"") if b"x-parent-session-id" in headers else b""
    name = headers.get(b"x-claude-code-agent-id", b"") or of_codex or of_opencode
    return f"subagent {name.decode('latin-1')}" if name else ""


def _applies(rule: AuxiliaryCallRule, request: _Request) -> bool:
    """Return whether a request meets all conditions of a rule."""
    return (
        (not rule.header or rule.header in request.headers)
        and (not rule.request_kind or rule.request_kind == _request_kind(request.headers))
        and _tools_fit(rule, request)
        and (rule.answer is None or _is_answer(rule.answer, request.answer))
        and (not rule.system or _system(request.completion.messages).startswith(rule.system))
        and (not rule.user or _has_all(rule.user, _last_user(request.completion.messages)))
    )


def _tools_fit(rule: AuxiliaryCallRule, request: _Request) -> bool:
    own, of_server = request.completion.tools, request.server_tools
    if rule.only_tool:
        return not own and len(of_server) == 1 and of_server[0].startswith(rule.only_tool)
    return not (rule.without_tools and (own or of_server))


def _is_answer(wanted: frozenset[str], given: frozenset[str] | None) -> bool:
    return given is not None and (not wanted or wanted == given)


def _request_kind(headers: HeaderMap) -> str:
    """Return the kind that Codex assigns to a request, such as `turn`, or "" if the headers give none."""
    try:
        return decoded(_codex_turn.decode, headers.get(CODEX_TURN, b"{}")).request_kind
    except msgspec.MsgspecError:  # the header is from another program, or has an unknown form
        return ""


def _system(messages: Sequence[ChatMessage]) -> str:
    first = next((message for message in messages if message["role"] in ("system", "developer")), None)
    return first.get("content") or "" if first is not None else ""


def _last_user(messages: Sequence[ChatMessage]) -> str:
    """Return the text of the last user message, or "" if an answer or a tool's result comes after it."""
    waiting = next((message for message in reversed(messages) if message["role"] not in ("system", "developer")), None)
    return waiting.get("content") or "" if waiting is not None and waiting["role"] == "user" else ""


def _has_all(sentences: Sequence[str], text: str) -> bool:
    return all(sentence in text for sentence in sentences)
