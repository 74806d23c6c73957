"""Presets: what each harness is given. The contract with each of them is measured by `make test-harnesses`."""

import json
import tomllib
from pathlib import Path

import pytest

from bombus.errors import Refused
from bombus.rollout.commands import parse_command
from bombus.rollout.environment import ModelAccess, agent_variables, inherited, with_decimal_points, without_proxy
from bombus.rollout.presets import PRESETS, ApiDialect, preset_of
from bombus.rollout.tasks import AgentTask
from bombus.rollout.workspace import EpisodeFolder

ACCESS = ModelAccess(base_url="http://h:1/e/main/v1", api_key="sk-1", model="Qwen/Qwen3")


def command(typed: str, preset: str = "") -> list[str]:
    template = parse_command(typed, "--agent")
    found = preset_of(template.words[0], preset)
    assert found is not None
    return list(found.command(template).words)


@pytest.mark.parametrize(
    ("typed", "runs"),
    [
        ("claude -p {prompt}", "claude --tools=Bash,Edit,Read,Write --dangerously-skip-permissions -p {prompt}"),
        (
            "claude --dangerously-skip-permissions --tools Bash -p x",
            "claude --dangerously-skip-permissions --tools Bash -p x",
        ),
        (
            "/opt/bin/codex exec {prompt}",
            "/opt/bin/codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox {prompt}",
        ),
        ("opencode run {prompt}", "opencode run {prompt}"),
        ("qwen -p {prompt}", "qwen --yolo -p {prompt}"),
        ("mini -t {prompt}", "mini -m openai/policy -y --exit-immediately -t {prompt}"),
        ("mini -t x -m openai/own -y", "mini --exit-immediately -t x -m openai/own -y"),
        (
            "aider --model=openai/own --message x",
            "aider --no-auto-commits --no-check-update --no-show-model-warnings --yes-always "
            "--model=openai/own --message x",
        ),
    ],
)
def test_a_command_gets_the_flags_that_it_lacks(typed: str, runs: str) -> None:
    assert command(typed) == runs.split()


def test_a_preset_is_chosen_by_the_programs_name_or_by_its_own() -> None:
    assert preset_of("/usr/bin/claude") is PRESETS["claude"]
    assert preset_of("./wrapper.sh", "codex") is PRESETS["codex"]
    assert preset_of("./wrapper.sh") is None
    assert preset_of("claude", "none") is None
    with pytest.raises(Refused, match="there is no preset 'cluade': use one of aider, claude"):
        preset_of("x", "cluade")


def test_nobody_is_asked_for_permission_only_where_nobody_is_there() -> None:
    assert PRESETS["claude"].interactive("claude", ["--bare"]) == ["claude", "--tools=Bash,Edit,Read,Write", "--bare"]
    assert PRESETS["mini"].interactive("mini", []) == ["mini", "-m", "openai/policy"]


@pytest.fixture
def folder(tmp_path: Path) -> EpisodeFolder:
    folder = EpisodeFolder(tmp_path / "0", tmp_path / "0" / 'a "repo"')
    folder.home.mkdir(parents=True)
    return folder


def variables_of(name: str, folder: EpisodeFolder) -> dict[str, str]:
    preset = PRESETS[name]
    return agent_variables(ACCESS, preset, (preset.dialect,), folder)


def test_claude_code_gets_the_root_without_v1_and_the_switches_that_keep_its_history(folder: EpisodeFolder) -> None:
    variables = variables_of("claude", folder)
    assert variables["ANTHROPIC_BASE_URL"] == "http://h:1/e/main"
    assert variables["ANTHROPIC_AUTH_TOKEN"] == "sk-1"
    assert "ANTHROPIC_API_KEY" not in variables, "in a terminal it would ask whether to use it"
    assert variables["ENABLE_TOOL_SEARCH"] == "false"
    assert variables["DISABLE_AUTO_COMPACT"] == "1"
    assert variables["CLAUDE_CONFIG_DIR"] == str(folder.home / "claude")
    assert "OPENAI_API_KEY" not in variables
    settings = json.loads((folder.home / "claude" / ".claude.json").read_text())
    assert settings["projects"] == {str(folder.workspace): {"hasTrustDialogAccepted": True}}


def test_codex_is_configured_by_a_file_of_the_episode(folder: EpisodeFolder) -> None:
    variables = variables_of("codex", folder)
    config = tomllib.loads((Path(variables["CODEX_HOME"]) / "config.toml").read_text())
    provider = config["model_providers"][config["model_provider"]]
    assert provider["base_url"] == "http://h:1/e/main/v1"
    assert provider["wire_api"] == "responses"
    assert variables[provider["env_key"]] == "sk-1"
    assert set(config["features"].values()) == {False}
    assert config["projects"] == {str(folder.workspace): {"trust_level": "trusted"}}


