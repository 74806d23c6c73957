"""The text models of engines: each is loaded once while it is in use."""

import msgspec

from bombus.bus import Blobs, Bus
from bombus.config.documents import parse_job
from bombus.hive.events import EngineConfigured, Weights, WeightsReady
from bombus.hive.state import EngineState
from bombus_gateway.call.models import TEXT_MODELS_MAX, EngineModels
from tests.gateway.openai_hive import FILES, JOB, MODEL


def engine(number: int) -> EngineState:
    job = parse_job(JOB)
    name = f"tokenizer-{number}"
    active = EngineConfigured(
        config=job.to_json(), config_digest=name, collection=job.to_collection(), model=job.model.path
    )
    weights = WeightsReady(run=1, version=0, weights=Weights(where="nowhere", tokenizer=name))
    return EngineState(name=f"engine-{number}", active=active, weights=weights)


async def test_the_text_model_that_was_used_least_recently_is_dropped(bus: Bus) -> None:
    files = msgspec.msgpack.encode(FILES)
    engines = [engine(number) for number in range(TEXT_MODELS_MAX + 1)]
    for each in engines:
        assert each.weights is not None
        await Blobs(bus).put(each.weights.weights.tokenizer, files)
    kept = EngineModels(bus)
    loaded = [await kept.text_model(each) for each in engines[:-1]]
    assert "pieces" in vars(loaded[0].tokenizer), "it was made while the model was loaded"
    assert await kept.text_model(engines[0]) is loaded[0]
    await kept.text_model(engines[-1])
    assert await kept.text_model(engines[0]) is loaded[0]
    assert await kept.text_model(engines[1]) is not loaded[1]
    assert kept.job(engines[0]).model.path == MODEL
