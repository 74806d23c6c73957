"""The environment variables of an agent: how it reaches its model, and what its task is."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from bombus.rollout.commands import filled
from bombus.rollout.presets import MODEL_NAME, ApiDialect, HarnessPreset
from bombus.rollout.tasks import AgentTask
from bombus.rollout.workspace import GIT_ELSEWHERE, EpisodeFolder
from bombus.sdk.types import Credentials

# Prefixes of variables that no agent inherits: the user's and the hive's keys, and variables that harnesses set for
# their own child processes.
WITHHELD = ("ANTHROPIC_", "BOMBUS_", "CLAUDE", "CODEX_", "MSWEA_", "OPENAI_", "OPENCODE", "QWEN_")
# The agent and the tests of a task folder are third-party code, and inherit only these variables, none of which is a
# key.
SHARED = frozenset(
    [
        "CURL_CA_BUNDLE",
        "LANG",
        "LANGUAGE",
        "LD_LIBRARY_PATH",
        "LOGNAME",
        "NODE_EXTRA_CA_CERTS",
        "NODE_PATH",
        "NO_PROXY",
        "PATH",
        "PYTHONPATH",
        "REQUESTS_CA_BUNDLE",
        "SHELL",
        "SSL_CERT_DIR",
        "SSL_CERT_FILE",
        "TERM",
        "TZ",
        "USER",
        "VIRTUAL_ENV",
        "no_proxy",
    ]
)
PROXIES = ("all_proxy", "http_proxy", "https_proxy")
# Set for every agent, because the agent's libraries might contact their vendors.
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}


class ModelAccess(msgspec.Struct, frozen=True, kw_only=True):
    """How an agent reaches its model."""

    base_url: str
    api_key: str
    model: str

    @classmethod
    def of(cls, credentials: Credentials) -> "ModelAccess":
        return cls(base_url=credentials.base_url, api_key=credentials.api_key, model=credentials.model or MODEL_NAME)

    @property
    def root(self) -> str:
        """Return the base URL as Anthropic's clients expect it, without `/v1`."""
        return self.base_url.removesuffix("/v1")

    def variables(self, dialects: Collection[ApiDialect]) -> dict[str, str]:
        """Return the variables that clients of these dialects read, and our own BOMBUS_ variables."""
        found = {"BOMBUS_BASE_URL": self.base_url, "BOMBUS_API_KEY": self.api_key, "BOMBUS_MODEL": self.model, **QUIET}
        if {ApiDialect.CHAT, ApiDialect.RESPONSES} & set(dialects):
            found |= {
                "OPENAI_BASE_URL": self.base_url,
                "OPENAI_API_BASE": self.base_url,
                "OPENAI_API_KEY": self.api_key,
            }
        if ApiDialect.MESSAGES in dialects:
            found |= {
                "ANTHROPIC_BASE_URL": self.root,
                "ANTHROPIC_API_BASE": self.root,
                "ANTHROPIC_API_KEY": self.api_key,
                "ANTHROPIC_AUTH_TOKEN": self.api_key,
            }
        return found

    @property
    def host(self) -> str:
        return urlsplit(self.base_url).hostname or ""

    def words(self) -> dict[str, str]:
        """Return the values of the fields that a preset may use."""
        return {"base_url": self.base_url, "api_key": self.api_key}


def inherited(environment: Mapping[str, str], task: AgentTask | None = None) -> dict[str, str]:
    """Return the part of our own environment that an agent may see, without keys and git's repository variables.

    The agent of a `task` with a package gets only the variables in `SHARED`, the locale and the proxies.
    """
    if task is not None and task.package is not None:
        return {
            name: value
            for name, value in environment.items()
            if name in SHARED or name.startswith("LC_") or name.lower() in PROXIES
        }
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(WITHHELD) and name not in GIT_ELSEWHERE
    }


def with_decimal_points(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which programs write 0.5 instead of 0,5, but otherwise keep their language settings."""
    language = environment.get("LC_ALL")
    if not language:
        return {**environment, "LC_NUMERIC": "C"}
    others = {name: value for name, value in environment.items() if not name.startswith("LC_")}
    return {**others, "LANG": language, "LC_NUMERIC": "C"}


def without_proxy(host: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that keep calls to `host` off the proxy, or none if the environment has no proxy."""
    if not any(name.lower() in PROXIES for name in environment):
        return {}
    direct = [environment.get(name, "") for name in ("NO_PROXY", "no_proxy")]
    hosts = ",".join(dict.fromkeys(each for each in [*",".join(direct).split(","), host] if each))
    return {"NO_PROXY": hosts, "no_proxy": hosts}


def task_variables(task: AgentTask, workspace: Path) -> dict[str, str]:
    return {"BOMBUS_PROMPT": task.prompt, "BOMBUS_TASK": task.as_json(), "BOMBUS_WORKSPACE": str(workspace)}


def agent_variables(
    access: ModelAccess,
    preset: HarnessPreset | None,
    dialects: Collection[ApiDialect],
    folder: EpisodeFolder,
    task: AgentTask | None = None,
) -> dict[str, str]:
    """Return an agent's environment without `task_variables`, and write the files of its preset."""
    outer = inherited(os.environ, task)
    variables = {
        **outer,
        **without_proxy(access.host, outer),
        "TMPDIR": str(folder.temporary),
        **access.variables(dialects),
    }
    if preset is None:
        return variables
    words = {**access.words(), "home": str(folder.home), "workspace": str(folder.workspace)}
    preset.write_files(folder.home, words)
    variables |= {name: filled(value, words) for name, value in preset.variables.items()}
    variables = {name: value for name, value in variables.items() if name not in preset.unset}
    if variables.get("HOME") != outer.get("HOME"):
        variables.setdefault("GIT_CONFIG_GLOBAL", str(Path.home() / ".gitconfig"))  # commits need an author
    return variables
