"""The data with which each known harness is pointed at a hive: variables, flags and files.

The settings keep a conversation append-only (no compaction, no automatic memory), and stop the harness from contacting
any host but the hive. Values and files may contain the fields `{base_url}`, `{api_key}`, `{workspace}` and `{home}`,
which is the episode's private home folder.
"""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Any

import msgspec

from bombus.errors import Code, Refused
from bombus.rollout.commands import CommandTemplate, filled
from bombus.rollout.tasks import AgentTask

MODEL_NAME = "policy"  # unknown to every harness: some harnesses send different requests for models that they know
CONTEXT_TOKENS = 100_000_000  # a window that is never full: the hive itself reports prompts that are too long
OUTPUT_TOKENS = 32_000  # the hive applies its own limit
NO_PRESET = "none"
COMMAND_MARKS = ("-", "/", "!")  # a prompt that begins with one of these may be read as an option or a harness command


class ApiDialect(StrEnum):
    """The protocol in which a program calls its model."""

    CHAT = "chat"
    MESSAGES = "messages"
    RESPONSES = "responses"


class HarnessPreset(msgspec.Struct, frozen=True, kw_only=True):
    """The settings for running a harness.

    `subcommand` is the word that runs the harness without a terminal. `flags` are for every run, and `unattended`
    contains further flags for runs without a user who could be asked for permission. `files` maps paths below `{home}`
    to contents. `unset` lists variables of the harness's dialect that are withheld from it. `trims_prompts` says that
    the harness treats a prompt such as `/clear` as a command even after a leading space.
    """

    dialect: ApiDialect
    subcommand: str = ""
    flags: tuple[str, ...] = ()
    unattended: tuple[str, ...] = ()
    variables: Mapping[str, str] = {}
    files: Mapping[str, str] = {}
    unset: tuple[str, ...] = ()
    trims_prompts: bool = False

    def command(self, typed: CommandTemplate) -> CommandTemplate:
        """Return the command that runs an episode: the typed command plus any preset flags that it lacks."""
        program, *rest = typed.words
        before = [rest.pop(0)] if rest and rest[0] == self.subcommand else []
        return CommandTemplate((program, *before, *_lacking(self.flags + self.unattended, rest), *rest), typed.flag)

    def check_prompts(self, tasks: Sequence[AgentTask]) -> None:
        """Raise `Refused` if the harness would treat a task's prompt as one of its own commands."""
        for task in tasks:
            if self.trims_prompts and task.prompt.lstrip().startswith("/"):
                raise Refused(
                    Code.BAD_CONFIG,
                    f"the prompt of task {task.task_id} begins with a slash, so this harness would treat it as a "
                    "command: put a word before the slash",
                )

    def prompt(self, text: str) -> str:
        """Return the prompt, with a leading space if the harness might read it as an option or a command."""
        return f" {text}" if text.startswith(COMMAND_MARKS) else text

    def interactive(self, program: str, rest: Sequence[str]) -> list[str]:
        """Return the words that start the harness in a terminal."""
        return [program, *_lacking(self.flags, rest), *rest]

    def write_files(self, home: Path, values: Mapping[str, str]) -> None:
        """Write the preset's files. JSON and TOML use the same escapes for the values."""
        quoted = {name: _quoted(value) for name, value in values.items()}
        for name, text in self.files.items():
            path = home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(filled(text, quoted), encoding="utf-8", errors="surrogateescape")


def _lacking(flags: tuple[str, ...], typed: Sequence[str]) -> list[str]:
    """Return the flags that are not in `typed`. The word after a flag is its value, unless it is a flag itself."""
    lacking: list[str] = []
    is_typed = False
    for word in flags:
        if word.startswith("-"):
            name = word.partition("=")[0]
            is_typed = any(each.partition("=")[0] == name for each in typed)
        if not is_typed:
            lacking.append(word)
    return lacking


def _quoted(text: str) -> str:
    """Escape text for a quoted string in JSON or TOML. TOML has no surrogate pairs, so emoji stay as they are."""
    return json.dumps(text, ensure_ascii=False)[1:-1].replace("\x7f", "\\u007f")


def _as_json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1)


_LITELLM = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}