@pytest.mark.parametrize("name", ["ünï", "🚀 app", "tab\tx", "del\x7f", "back\\slash"])
def test_files_of_presets_hold_a_workspace_of_any_name(tmp_path: Path, name: str) -> None:
    words = {"base_url": "http://h/v1", "api_key": "k", "home": "h", "workspace": f"/t/{name}"}
    for preset in ("codex", "claude"):
        PRESETS[preset].write_files(tmp_path, words)
    assert list(tomllib.loads((tmp_path / "codex" / "config.toml").read_text())["projects"]) == [f"/t/{name}"]
    assert list(json.loads((tmp_path / "claude" / ".claude.json").read_text())["projects"]) == [f"/t/{name}"]


def test_opencode_is_configured_by_a_file_of_the_episode(folder: EpisodeFolder) -> None:
    variables = variables_of("opencode", folder)
    config = json.loads(Path(variables["OPENCODE_CONFIG"]).read_text())
    provider, _, model = config["model"].partition("/")
    assert config["provider"][provider]["options"] == {"baseURL": "http://h:1/e/main/v1", "apiKey": "sk-1"}
    assert model in config["provider"][provider]["models"]
    assert config["agent"]["title"] == {"disable": True}


def test_qwen_code_has_a_home_of_its_own_and_commits_as_its_user(folder: EpisodeFolder) -> None:
    variables = variables_of("qwen", folder)
    assert variables["HOME"] == str(folder.home)
    assert variables["GIT_CONFIG_GLOBAL"] == str(Path.home() / ".gitconfig")
    assert json.loads((folder.home / ".qwen" / "settings.json").read_text())["memory"] == {
        "enableManagedAutoMemory": False,
        "enableManagedAutoDream": False,
    }


def test_a_dialect_says_whose_variables_are_set(folder: EpisodeFolder) -> None:
    every = agent_variables(ACCESS, None, tuple(ApiDialect), folder)
    assert every["OPENAI_BASE_URL"] == every["OPENAI_API_BASE"] == every["BOMBUS_BASE_URL"] == "http://h:1/e/main/v1"
    assert every["ANTHROPIC_BASE_URL"] == "http://h:1/e/main"
    assert every["BOMBUS_MODEL"] == "Qwen/Qwen3"
    assert every["HOME"] == str(Path.home())
    chat = agent_variables(ACCESS, None, (ApiDialect.CHAT,), folder)
    assert not any(name.startswith("ANTHROPIC_") for name in chat)
    messages = agent_variables(ACCESS, None, (ApiDialect.MESSAGES,), folder)
    assert not any(name.startswith("OPENAI_") and name != "OPENAI_AGENTS_DISABLE_TRACING" for name in messages)


def test_an_agent_inherits_no_key_of_the_hive_or_of_another_model_and_no_repository() -> None:
    outer = {
        "BOMBUS_ADMIN_KEY": "a",
        "BOMBUS_CLIENT_KEY": "b",
        "OPENAI_API_KEY": "c",
        "ANTHROPIC_API_KEY": "d",
        "CLAUDECODE": "1",
        "CODEX_API_KEY": "e",
        "GIT_DIR": "/repo/.git",
        "GIT_WORK_TREE": "/repo",
        "GIT_INDEX_FILE": "/repo/.git/index",
        "GIT_COMMON_DIR": "/repo/.git",
    }
    kept = {"PATH": "/bin", "GIT_CONFIG_GLOBAL": "/g", "GIT_AUTHOR_NAME": "n"}
    assert inherited({**outer, **kept}) == kept


def test_a_prompt_is_taken_for_neither_an_option_nor_a_command_of_the_harness() -> None:
    claude, qwen = PRESETS["claude"], PRESETS["qwen"]
    assert [claude.prompt(text) for text in ("- fix", "/clear", "fix -x")] == [" - fix", " /clear", "fix -x"]
    tasks = [AgentTask(task_id="a", prompt="/clear")]
    claude.check_prompts(tasks)
    with pytest.raises(Refused, match="task a begins with a slash, so this harness would treat it as a command"):
        qwen.check_prompts(tasks)


def test_the_hive_is_called_without_the_proxy_of_the_environment() -> None:
    assert without_proxy("h", {"PATH": "/bin", "NO_PROXY": "a"}) == {}
    direct = without_proxy("h", {"http_proxy": "http://p:1", "NO_PROXY": "a,b", "no_proxy": "b"})
    assert direct == {"NO_PROXY": "a,b,h", "no_proxy": "a,b,h"}


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({"LANG": "de_DE.UTF-8"}, {"LANG": "de_DE.UTF-8", "LC_NUMERIC": "C"}),
        ({"LC_NUMERIC": "de_DE.UTF-8", "LC_CTYPE": "C"}, {"LC_NUMERIC": "C", "LC_CTYPE": "C"}),
        ({"LC_ALL": "de_DE.UTF-8", "LC_CTYPE": "C"}, {"LANG": "de_DE.UTF-8", "LC_NUMERIC": "C"}),
        ({"LC_ALL": ""}, {"LC_ALL": "", "LC_NUMERIC": "C"}),
    ],
)
def test_judges_write_numbers_with_a_point_in_every_language(given: dict[str, str], seen: dict[str, str]) -> None:
    assert with_decimal_points(given) == seen
