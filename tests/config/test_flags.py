"""Command lines that are refused: a whole sentence with the flag as it is typed, on stderr only, and exit code 2."""

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, model_validator

from bombus.cli import COMMANDS, ENV, REPLAY, main
from bombus.config.flags import Flag, NoFlag, Parser, add_settings_arguments, name_of, settings_from, typed_flags
from bombus.errors import Refused
from bombus_trainer import launcher, ray_ranks, worker
from bombus_trainer.options import add_options, options_of

NAME = "is not a valid name: use 1 to 32 lower-case letters, digits and dashes, starting with a letter or digit"
THREADS = "--threads -1 is refused: it must be a whole number, at least 0, at most 1024"
DEVICE = "--device gpu is refused: it must be cpu, cuda or cuda:N"
PORT = "is refused: it must be a whole number, at least 0, at most 65535"
DOOR = "is refused: it must be a whole number, at least 0, at most 65535"


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BOMBUS_ENVIRONMENTS", str(tmp_path))


def refusal(capsys: pytest.CaptureFixture[str], main: Callable[[Sequence[str]], int], words: str) -> str:
    """Return the only line that is printed."""
    try:
        code = main(words.split())
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else -1
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err[:-1]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("trainer --device gpu", DEVICE),
        ("trainer --bin-tokens 3", "--bin-tokens 3 is refused: 3 is neither 0 nor at least 16"),
        ("trainer --threads -1", THREADS),
        ("trainer --device gpu --threads -1", f"{THREADS}; {DEVICE}"),
        (
            "trainer --operation-timeout 0",
            "--operation-timeout 0.0 is refused: it must be a number, more than 0.0, at most 86400.0",
        ),
        ("inference --device gpu", DEVICE),
        ("inference --threads -1", THREADS),
        (
            "inference --tensor-parallel 0",
            "--tensor-parallel 0 is refused: it must be a whole number, at least 1, at most 1024",
        ),
        ("inference --port 99999", f"--port 99999 {PORT}"),
        ("inference --kv-cache-mb -1", "--kv-cache-mb -1 is refused: it must be from 0 to 4194304"),
        ("inference --url nope", "--url nope is refused: it must be http://HOST:PORT of a running server"),
        (
            "inference --api-key-env $KEY",
            "--api-key-env '$KEY' is refused: it must be the name of an environment variable with its key",
        ),
        (
            "inference --backend openai",
            "--url: backend openai needs the url of a server, such as http://127.0.0.1:8000",
        ),
        ("gateway --port 99999", f"--port 99999 {PORT}"),
        ("gateway --engine a --engine a", "--engine a a is refused: name at least one engine, and each once"),
        ("coordinator --watch-disk nowhere", "--watch-disk nowhere: there is no such folder"),
        ("up --dry-run --port 99999", f"--port 99999 {DOOR}"),
        ("up --dry-run --device gpu", DEVICE),
        ("up --dry-run --threads -1", THREADS),
        ("up --dry-run --nats-port 99999", "--nats-port 99999 is refused: it must be from 0 to 65535"),
        ("up --dry-run --replicas 65", "--replicas 65 is refused: it must be from 1 to 64"),
        ("doctor --port 99999", f"--port 99999 {DOOR}"),
        ("doctor --trainer-processes 0", "--trainer-processes 0 is refused: it must be from 1 to 64"),
        ("demo --minutes -1", "--minutes -1.0 is refused: it must be from 0.01 to 1440"),
        ("demo --seed -1", "--seed -1 is refused: it must be from 0 to 9223372036854775807"),
        ("replay train --step 1 --device gpu", DEVICE),
    ],
)
def test_a_value_that_a_command_does_not_take_is_named_with_its_flag_and_range(
    words: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prog = " ".join(words.split()[: 2 if words.startswith("replay") else 1])
    assert refusal(capsys, main, words) == f"bombus {prog}: {why}"


@pytest.mark.parametrize(
    "command", ["up", "doctor", "status", "overwatch", "coordinator", "gateway", "trainer", "inference"]
)
def test_an_invalid_hive_name_is_refused_by_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, main, f"{command} --hive Lab")
    assert line == f"bombus {command}: --hive: hive 'Lab' {NAME}; see `bombus {command} --help`"


@pytest.mark.parametrize("command", ["up", "gateway", "trainer", "inference"])
def test_an_invalid_engine_name_is_refused_by_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, main, f"{command} --engine Big")
    assert line == f"bombus {command}: --engine: engine 'Big' {NAME}; see `bombus {command} --help`"


def test_a_refusal_of_argparse_is_one_sentence_too(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, main, "trainer --bin-tokens many")
    assert line == "bombus trainer: --bin-tokens: invalid int value: 'many'; see `bombus trainer --help`"
    line = refusal(capsys, main, "log")
    assert line == "bombus log: the following arguments are required: subcommand; see `bombus log --help`"


