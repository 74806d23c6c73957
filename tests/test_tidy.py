"""The house rules, as tests: who may import whom, what is declared where, and that the README is true."""

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SERVICES = {
    "bombus_gateway": ROOT / "services/gateway/bombus_gateway",
    "bombus_coordinator": ROOT / "services/coordinator/bombus_coordinator",
    "bombus_trainer": ROOT / "services/trainer/bombus_trainer",
    "bombus_inference": ROOT / "services/inference/bombus_inference",
    "bombus_overwatch": ROOT / "services/overwatch/bombus_overwatch",
}
SHARED = ROOT / "shared/bombus"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PYPROJECT["project"]["optional-dependencies"]
PURE = ("hive/state.py", "hive/collection.py", "hive/events.py", "hive/inbox.py", "hive/records.py")  # no clock, no I/O
PURE_COORDINATOR = ("core.py", "claims.py", "episodes.py", "engines.py", "live.py", "decision.py")


def sources(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("*.py"))
    assert found, f"{folder} has no sources"
    return found


def imports(path: Path) -> set[str]:
    """Top-level names of everything that a module imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / line for line in listed.splitlines()]


@pytest.mark.parametrize("service", SERVICES)
def test_no_service_imports_another(service: str) -> None:
    others = set(SERVICES) - {service}
    for path in sources(SERVICES[service]):
        assert not imports(path) & others, f"{path} imports another service: they meet on the bus"


def test_shared_imports_no_service() -> None:
    for path in sources(SHARED):
        assert not imports(path) & set(SERVICES), path


def test_the_gateway_knows_no_torch_and_the_coordinator_neither() -> None:
    for service in ("bombus_gateway", "bombus_coordinator", "bombus_overwatch"):
        for path in sources(SERVICES[service]):
            assert not imports(path) & {"torch", "transformers", "vllm", "verl"}, path


def test_the_core_and_the_fold_know_no_clock_no_network_and_no_chance() -> None:
    forbidden = {"time", "datetime", "random", "secrets", "uuid", "asyncio", "socket", "os", "logging", "nats"}
    pure = [SHARED / name for name in PURE] + [SERVICES["bombus_coordinator"] / name for name in PURE_COORDINATOR]
    for path in pure:
        assert not imports(path) & forbidden, path


def test_the_client_alone_needs_httpx_msgspec_and_pydantic() -> None:
    names = {re.split(r"[<>=\[; ]", line)[0] for line in PYPROJECT["project"]["dependencies"]}
    assert names == {"httpx", "msgspec", "pydantic"}
    seen = "import sys, bombus; bombus.SwarmClient; bombus.Job; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert not loaded & {"torch", "nats", "fastapi", "transformers", "yaml", "textual", "opentelemetry"}


@pytest.mark.parametrize(
    ("package", "extra"),
    [
        ("nats-py", "bus"),
        ("fastapi", "gateway"),
        ("uvicorn", "gateway"),
        ("torch", "trainer"),
        ("torch", "inference"),
        ("vllm", "vllm"),
        ("verl", "verl"),
        ("opentelemetry-sdk", "telemetry"),
        ("textual", "overwatch"),
    ],
)
def test_each_package_of_the_project_is_declared_in_the_extra_where_it_belongs(package: str, extra: str) -> None:
    assert any(re.match(rf"{package}\b", line) for line in EXTRAS[extra])


def test_msgspec_and_pydantic_are_in_the_base() -> None:
    assert {"msgspec", "pydantic"} <= {re.split(r"[<>=]", line)[0] for line in PYPROJECT["project"]["dependencies"]}


def test_vllm_and_verl_exclude_each_other_and_say_so() -> None:
    for name, lines in EXTRAS.items():
        assert not ("vllm" in str(lines) and "verl" in str(lines)), f"{name} brings both"
    assert "never install both" in (ROOT / "pyproject.toml").read_text()
    assert not any("vllm" in line or "verl" in line for line in EXTRAS["all"] + EXTRAS["dev"])


def test_nothing_unfinished_is_left_in_the_sources() -> None:
    word = re.compile(r"\b(FIXME|TODO|XXX|HACK)\b")
    for path in tracked():
        if path.suffix == ".py" and path != Path(__file__).resolve():
            assert not word.search(path.read_text()), path


def test_nobody_mocks_and_nothing_is_swallowed() -> None:
    for path in tracked():
        if path.suffix != ".py" or path == Path(__file__).resolve():
            continue
        text = path.read_text()
        assert "unittest.mock" not in text, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ExceptHandler) and _is_broad(node):
                line = text.splitlines()[node.lineno - 1]
                assert "#" in line, f"{path}:{node.lineno}: say why everything is caught here"


def _is_broad(handler: ast.ExceptHandler) -> bool:
    """Whether it catches everything and keeps it: one that raises again swallows nothing."""
    if any(isinstance(node, ast.Raise) for node in ast.walk(handler)):
        return False
    kind = handler.type
    return kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException"))


def test_no_machine_or_workplace_is_named() -> None:
    for path in tracked():
        if path.suffix in (".py", ".md", ".toml", ".yaml", ".txt", "") and path.name != "LICENSE":
            text = path.read_text(errors="ignore")
            assert not re.search(r"/work/|/root/|/home/\w", text) or path == Path(__file__).resolve(), path


@pytest.mark.parametrize("rule", [1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 13, 15, 18, 19, 20])
def test_each_rule_of_the_log_that_is_built_is_a_named_test(rule: int) -> None:
    """docs/log.md has the rules. Those that are missing here belong to parts that do not exist yet."""
    named = re.compile(rf"def test_r{rule}_\w+\(")
    assert any(named.search(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py"))


# ---- the README ----


README = (ROOT / "README.md").read_text()


def test_every_path_of_the_readmes_file_map_exists_and_every_package_is_in_it() -> None:
    block = re.search(r"<!-- file map -->\n```\n(.*?)```", README, re.DOTALL)
    assert block, "the README has a file map"
    named = [line.split()[0] for line in block[1].splitlines() if line.strip()]
    for name in named:
        assert (ROOT / name).exists(), f"{name} is in the README and not in the tree"
    for folder in SERVICES.values():
        assert f"{folder.relative_to(ROOT)}/" in named


def test_every_command_of_the_readme_exists() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    commands = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    commands = [command for command in commands if command]
    assert commands
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    from bombus.cli import COMMANDS

    for command in commands:
        words = shlex.split(command)
        if words[0] == "make":
            assert words[1] in targets, command
        elif words[0] == "bombus" or words[0].endswith("/bombus"):
            assert words[1] in COMMANDS, command
        elif words[0].endswith("python"):
            assert (ROOT / words[1]).exists(), command
        else:
            assert words[0] in ("git", "cd", "pip", "curl"), command


def test_the_readmes_program_is_the_one_that_the_tests_run() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert program == (ROOT / "examples/readme.py").read_text()
    assert len([line for line in program.splitlines() if line.strip()]) <= 20


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_has_less_than_sixty_lines(example: Path) -> None:
    assert len(example.read_text().splitlines()) < 60


def test_make_help_lists_every_target() -> None:
    told = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [line.split()[0] for line in told.splitlines()] == phony.split()
    assert all(len(line.split()) > 1 for line in told.splitlines()), "each says what it does"


def test_every_subcommand_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    from bombus.cli import COMMANDS, main

    for name in COMMANDS:
        with pytest.raises(SystemExit) as done:
            main([name, "--help"])
        assert done.value.code == 0
        assert f"bombus {name}" in capsys.readouterr().out


# ---- rooms of the gateway ----


GATEWAY = SERVICES["bombus_gateway"]
DOORS = ("openai", "swarm")


def modules_of(path: Path) -> set[str]:
    """Dotted names of everything that a module imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imports_of_room(room: str, others: tuple[str, ...]) -> list[str]:
    """What the modules of a room of the gateway import from other rooms."""
    prefixes = tuple(f"bombus_gateway.{other}." for other in others)
    return [
        f"{path.name} imports {name}"
        for path in sources(GATEWAY / room)
        for name in modules_of(path)
        if name.startswith(prefixes)
    ]


def test_every_door_of_the_gateway_is_named_here() -> None:
    rooms = {folder.name for folder in GATEWAY.iterdir() if (folder / "__init__.py").exists()}
    assert rooms == {"call", "text", *DOORS}


def test_calls_know_no_door() -> None:
    assert not imports_of_room("call", DOORS)


@pytest.mark.parametrize("door", DOORS)
def test_no_door_of_the_gateway_imports_another(door: str) -> None:
    assert not imports_of_room(door, tuple(other for other in DOORS if other != door))


def test_text_knows_neither_calls_nor_doors() -> None:
    assert not imports_of_room("text", ("call", *DOORS))
