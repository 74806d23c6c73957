"""Reports how this gateway reads the model of each run, so that the status shows it, and whether gateways differ."""

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
    """Sends each format missing from the log until it arrives.

    The message of a run always has the same id. So the bus keeps one of those that are sent while none is decided.
    """

    def __init__(self, gateway: Gateway, models: EngineModels) -> None:
        self._gateway = gateway
        self._models = models
        self._sender = uuid.uuid4().hex
        self._name = f"{socket.gethostname()}-{os.getpid()} (bombus {importlib.metadata.version('bombus')})"
        self._tried: dict[str, int] = {}  # by engine: the run whose model was read, or cannot be

    async def run(self) -> None:
        """Read the models of the gateway's engines when their runs boot, and report them, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            if self._gateway.ready:
                await self.check()

    async def check(self) -> None:
        """Read the models that are not read yet, and report what is missing from the log."""
        for name in self._gateway.settings.engines:
            await self._read(self._gateway.follower.hive.engine(name))
        for name, (run, found) in list(self._models.formats.items()):
            await self._report(name, run, found)

    async def _read(self, engine: EngineState) -> None:
        """Load the model of an engine as soon as the log names its files: its first call then need not wait for it."""
        run, weights = engine.run, engine.weights
        if engine.phase == Phase.OFFLINE or weights is None or not weights.weights.tokenizer:
            return
        if self._tried.get(engine.name) == run:
            return
        try:
            await self._models.text_model(engine)
        except Refused as error:
            log.warning("a model is not read yet", extra={"engine": engine.name, "why": error.why})
            return
        except Exception as error:  # a model's files may fail in any way; a call that needs them is told why
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
            log.warning("could not report how a model is read", extra={"engine": name, "why": str(error)})
