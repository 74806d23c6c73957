"""`bombus resume`: retries a suspended run, or suspended models, once the cause of the failure has been removed."""

import argparse
import uuid

from bombus.bus import Bus
from bombus.commands import control
from bombus.figures import one_line
from bombus.hive import inbox
from bombus.hive.state import EngineState, Phase
from bombus.machine.process import operator_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    control.add_arguments(parser, "resume")


def run(arguments: argparse.Namespace) -> int:
    return control.run("resume", arguments, _resume)


async def _resume(bus: Bus, engine: EngineState) -> str:
    limit = engine.collection.operations.executions_max
    waiting = ", ".join(model.name for model in engine.clients.given_up(limit))
    if engine.phase != Phase.OFFLINE and not engine.suspended and not waiting:
        return f"run {engine.run} of engine {engine.name} is not suspended: it is {engine.phase}"
    await bus.inbox.request(inbox.Resume(id=uuid.uuid4().hex, engine=engine.name, by=operator_name()))
    if not engine.suspended:
        return f"the trainer of engine {engine.name} will try again to rebuild {waiting}"
    return (
        f"run {engine.run} of engine {engine.name} resumes at step {engine.global_step}. "
        f"It was suspended: {one_line(engine.suspended)}"
    )
