"""Reports how this gateway reads each run's conversation format, so that the status shows where gateways differ."""

import asyncio
import importlib.metadata
import logging
import os
import socket
import uuid

from bombus.errors import BusUnavailable, Refused
from bombus.hive.events import ConversationFormat
from bombus.hive.inbox import ModelReadFact
from bombus.hive.state import EngineState, Phase
from bombus_gateway.call.models import EngineModels
from bombus_gateway.context import Gateway

log = logging.getLogger(__name__)

CHECK_S = 1.0
_SEND_S = 5.0


class FormatReports:
    """Sends each format that the log does not have yet, until the log has it.

    The message for a run always has the same id, so the bus keeps only one copy of it until the coordinator has
    processed it.
    """

    def __init__(self, gateway: Gateway, models: EngineModels) -> None:
        self._gateway = gateway
        self._models = models
        self._sender = uuid.uuid4().hex
        self._name = f"{socket.gethostname()}-{os.getpid()} (bombus {importlib.metadata.version('bombus')})"
        self._tried: dict[str, int] = {}  # by engine: the last run for which reading the model succeeded or failed

    async def run(self) -> None:
        """Read the model of each engine when its run boots, and report its format, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            if self._gateway.ready:
                await self.check()

    async def check(self) -> None:
        """Read the models that have not been read yet, and report the formats that are missing from the log."""
        for name in self._gateway.settings.engines:
            await self._read(self._gateway.follower.hive.engine(name))
        for name, (run, found) in list(self._models.formats.items()):
            await self._report(name, run, found)

    async def _read(self, engine: EngineState) -> None:
        """Load an engine's model as soon as the log names its files, so that the engine's first call need not wait."""
        run, weights = engine.run, engine.weights
        if engine.phase == Phase.OFFLINE or weights is None or not weights.weights.tokenizer:
            return
        if self._tried.get(engine.name) == run:
            return
        try:
            await self._models.text_model(engine)
        except Refused as error:
            log.warning("a model cannot be read yet", extra={"engine": engine.name, "why": error.why})
            return
        except Exception as error:  # loading may raise anything; calls to the model will get the reason
            why = f"{type(error).__name__}: {error}"
            log.error("a model cannot be read", extra={"engine": engine.name, "why": why})
        self._tried[engine.name] = run

    async def _report(self, name: str, run: int, found: ConversationFormat) -> None:
        if not self._gateway.follower.hive.engine(name).lacks_format(run, found):
            return
        message = ModelReadFact(
            id=f"model-read.{self._sender}.{name}.{run}", engine=name, run=run, gateway=self._name, format=found
        )
        try:
            await self._gateway.bus.inbox.send(message, timeout_s=_SEND_S)
        except (BusUnavailable, Refused) as error:
            log.warning("the format of a model could not be reported", extra={"engine": name, "why": str(error)})
