"""Auxiliary calls and sub-agents, as harnesses were seen to send them, and the ordinary calls beside them."""

import json
from typing import Any

import pytest

from bombus_gateway.call.request import CompletionRequest
from bombus_gateway.harnesses.marks import Marks, marks_of
from bombus_gateway.harnesses.rules import AUXILIARY_CALL_RULES
from bombus_gateway.openai.request import read_chat

CLAUDE = {b"x-claude-code-session-id": b"b3b5a064", b"x-app": b"cli"}
CODEX = {b"session-id": b"s1", b"thread-id": b"s1", b"originator": b"codex_exec"}
OPENCODE = {b"x-session-id": b"ses_1", b"x-session-affinity": b"ses_1"}
BASH = {"type": "function", "function": {"name": "Bash", "parameters": {"type": "object"}}}
TASK = {"role": "user", "content": "Fix the bug in parser.py."}
ANSWER = {"role": "assistant", "content": "Done."}

CLAUDE_COMPACTION = (
    "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\n- Do NOT use Read, Bash, Grep, Glob, Edit, Write, or "
    "ANY other tool.\n\nYour task is to create a detailed summary of the conversation so far, paying close attention "
    "to the user's explicit requests and your previous actions."
)
OPENCODE_TITLE = "You are a title generator. You output ONLY a thread title. Nothing else.\n\n<task>\nGenerate a brief"
OPENCODE_COMPACTION = "You are a context summarization agent. You are given a conversation between a user and an agent."
QWEN_COMPACTION = (
    "You are the component that summarizes a conversation when its context window is about to overflow. The summary you"
)
QWEN_MEMORY = "You are now acting as the managed memory extraction subagent for an AI coding assistant.\n\nThe recent"
QWEN_DREAM = "You are performing a managed memory dream — a reflective pass over durable memory files."
AIDER_COMMIT = (
    "You are an expert software engineer that generates concise, one-line Git commit messages based on the provided "
    "diffs.\nReview the provided context"
)
AIDER_SUMMARY = "*Briefly* summarize this partial conversation about programming.\nInclude less detail about older"


def asked(*messages: dict[str, Any], tools: tuple[dict[str, Any], ...] = ()) -> CompletionRequest:
    return CompletionRequest(chat=True, messages=messages, tools=tools)


def auxiliary_call_of_chat(system: str, *, tools: bool = False, headers: dict[bytes, bytes] | None = None) -> str:
    """Return the mark of a body of chat completions with this system message."""
    messages = [{"role": "system", "content": [{"type": "text", "text": system}]}, TASK]
    body = {"model": "policy", "messages": messages, "stream": True} | ({"tools": [BASH]} if tools else {})
    return marks_of(headers or {}, read_chat(json.dumps(body).encode()).completion).auxiliary_call


def codex_turn(kind: str) -> dict[bytes, bytes]:
    turn = {"session_id": "s1", "thread_id": "s1", "turn_id": "t1", "request_kind": kind}
    return CODEX | {b"x-codex-turn-metadata": json.dumps(turn).encode()}


# ---- Claude Code


def test_each_rule_has_a_mark_by_which_most_calls_are_told_at_once() -> None:
    assert [rule for rule in AUXILIARY_CALL_RULES if not (rule.header or rule.request_kind or rule.system)] == []


def test_a_title_of_claude_code_has_no_tools_and_asks_for_json_with_a_title() -> None:
    assert marks_of(CLAUDE, asked(TASK), answer=frozenset({"title"})) == Marks("title", "title")


def test_other_json_without_tools_is_a_helper_of_claude_code() -> None:
    assert marks_of(CLAUDE, asked(TASK), answer=frozenset({"ok", "reason"})).auxiliary_call == "helper"


def test_the_json_that_a_user_of_claude_code_asks_for_comes_as_a_tool() -> None:
    tools = ({"type": "function", "function": {"name": "StructuredOutput"}},)
    assert marks_of(CLAUDE, asked(TASK, tools=tools)) == Marks()
    assert marks_of(CLAUDE, asked(TASK, tools=tools), answer=frozenset({"title"})) == Marks()


def test_json_without_tools_is_no_auxiliary_call_of_anybody_else() -> None:
    assert marks_of({}, asked(TASK), answer=frozenset({"title"})) == Marks()


def test_claude_code_searches_with_the_servers_tool_alone() -> None:
    assert marks_of(CLAUDE, asked(TASK), ("web_search_20250305",)) == Marks("search", "search")
    assert marks_of(CLAUDE, asked(TASK, tools=(BASH,)), ("web_search_20250305",)) == Marks()
    assert marks_of({}, asked(TASK), ("web_search_20250305",)) == Marks()


def test_claude_code_compacts_with_a_text_at_the_end_of_the_users_last_message() -> None:
    request = asked(TASK, ANSWER, {"role": "user", "content": "Go on." + CLAUDE_COMPACTION}, tools=(BASH,))
    assert marks_of(CLAUDE, request) == Marks("compaction", "compaction")
    reminded = asked(*request.messages, {"role": "system", "content": "<reminder>"}, tools=(BASH,))
    assert marks_of(CLAUDE, reminded).auxiliary_call == "compaction"


