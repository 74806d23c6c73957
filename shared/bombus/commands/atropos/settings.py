"""`bombus atropos`: prints the environment variables and lines of YAML that point an Atropos project at a hive."""

import argparse
import json

from bombus.config.flags import name_of
from bombus.errors import Code, Refused
from bombus.terminal import say

URL = "http://127.0.0.1:8000"
SERVER_TYPES = ("openai", "vllm", "sglang")
CHECKED_BY_CHAT = ("openai", "sglang")  # clients test these every second with a completion, which would be recorded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=URL, help="the gateway (default: %(default)s, as in `bombus run-api`)")
    parser.add_argument(
        "--engine",
        type=name_of("engine"),
        metavar="NAME",
        help="the engine that takes the groups (default: the gateway's first one)",
    )
    parser.add_argument(
        "--inference-engine",
        type=name_of("engine"),
        metavar="NAME",
        help="the engine whose model environments sample from (default: the gateway's first one)",
    )
    parser.add_argument(
        "--inference-url",
        default="",
        metavar="URL",
        help="another server that environments sample from (default: the gateway)",
    )
    parser.add_argument(
        "--server-type",
        choices=SERVER_TYPES,
        default="vllm",
        help="how environments talk to it: chat completions, or /generate with logprobs (default: %(default)s)",
    )
    parser.add_argument("--model", metavar="NAME", help="the model whose tokenizer environments load")
    parser.add_argument(
        "--with-key",
        action="store_true",
        help="the hive has keys: replace CLIENT_KEY with the client key (in a trainer: the admin key)",
    )


def run(arguments: argparse.Namespace) -> int:
    say(*settings_lines(arguments))
    return 0


def settings_lines(arguments: argparse.Namespace) -> list[str]:
    """Return the lines to print. Raises `Refused(BAD_CONFIG)` for an invalid address."""
    groups = _below(_address("--url", arguments.url), arguments.engine, arguments.with_key)
    if arguments.inference_url:
        sampling = f"{_address('--inference-url', arguments.inference_url).removesuffix('/v1')}/v1"
    else:
        sampling = f"{_below(_address('--url', arguments.url), arguments.inference_engine, with_key=False)}/v1"
    model = json.dumps(arguments.model or "MODEL")  # JSON is valid YAML too
    yaml = [
        "env:",
        f"  rollout_server_url: {json.dumps(groups)}",
        f"  tokenizer_name: {model}",
        "openai:",
        f"  - base_url: {json.dumps(sampling)}",
        '    api_key: "KEY"',
        f"    model_name: {model}",
        f"    server_type: {arguments.server_type}",
        *(["    health_check: false"] if arguments.server_type in CHECKED_BY_CHAT else []),
    ]
    return [
        "# Variables that OpenAI's SDK reads. KEY is the key of an episode, or a client key of the hive for /generate.",
        f"export OPENAI_BASE_URL={sampling}",
        "export OPENAI_API_KEY=KEY",
        "",
        "# Lines of the YAML that `python environment.py serve --config FILE.yaml` takes.",
        *yaml,
        "",
        "# A trainer sends /register, then GET /batch, to this address.",
        f"# {groups}",
    ]


def _address(flag: str, given: str) -> str:
    """Return an address without trailing slashes. Raises `Refused(BAD_CONFIG)`."""
    url = given.rstrip("/")
    scheme, found, rest = url.partition("://")
    if (
        not found
        or scheme not in ("http", "https")
        or not rest
        or any(char in "?#" or not char.isprintable() for char in url)
    ):
        raise Refused(Code.BAD_CONFIG, f"{flag} {given!r} is refused: it must be an address such as {URL}")
    return url


def _below(url: str, engine: str | None, with_key: bool) -> str:
    """Return the address of an engine's routes. Atropos's clients send no headers, so a key is part of the path."""
    key = "/k/CLIENT_KEY" if with_key else ""
    return f"{url}{key}/e/{engine}" if engine else f"{url}{key}"