def test_a_value_of_a_file_is_named_by_its_place_and_a_value_of_a_flag_by_the_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for port, flag, why in (
        ("99999", "", f"gateway.port = 99999 {DOOR}"),
        ("8000", " --port -1", f"--port -1 {DOOR}"),
        ("8000", " --threads -1", THREADS),
    ):
        (tmp_path / "cluster.yaml").write_text(f"gateway: {{port: {port}}}\nengines: {{main: {{inference: [{{}}]}}}}\n")
        assert refusal(capsys, main, f"up --dry-run --config cluster.yaml{flag}") == f"bombus up: {why}"


@pytest.mark.parametrize("command", ["up --dry-run", "doctor"])
def test_a_file_that_cannot_be_read_is_named(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.yaml").write_text("engines: {main: {}\n  ]\n")
    prog = f"bombus {command.split()[0]}"
    line = refusal(capsys, main, f"{command} --config broken.yaml")
    assert line == f"{prog}: broken.yaml, line 2, column 3: expected ',' or '}}', but got ']'"
    line = refusal(capsys, main, f"{command} --config nowhere.yaml")
    assert line == f"{prog}: nowhere.yaml: there is no such file"


# ---- the commands of Python ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--api-port 99999", f"--api-port 99999 {DOOR}"),
        ("--threads -1", THREADS),
        ("--operation-timeout 0", "--operation-timeout 0.0 is refused: it must be from 1 to 86400"),
        ("--config nowhere.yaml", "nowhere.yaml: there is no such file"),
        ("--hive Lab", f"--hive: hive 'Lab' {NAME}; see `bombus_trainer.launcher --help`"),
    ],
)
def test_the_launcher_names_its_flags(words: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, launcher.main, words) == f"bombus_trainer.launcher: {why}"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            "zz",
            "--options: this is not JSON: Expecting value: line 1 column 1 (char 0)",
        ),
        ("[]", "--options: this is not a JSON object: []"),
        (
            '{"engine.x":1,"zz":2}',
            "--options has unknown fields, engine.x, zz: start the trainer with the bombus that wrote them",
        ),
        ('{"folder":5}', "--folder 5 is refused: it must be a path"),
        ('{"threads":-1}', THREADS),
    ],
)
def test_options_as_json_are_checked_like_flags(
    options: str, why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    line = refusal(capsys, worker.main, f"--options {options}")
    assert line.removesuffix("; see `bombus_trainer.worker --help`") == f"bombus_trainer.worker: {why}"


def test_options_as_json_win_over_flags() -> None:
    parser = Parser()
    add_options(parser)
    words = ["--folder", "/typed", "--threads", "4", "--options", '{"folder": "/given"}']
    options = options_of(parser.parse_args(words))
    assert (str(options.folder), options.threads) == ("/given", 4)


def test_ranks_refuse_what_a_trainer_refuses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert refusal(capsys, worker.main, "--device gpu") == f"bombus_trainer.worker: {DEVICE}"
    assert refusal(capsys, ray_ranks.main, "--device gpu") == f"bombus_trainer.ray_ranks: {DEVICE}"
    line = refusal(capsys, ray_ranks.main, "--ranks 0")
    assert line == "bombus_trainer.ray_ranks: --ranks 0 is refused: it must be from 1 to 4096"


def test_ranks_on_ray_say_how_to_get_ray(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, ray_ranks.main, "") == (
        "bombus_trainer.ray_ranks: Ray is not installed here: run `bombus install verl`, "
        "and start this with the Python of that environment"
    )
    command = [sys.executable, "-m", "bombus_trainer.ray_ranks", "--help"]
    helped = subprocess.run(command, capture_output=True, text=True, timeout=60, env=dict(os.environ))
    assert helped.returncode == 0
    assert "--ray-address" in helped.stdout


# ---- help ---------------------------------------------------------------------------------------------------------


def parsers() -> Iterator[argparse.ArgumentParser]:
    for name, command in {**COMMANDS, **ENV, **REPLAY}.items():
        if command.subcommands:
            continue
        parser = argparse.ArgumentParser(prog=name)
        importlib.import_module(command.module).add_arguments(parser)
        yield parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from action.choices.values()
    parser = argparse.ArgumentParser(prog="launcher")
    launcher.add_arguments(parser)
    yield parser


def test_help_describes_every_argument_and_names_its_default() -> None:
    seen = 0
    for parser in parsers():
        for action in parser._actions:
            where = f"{parser.prog} {'/'.join(action.option_strings) or action.dest}"
            given = action.option_strings and action.default not in (None, False, "", [], argparse.SUPPRESS)
            assert action.help or isinstance(action, argparse._SubParsersAction) or action.dest == "subcommand", where
            assert not given or "default" in str(action.help), where
            seen += 1
    assert seen > 150


# ---- arguments from a settings model ------------------------------------------------------------------------------


class Cache(BaseModel):
    folder: Path | None = Field(default=None, description="where it lies")
    size_mb: Annotated[int, Flag(name="--cache-mb", metavar="MB")] = Field(
        default=64, ge=1, le=4096, description="memory; 50% of it for keys"
    )


class Limits(BaseModel):
    calls: int = Field(default=8, ge=1, description="open at once")
    rate: float | None = Field(default=None, gt=0, description="a second; none: any")


class Example(BaseModel):
    hive: Annotated[str, Flag(declared_elsewhere=True)] = "main"
    bus_url: Annotated[str, Flag(name="--nats", declared_elsewhere=True)] = "nats://nowhere"
    mode: Literal["fast", "slow"] = Field(default="slow", description="how it goes")
    quiet: bool = Field(default=False, description="say nothing")
    checked: bool = Field(default=True, description="check everything")
    replica: Annotated[str, Flag(default="a new name")] = Field(default="", description="what it is called")
    engines: Annotated[tuple[str, ...], Flag(name="--engine", read=name_of("engine"), default="main")] = Field(
        default=("main",), description="may be given several times"
    )
    secret: Annotated[bytes, NoFlag()] = b""
    cache: Cache = Field(default=Cache(), title="the cache", description="of weights")
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _fast_is_quiet(self) -> "Example":
        if self.mode == "fast" and not self.quiet:
            raise ValueError("mode fast is quiet")
        return self


def example_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="example")
    parser.add_argument("--nats", default="nats://here")
    parser.add_argument("--hive", default="lab")
    add_settings_arguments(parser, Example)
    return parser