def test_a_conversation_about_compaction_is_none() -> None:
    quoted = {"role": "tool", "tool_call_id": "c1", "content": CLAUDE_COMPACTION}
    assert marks_of(CLAUDE, asked(TASK, ANSWER, quoted, tools=(BASH,))) == Marks()
    earlier = {"role": "user", "content": CLAUDE_COMPACTION}
    assert marks_of(CLAUDE, asked(earlier, ANSWER, TASK, tools=(BASH,))) == Marks()
    half = {"role": "user", "content": "Your task is to create a detailed summary of this repository."}
    assert marks_of(CLAUDE, asked(half, tools=(BASH,))) == Marks()


# ---- Codex


def test_codex_says_in_a_header_that_it_compacts() -> None:
    assert marks_of(codex_turn("compaction"), asked(TASK)) == Marks("compaction", "compaction")
    assert marks_of(codex_turn("turn"), asked(TASK, tools=(BASH,))) == Marks()


@pytest.mark.parametrize(
    "header",
    [b"", b"{", b"[1]", b'{"request_kind": 1}', b"\xff", b"[" * 100_000, b'{"request_kind": "\xff"}', b"[" * 9000],
)
def test_a_header_of_codex_that_cannot_be_read_says_nothing(header: bytes) -> None:
    assert marks_of(CODEX | {b"x-codex-turn-metadata": header}, asked(TASK)) == Marks()


# ---- by the system message


@pytest.mark.parametrize(
    ("system", "auxiliary_call"),
    [
        (OPENCODE_TITLE, "title"),
        (OPENCODE_COMPACTION, "compaction"),
        (QWEN_COMPACTION, "compaction"),
        (QWEN_MEMORY, "memory"),
        (QWEN_DREAM, "memory"),
        (AIDER_COMMIT, "commit"),
        (AIDER_SUMMARY, "compaction"),
    ],
)
def test_an_auxiliary_call_is_known_by_how_its_system_message_begins(system: str, auxiliary_call: str) -> None:
    assert auxiliary_call_of_chat(system) == auxiliary_call
    assert auxiliary_call_of_chat(f"You help. {system}") == ""


@pytest.mark.parametrize("system", [OPENCODE_TITLE, OPENCODE_COMPACTION, QWEN_COMPACTION, AIDER_COMMIT, AIDER_SUMMARY])
def test_an_agent_with_tools_and_the_same_words_is_ordinary(system: str) -> None:
    assert auxiliary_call_of_chat(system, tools=True) == ""


def test_the_agents_of_qwen_codes_memory_have_tools() -> None:
    assert auxiliary_call_of_chat(QWEN_MEMORY, tools=True) == "memory"
    assert auxiliary_call_of_chat(QWEN_DREAM, tools=True) == "memory"


def test_a_developers_message_is_a_system_message() -> None:
    assert marks_of(OPENCODE, asked({"role": "developer", "content": OPENCODE_TITLE}, TASK)).auxiliary_call == "title"


def test_ordinary_calls_without_tools_have_no_marks() -> None:
    assert marks_of({}, asked(TASK)) == Marks()
    assert marks_of(CLAUDE, asked(TASK)) == Marks()
    assert marks_of(CODEX, asked({"role": "system", "content": "You are a coding agent."}, TASK)) == Marks()
    assert marks_of({}, asked(ANSWER, {"role": "assistant", "content": None})) == Marks()
    assert marks_of({}, CompletionRequest(chat=False, prompt=AIDER_COMMIT)) == Marks()


def test_every_rule_looks_at_something() -> None:
    for rule in AUXILIARY_CALL_RULES:
        assert rule.system or rule.user or rule.request_kind or rule.only_tool or rule.answer is not None


# ---- sub-agents


def test_a_sub_agent_of_claude_code_has_an_id() -> None:
    headers = CLAUDE | {b"x-claude-code-agent-id": b"a7", b"x-claude-code-parent-agent-id": b"main"}
    assert marks_of(headers, asked(TASK, tools=(BASH,))) == Marks("subagent a7", "")


def test_a_sub_agent_of_codex_has_a_thread_of_its_own() -> None:
    headers = CODEX | {b"thread-id": b"t2", b"x-codex-parent-thread-id": b"s1", b"x-openai-subagent": b"collab_spawn"}
    assert marks_of(headers, asked(TASK, tools=(BASH,))) == Marks("subagent t2", "")


def test_a_sub_agent_of_opencode_has_a_session_with_a_parent() -> None:
    headers = OPENCODE | {b"x-session-id": b"ses_2", b"x-parent-session-id": b"ses_1"}
    assert marks_of(headers, asked(TASK, tools=(BASH,))) == Marks("subagent ses_2", "")


def test_main_agents_have_no_role() -> None:
    for headers in (CLAUDE, CODEX, OPENCODE, {b"thread-id": b"t1"}):
        assert marks_of(headers, asked(TASK, tools=(BASH,))) == Marks()


def test_an_auxiliary_call_of_a_sub_agent_keeps_its_role_which_has_a_limit() -> None:
    headers = CLAUDE | {b"x-claude-code-agent-id": b"a" * 100}
    request = asked({"role": "user", "content": CLAUDE_COMPACTION}, tools=(BASH,))
    assert marks_of(headers, request) == Marks(f"subagent {'a' * 55}", "compaction")
