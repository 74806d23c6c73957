"""`bombus stop`: stops the job of an engine. The hive keeps running, and another job can be started."""

import argparse
import uuid

from bombus.bus import Bus
from bombus.commands import control
from bombus.hive import inbox
from bombus.hive.state import EngineState, Phase
from bombus.machine.process import operator_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    control.add_arguments(parser, "stop")


def run(arguments: argparse.Namespace) -> int:
    return control.run("stop", arguments, _stop)


async def _stop(bus: Bus, engine: EngineState) -> str:
    if engine.phase == Phase.OFFLINE:
        return f"engine {engine.name} is not running a job"
    await bus.inbox.request(inbox.Stop(id=uuid.uuid4().hex, engine=engine.name, by=operator_name()))
    return f"engine {engine.name} is stopped at step {engine.global_step}; its log, weights and checkpoints are kept"
