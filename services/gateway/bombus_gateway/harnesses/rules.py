"""How auxiliary calls look: those that a harness makes on its own account, with the key of the episode.

Each rule is what one harness was seen to send, in the versions of docs/decisions/0143-auxiliary-calls-and-roles.md. A
rule must not apply to an ordinary call: an agent may have no tools, and the first call of an episode may be a title.
"""

from typing import NamedTuple


class AuxiliaryCallRule(NamedTuple):
    """What an auxiliary call of a harness looks like. It is one when everything that the rule names is present.

    `header` is the name of a header, `request_kind` that of Codex's turn metadata. `system` is how the first system
    message begins, and `user` are sentences of the last user message. `answer` has the names of the fields of the JSON
    that the answer must be, none for any JSON. `only_tool` is how the type of the only tool begins, which the server
    would run.

    Each rule names a header, a kind of request, or how the system message begins, so that most calls are ruled out at
    once.
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


CLAUDE_SESSION = b"x-claude-code-session-id"  # on every call of Claude Code

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

# The first rule that applies decides.
AUXILIARY_CALL_RULES = (
    AuxiliaryCallRule("Claude Code", "title", CLAUDE_SESSION, without_tools=True, answer=frozenset({"title"})),
    # The user's own request for JSON (--json-schema) comes as a tool, even where all other tools are switched off.
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
