"""Agents that are commands: Claude Code, Codex, opencode, Qwen Code, mini-swe-agent, aider."""

import json

from tests.harnesses.catalogue.harness import Dialect, Harness

CODEX_CONFIG = """\
model = "policy"
model_provider = "bombus"
web_search = "disabled"

[model_providers.bombus]
name = "bombus"
base_url = "$url/v1"
env_key = "BOMBUS_API_KEY"
wire_api = "responses"

[analytics]
enabled = false
"""


def opencode_config(provider: str, base_url: str, package: str = "") -> str:
    """Return an opencode.json whose model is behind one provider."""
    entry = {
        "options": {"baseURL": base_url, "apiKey": "$key"},
        "models": {"policy": {"limit": {"context": 200_000, "output": 4096}}},
    }
    if package:
        entry["npm"] = package
    settings = {
        "provider": {provider: entry},
        "model": f"{provider}/policy",
        "small_model": f"{provider}/policy",
        "agent": {"title": {"disable": True}},
        "share": "disabled",
    }
    return json.dumps(settings).replace('"$schema"', '"$$schema"')


OPENCODE_VARIABLES = {
    "OPENCODE_CONFIG": "$home/opencode.json",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
}
QWEN_SETTINGS = {
    "privacy": {"usageStatisticsEnabled": False},
    "general": {"enableAutoUpdate": False},
    "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
    "security": {"auth": {"selectedType": "openai"}},
}
LITELLM_VARIABLES = {
    "OPENAI_API_BASE": "$url/v1",
    "OPENAI_API_KEY": "$key",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
MINI_VARIABLES = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_GLOBAL_CONFIG_DIR": "$home/mini",
    "MSWEA_SILENT_STARTUP": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


def opencode(dialect: Dialect, provider: str, package: str = "") -> Harness:
    return Harness(
        name="opencode",
        package="opencode-ai",
        environment="node",
        dialect=dialect,
        command=("$bin/opencode", "run", "$task"),
        variables=OPENCODE_VARIABLES,
        files={"opencode.json": opencode_config(provider, "$url/v1", package)},
        asks=("registry.npmjs.org:443",),
        caveats="it asks its package registry for a plugin, and works without it",
        pointed=f"`opencode.json`: `provider.{provider}.options.baseURL` ending in `/v1`",
    )


def mini(dialect: Dialect, model: str, **variables: str) -> Harness:
    return Harness(
        name="mini-swe-agent",
        package="mini-swe-agent",
        environment="mini",
        dialect=dialect,
        command=("$bin/mini", "-t", "$task", "-y", "--exit-immediately", "-m", model, "-o", "$home/trajectory.json"),
        variables={**MINI_VARIABLES, **variables},
        ways=("whole",),
        pointed=", ".join(f"`{name}`" for name in variables if name.endswith("BASE")) + f", `-m {model}`",
        marks_retries=dialect == Dialect.CHAT,  # those of OpenAI's client in litellm
    )


COMMAND_LINES = (
    Harness(
        name="Claude Code",
        package="@anthropic-ai/claude-code",
        environment="node",
        dialect=Dialect.MESSAGES,
        command=(
            "$bin/claude",
            "-p",
            "$task",
            "--model",
            "policy",
            "--dangerously-skip-permissions",
            "--tools",
            "Bash,Read,Edit,Write",
        ),
        variables={
            "ANTHROPIC_BASE_URL": "$url",
            "ANTHROPIC_API_KEY": "$key",
            "IS_SANDBOX": "1",
            "ENABLE_TOOL_SEARCH": "false",
            "DISABLE_PROMPT_CACHING": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_AUTO_MEMORY": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4096",
        },
        pointed="`ANTHROPIC_BASE_URL`, without `/v1`",
    ),
    Harness(
        name="Codex",
        package="@openai/codex",
        environment="node",
        dialect=Dialect.RESPONSES,
        command=(
            "$bin/codex",
            "exec",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            *(word for name in ("multi_agent", "goals", "plugins", "apps") for word in ("--disable", name)),
            "$task",
        ),
        variables={"CODEX_HOME": "$home/.codex", "BOMBUS_API_KEY": "$key"},
        files={".codex/config.toml": CODEX_CONFIG},
        pointed='`config.toml`: a provider with `base_url` ending in `/v1` and `wire_api = "responses"`',
    ),
    opencode(Dialect.CHAT, "bombus", "@ai-sdk/openai-compatible"),
    opencode(Dialect.MESSAGES, "anthropic"),
    opencode(Dialect.RESPONSES, "openai"),
    Harness(
        name="Qwen Code",
        package="@qwen-code/qwen-code",
        environment="node",
        dialect=Dialect.CHAT,
        command=("$bin/qwen", "--yolo", "-p", "$task"),
        variables={"OPENAI_BASE_URL": "$url/v1", "OPENAI_API_KEY": "$key", "OPENAI_MODEL": "policy"},
        files={".qwen/settings.json": json.dumps(QWEN_SETTINGS)},
        pointed="`OPENAI_BASE_URL`, `OPENAI_MODEL`",
        marks_retries=True,
    ),
    mini(Dialect.CHAT, "openai/policy", OPENAI_API_BASE="$url/v1", OPENAI_API_KEY="$key"),
    mini(Dialect.MESSAGES, "anthropic/policy", ANTHROPIC_API_BASE="$url", ANTHROPIC_API_KEY="$key"),
    Harness(
        name="aider",
        package="aider-chat",
        environment="aider",
        dialect=Dialect.CHAT,
        command=(
            "$bin/aider",
            "--yes-always",
            "--no-git",
            "--no-check-update",
            "--analytics-disable",
            "--no-show-model-warnings",
            "--model",
            "openai/policy",
            "--auto-test",
            "--test-cmd",
            "python3 squares.py > squares.txt && test $$(wc -l < squares.txt) = 5",
            "--message",
            "$task",
            "squares.py",
        ),
        variables=LITELLM_VARIABLES,
        files={".aider/caches/model_prices_and_context_window.json": '{"none": {}}'},  # else it fetches them
        calls=4,
        sequences=4,
        because="each request moves the file listing and the reminder of the format behind the turns before it",
        pointed="`OPENAI_API_BASE`, `--model openai/policy`",
        marks_retries=True,
    ),
)
