"""`bombus resume`: lets a suspended run try again, once its operator has removed what it failed for."""

import argparse
import uuid

from bombus.bus import Bus
from bombus.commands import control
from bombus.hive import inbox
from bombus.hive.state import EngineState, Phase
from bombus.hive.status import one_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    control.add_arguments(parser, "resume")


def run(arguments: argparse.Namespace) -> int:
    return control.run("resume", arguments, _resume)


async def _resume(bus: Bus, engine: EngineState) -> str:
    if engine.phase != Phase.OFFLINE and not engine.suspended:
        return f"run {engine.run} of engine {engine.name} is not suspended: it is {engine.phase}"
    await bus.inbox.request(inbox.Resume(id=uuid.uuid4().hex, engine=engine.name))
    return (
        f"run {engine.run} of engine {engine.name} goes on at step {engine.global_step}. "
        f"It was suspended: {one_line(engine.suspended)}"
    )
