"""`bombus status`: prints what a hive is doing, as text or JSON, from its log, its environment servers, and how full
its streams are."""

import argparse
import asyncio
import time

import msgspec

from bombus.bus import Bus, StreamState
from bombus.bus.follow import fold
from bombus.bus.streams import stream_text
from bombus.cli import add_hive_arguments, hint_at_bus
from bombus.environments.serving.announcing import ShownServer, shown_servers
from bombus.errors import BombusError, BusUnavailable
from bombus.hive.inbox import Done, decode_answer
from bombus.hive.state import EngineState, Hive, Phase
from bombus.hive.status.data import status_dict
from bombus.hive.status.text import render_status
from bombus.terminal import complain, say, say_json

ASK_S = 2.0  # time that a trainer has to report its current activity


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_hive_arguments(parser)
    parser.add_argument("--engine", default="", metavar="NAME", help="only this engine (default: all)")
    parser.add_argument("--json", action="store_true", help="print it as JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    try:
        hive, streams, doing, environments = asyncio.run(_look(arguments.nats, arguments.hive))
    except (BombusError, ValueError, TimeoutError) as error:
        why = error or "the log could not be read in time"
        complain(f"bombus status: {why}", *hint_at_bus(arguments))
        return 1
    now_ns = time.time_ns()  # the newest event of an idle hive may be old
    if arguments.json:
        shown = {"doing": doing, "environments": msgspec.to_builtins(environments)}
        say_json({**status_dict(hive, now_ns), "streams": msgspec.to_builtins(streams), **shown})
    else:
        say(*render_status(hive, arguments.engine, now_ns).splitlines())
        chosen = {name: what for name, what in doing.items() if arguments.engine in ("", name)}
        if chosen:
            say("", "at work:", *(f"  {name:<6} {what}" for name, what in chosen.items()))
        if environments:
            say("", "environments:", *(f"  {server.text()}" for server in environments))
        if not arguments.engine:
            say("", "streams:", *(f"  {name:<6} {stream_text(state)}" for name, state in streams.items()))
    return 0


async def _look(url: str, name: str) -> tuple[Hive, dict[str, StreamState], dict[str, str], list[ShownServer]]:
    async with await Bus.connect(url, name, name="status", patient=False) as bus:
        hive = await fold(bus)
        return hive, await bus.limited_states(), await _doing(bus, hive), await shown_servers(bus)


async def _doing(bus: Bus, hive: Hive) -> dict[str, str]:
    """Ask the trainers what they are doing, which is not on the log. Trainers that are idle are left out."""
    engines = [engine for engine in hive.engines.values() if engine.phase != Phase.OFFLINE and engine.trainer]
    answers = await asyncio.gather(*(_ask(bus, engine) for engine in engines))
    return {engine.name: answer for engine, answer in zip(engines, answers, strict=True) if answer}


async def _ask(bus: Bus, engine: EngineState) -> str:
    try:
        subject = bus.subjects.trainer(engine.name, engine.trainer_epoch)
        answer = decode_answer((await bus.requests.request(subject, timeout_s=ASK_S)).data)
    except BusUnavailable:
        return f"trainer {engine.trainer} does not answer"
    return answer.doing if isinstance(answer, Done) else ""
