"""The text model of each engine's running job, read once."""

import asyncio
import logging
from collections import OrderedDict

import msgspec

from bombus.bus import Blobs, Bus
from bombus.config.job import RunConfig
from bombus.errors import BombusError, Code, EngineFault, Refused
from bombus.hive.decoding import decoded
from bombus.hive.events import ConversationFormat, EngineConfigured, WeightsReady
from bombus.hive.state import EngineState
from bombus_gateway.text.rendering import TextModel, TextOptions

log = logging.getLogger(__name__)

TEXT_MODELS_MAX = 16

_files = msgspec.msgpack.Decoder(dict[str, bytes])


class EngineModels:
    """Caches text models by their options and their tokenizer's blob. The least recently used models are dropped."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._models: OrderedDict[tuple[str, bytes], TextModel] = OrderedDict()
        self._loading = asyncio.Lock()
        # By engine: the two events that determine its text model's cache key, and this key.
        self._keys: dict[str, tuple[WeightsReady, EngineConfigured | None, tuple[str, bytes]]] = {}
        self.formats: dict[str, tuple[int, ConversationFormat]] = {}  # by engine: its run, and its model's format

    def job(self, engine: EngineState) -> RunConfig:
        """Return the run's configuration. Raises `Refused` NO_CONFIG if there is none."""
        if engine.active is None:
            raise Refused(Code.NO_CONFIG, f"Engine {engine.name} is not running a job.")
        return RunConfig.from_json(engine.active.config)

    async def text_model(self, engine: EngineState) -> TextModel:
        """Return the run's tokenizer and renderer.

        Raises `Refused` while the model is loading, and `EngineFault` if its files cannot be used.
        """
        run, weights, active = engine.run, engine.weights, engine.active
        if weights is None or not weights.weights.tokenizer:
            raise Refused(Code.NO_REPLICA, f"Engine {engine.name} is still loading its model; try again in a moment.")
        known = self._keys.get(engine.name)
        if known is not None and known[0] is weights and known[1] is active:
            key = known[2]
        else:
            options = _options(self.job(engine))
            key = weights.weights.tokenizer, msgspec.json.encode(options)
            self._keys[engine.name] = weights, active, key
        model = self._models.get(key)
        if model is None:
            config = self.job(engine)
            async with self._loading:  # an engine's first calls arrive together; one of them loads for all
                model = self._models.get(key) or await self._load(key[0], config.model.path, _options(config))
        self._models[key] = model
        self._models.move_to_end(key)
        while len(self._models) > TEXT_MODELS_MAX:
            self._models.popitem(last=False)
        self.formats[engine.name] = run, model.format
        return model

    async def _load(self, blob: str, name: str, options: TextOptions) -> TextModel:
        try:
            files = decoded(_files.decode, await Blobs(self._bus).get(blob))
        except EngineFault:
            raise
        except BombusError as error:
            raise Refused(
                Code.BUS_DOWN, f"The model's tokenizer cannot be read right now; try again. ({error})"
            ) from error
        except msgspec.MsgspecError as error:
            raise EngineFault(f"the tokenizer's blob {blob} is not a map of files: {error}") from error
        log.info("loading a tokenizer", extra={"blob": blob, "model": name})
        return await asyncio.to_thread(_loaded, files, name, options)


def _options(config: RunConfig) -> TextOptions:
    return TextOptions.of(config.model, config.rollout.history)


def _loaded(files: dict[str, bytes], name: str, options: TextOptions) -> TextModel:
    """Load a text model, and compute the cached properties that its first call needs."""
    model = TextModel(files, name, options)
    _ = (
        model.tokenizer.pieces,
        model.format,
        model.renderer.kept,
        model.renderer.thinking,
    )  # slow to compute, and cached on first access
    return model
