"""Rules that recognize auxiliary calls, which a harness makes for its own purposes with the episode's key.

Each rule describes calls observed from one harness, in the versions listed in
docs/decisions/0143-auxiliary-calls-and-roles.md. A rule must not match an ordinary call: an agent may have no tools,
and the first call of an episode may be for a title.
"""

from typing import NamedTuple


class AuxiliaryCallRule(NamedTuple):
    """The conditions for one kind of auxiliary call that a harness makes. A call is of this kind if it meets all
    conditions.

    `header` is the name of a header, and `request_kind` is the kind in Codex's turn metadata. `system` is the start of
    the first system message, and `user` contains sentences in the last user message. If the answer must be JSON,
    `answer` contains the names of its fields; it is empty if any JSON is accepted. `only_tool` is the start of the type
    of the only tool, which the server would run.

    Each rule has a `header`, `request_kind` or `system`, so that most calls are ruled out quickly.
    """

    harness: str
    auxiliary_call: str
    header: bytes = b""
    request_kind: str = ""
    without_tools: bool = False
    only_tool: str = ""
    answer: frozenset[str] | None = None
    system: str = ""
    user: tuple[str, ...] = ()


CLAUDE_SESSION = b"x-claude-code-session-id"  # sent with every call by Claude Code

_CLAUDE_COMPACTION = (
    "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.",
    "Your task is to create a detailed summary of ",
)
_OPENCODE_TITLE = "You are a title generator. You output ONLY a thread title."
_OPENCODE_COMPACTION = "You are a context summarization agent."
_QWEN_COMPACTION = "You are the component that summarizes a conversation when its context window is about to overflow."
_QWEN_MEMORY = "You are now acting as the managed memory extraction subagent"
_QWEN_DREAM = "You are performing a managed memory dream"
_AIDER_COMMIT = "You are an expert software engineer that generates concise, one-line Git commit messages"
_AIDER_SUMMARY = "*Briefly* summarize this partial conversation about programming."

# The first rule that applies is used.
AUXILIARY_CALL_RULES = (
    AuxiliaryCallRule("Claude Code", "title", CLAUDE_SESSION, without_tools=True, answer=frozenset({"title"})),
    # With --json-schema, the JSON that the user requests is sent as a tool even if all other tools are switched off.
    AuxiliaryCallRule("Claude Code", "helper", CLAUDE_SESSION, without_tools=True, answer=frozenset()),
    AuxiliaryCallRule("Claude Code", "search", CLAUDE_SESSION, only_tool="web_search_"),
    AuxiliaryCallRule("Claude Code", "compaction", CLAUDE_SESSION, user=_CLAUDE_COMPACTION),
    AuxiliaryCallRule("Codex", "compaction", request_kind="compaction"),
    AuxiliaryCallRule("opencode", "title", without_tools=True, system=_OPENCODE_TITLE),
    AuxiliaryCallRule("opencode", "compaction", without_tools=True, system=_OPENCODE_COMPACTION),
    AuxiliaryCallRule("Qwen Code", "compaction", without_tools=True, system=_QWEN_COMPACTION),
    AuxiliaryCallRule("Qwen Code", "memory", system=_QWEN_MEMORY),
    AuxiliaryCallRule("Qwen Code", "memory", system=_QWEN_DREAM),
    AuxiliaryCallRule("aider", "commit", without_tools=True, system=_AIDER_COMMIT),
    AuxiliaryCallRule("aider", "compaction", without_tools=True, system=_AIDER_SUMMARY),
)