_CLAUDE = HarnessPreset(
    dialect=ApiDialect.MESSAGES,
    # All of the harness's tools together would add 60,000 characters to each prompt, and one of them makes its own
    # model calls.
    flags=("--tools=Bash,Edit,Read,Write",),
    unattended=("--dangerously-skip-permissions",),
    variables={
        "ANTHROPIC_MODEL": MODEL_NAME,
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_AUTO_MEMORY": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_DISABLE_TERMINAL_TITLE": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(OUTPUT_TOKENS),
        "CLAUDE_CONFIG_DIR": "{home}/claude",
        "DISABLE_AUTO_COMPACT": "1",
        "DISABLE_PROMPT_CACHING": "1",
        "ENABLE_TOOL_SEARCH": "false",
        "IS_SANDBOX": "1",  # without this, root may not use --dangerously-skip-permissions
    },
    files={
        # Without this file, a session in a terminal begins with the onboarding questions.
        "claude/.claude.json": _as_json(
            {"hasCompletedOnboarding": True, "projects": {"{workspace}": {"hasTrustDialogAccepted": True}}}
        ),
        # By default, an extra model call would judge each tool call.
        "claude/settings.json": _as_json({"permissions": {"defaultMode": "default"}}),
    },
    unset=("ANTHROPIC_API_KEY",),  # a user would be asked about this key, but not about ANTHROPIC_AUTH_TOKEN
)

_CODEX = HarnessPreset(
    dialect=ApiDialect.RESPONSES,
    subcommand="exec",
    unattended=("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
    variables={"CODEX_HOME": "{home}/codex"},
    files={
        "codex/config.toml": f"""\
model = "{MODEL_NAME}"
model_provider = "bombus"
model_context_window = {CONTEXT_TOKENS}
web_search = "disabled"

[model_providers.bombus]
name = "bombus"
base_url = "{{base_url}}"
env_key = "BOMBUS_API_KEY"
wire_api = "responses"

[features]
apps = false
goals = false
multi_agent = false
plugins = false

[analytics]
enabled = false

[projects."{{workspace}}"]
trust_level = "trusted"
""",
    },
)

_OPENCODE = HarnessPreset(
    dialect=ApiDialect.CHAT,
    subcommand="run",
    variables={
        "OPENCODE_CONFIG": "{home}/opencode.json",
        "OPENCODE_DISABLE_AUTOCOMPACT": "1",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "XDG_CACHE_HOME": "{home}/cache",
        "XDG_CONFIG_HOME": "{home}/config",
        "XDG_DATA_HOME": "{home}/data",
        "XDG_STATE_HOME": "{home}/state",
    },
    files={
        "opencode.json": _as_json(
            {
                "model": f"bombus/{MODEL_NAME}",
                "small_model": f"bombus/{MODEL_NAME}",
                "agent": {"title": {"disable": True}},
                "provider": {
                    "bombus": {
                        "npm": "@ai-sdk/openai-compatible",
                        "options": {"baseURL": "{base_url}", "apiKey": "{api_key}"},
                        "models": {MODEL_NAME: {"limit": {"context": CONTEXT_TOKENS, "output": OUTPUT_TOKENS}}},
                    }
                },
            }
        ),
    },
)

_QWEN = HarnessPreset(
    dialect=ApiDialect.CHAT,
    unattended=("--yolo",),
    variables={"HOME": "{home}", "OPENAI_MODEL": MODEL_NAME},
    trims_prompts=True,
    files={
        ".qwen/settings.json": _as_json(
            {
                "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
                "model": {"generationConfig": {"contextWindowSize": CONTEXT_TOKENS}},
                "privacy": {"usageStatisticsEnabled": False},
                "security": {"auth": {"selectedType": "openai"}},
            }
        ),
    },
)

_MINI = HarnessPreset(
    dialect=ApiDialect.CHAT,
    flags=("-m", f"openai/{MODEL_NAME}"),
    unattended=("-y", "--exit-immediately"),
    variables={
        **_LITELLM,
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",  # the model has no known price
        "MSWEA_GLOBAL_CONFIG_DIR": "{home}/mini",
    },
)

_AIDER = HarnessPreset(
    dialect=ApiDialect.CHAT,
    flags=(
        "--model",
        f"openai/{MODEL_NAME}",
        "--no-auto-commits",
        "--no-check-update",
        "--no-show-model-warnings",
    ),
    unattended=("--yes-always",),
    variables=_LITELLM,
)

PRESETS: dict[str, HarnessPreset] = {
    "aider": _AIDER,
    "claude": _CLAUDE,
    "codex": _CODEX,
    "mini": _MINI,
    "opencode": _OPENCODE,
    "qwen": _QWEN,
}


def preset_of(program: str, named: str = "") -> HarnessPreset | None:
    """Return the preset with the name `named` or, if no name is given, the one for `program`. Returns None if there is
    no such preset. Raises `Refused` for an unknown name."""
    if named and named != NO_PRESET and named not in PRESETS:
        raise Refused(Code.BAD_CONFIG, f"there is no preset {named!r}: use one of {', '.join(PRESETS)}, {NO_PRESET}")
    return PRESETS.get(named or PurePath(program).name)