def example(words: str, **given: object) -> Example:
    return settings_from(Example, example_parser().parse_args(words.split()), given)


def test_without_words_settings_have_their_defaults_and_those_of_arguments_declared_elsewhere() -> None:
    assert example("") == Example(hive="lab", bus_url="nats://here")


def test_each_field_is_set_by_its_flag() -> None:
    words = "--nats n --hive h --mode fast --quiet --no-checked --replica r --engine a --engine b"
    words += " --folder /tmp --cache-mb 5 --calls 3 --rate 0.5"
    assert example(words, secret=b"s") == Example(
        hive="h",
        bus_url="n",
        mode="fast",
        quiet=True,
        checked=False,
        replica="r",
        engines=("a", "b"),
        secret=b"s",
        cache=Cache(folder=Path("/tmp"), size_mb=5),
        limits=Limits(calls=3, rate=0.5),
    )


def test_a_value_given_by_path_counts_and_not_the_typed_one() -> None:
    assert settings_from(Example, example_parser().parse_args([]), {"cache.size_mb": 7}).cache.size_mb == 7


def test_help_comes_from_the_description_and_shows_the_default() -> None:
    text = " ".join(example_parser().format_help().split())
    for line in (
        "--mode {fast,slow} how it goes (default: slow)",
        "--quiet say nothing ",
        "--checked, --no-checked check everything (default: True)",
        "--replica REPLICA what it is called (default: a new name)",
        "--engine ENGINE may be given several times (default: main)",
        "--calls N open at once (default: 8)",
        "the cache: of weights --folder FOLDER where it lies --cache-mb MB memory; 50% of it for keys (default: 64)",
    ):
        assert line in text
    assert "--secret" not in text


def test_the_words_for_settings_are_those_that_are_not_the_defaults() -> None:
    class Some(BaseModel):
        quiet: bool = Field(default=False, description="say nothing")
        checked: bool = Field(default=True, description="check everything")
        calls: int = Field(default=8, description="open at once")
        hosts: tuple[str, ...] = Field(default=(), description="names")

    assert typed_flags(Some()) == []
    some = Some(quiet=True, checked=False, calls=1, hosts=("a", "b"))
    assert typed_flags(some) == ["--quiet", "--no-checked", "--calls", "1", "--hosts", "a", "--hosts", "b"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--cache-mb 0", "--cache-mb 0 is refused: it must be a whole number, at least 1, at most 4096"),
        ("--rate 0", "--rate 0.0 is refused: it must be a number, more than 0"),
        ("--mode fast", "mode fast is quiet"),
    ],
)
def test_settings_that_are_refused_name_the_flag_of_their_field(words: str, why: str) -> None:
    with pytest.raises(Refused) as refused:
        example(words)
    assert refused.value.why == why
    with pytest.raises(Refused, match=r"--quiet: mode fast"):
        settings_from(Example, example_parser().parse_args(["--mode", "fast"]), flags={"": "--quiet"})
