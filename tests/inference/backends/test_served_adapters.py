"""Adapters beside each other in one batch give what engines with each of them merged give."""

import random
from typing import Any

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from bombus.errors import Code, EngineFault, Refused
from bombus.hive.generation import Generate
from bombus_inference.backends.torch.adapters.own import LowRank
from bombus_inference.backends.torch.engine import Engine
from bombus_inference.backends.torch.patching import TensorPatch
from bombus_inference.settings import ComputeSettings
from tests.inference.backends.small_adapters import address_of, loaded, random_adapter, with_merged
from tests.inference.backends.small_engines import (
    CONTEXT,
    VOCABULARY,
    Answers,
    Completion,
    another,
    answer,
    engine_for,
    finish,
    llama,
    paged,
    qwen,
    request,
    worst_difference,
)

BASE = ""
ONE, TWO, THREE = (address_of(number) for number in (1, 2, 3))
MODELS = {"llama": llama, "qwen": qwen}


@pytest.fixture(params=sorted(MODELS), scope="module")
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return MODELS[request.param]()


def adapters(model: PreTrainedModel) -> dict[str, Any]:
    """Three adapters of different ranks and layers."""
    return {
        ONE: random_adapter(model, 1, rank=4),
        TWO: random_adapter(model, 2, rank=7, targets=("q_proj", "down_proj")),
        THREE: random_adapter(model, 3, rank=1, targets=("v_proj", "gate_proj", "up_proj")),
    }


def with_adapter(body: Generate, address: str) -> Generate:
    return msgspec.structs.replace(body, adapter=address)


def engine_with_all(model: PreTrainedModel, **settings: Any) -> Engine:
    engine = engine_for(model, **settings)
    for address, factors in adapters(model).items():
        engine.add_adapter(address, loaded(factors))
    return engine


def merged_models(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    return {BASE: model} | {address: with_merged(model, factors) for address, factors in adapters(model).items()}


def test_three_adapters_and_the_base_in_one_batch_under_random_arrival_give_what_merged_models_give(
    model: PreTrainedModel,
) -> None:
    numbers = random.Random(5)
    engine, merged = engine_with_all(model, prefill_tokens_max=24), merged_models(model)
    common = [numbers.randrange(VOCABULARY) for _ in range(30)]
    asked: dict[int, tuple[str, list[int]]] = {}
    answers = Answers()
    for ticket in range(40):
        address = numbers.choice((BASE, ONE, TWO, THREE))
        prompt = common[: numbers.randint(0, 30)] + [numbers.randrange(VOCABULARY) for _ in range(3)]
        asked[ticket] = address, prompt
        engine.add(ticket, with_adapter(request(prompt, seed=ticket, max_tokens=numbers.randint(1, 20)), address))
        for _ in range(numbers.randint(0, 3)):
            answers.take(engine.step())
    finish(engine, answers)
    assert engine.stats.cached_tokens > 0
    for ticket, (address, prompt) in asked.items():
        assert worst_difference(merged[address], prompt, answers[ticket].only) < 1e-4
        others = [other for other in merged if other != address]
        assert all(worst_difference(merged[other], prompt, answers[ticket].only) > 1e-2 for other in others)
    assert [adapter.uses for _, adapter in engine.adapters.items()] == [0, 0, 0]
    assert engine.stats.blocks_held == 0


@pytest.mark.parametrize("address", [BASE, ONE, TWO, THREE])
def test_an_answer_does_not_depend_on_who_else_is_in_the_batch(model: PreTrainedModel, address: str) -> None:
    body = with_adapter(request(list(range(20)), seed=7, max_tokens=25), address)
    alone = answer(engine_with_all(model), body).only
    engine = engine_with_all(model)
    for ticket, other in enumerate((BASE, ONE, TWO, THREE, ONE, TWO), start=100):
        engine.add(ticket, with_adapter(request(list(range(ticket % 9 + 1)), seed=ticket), other))
    engine.step()
    engine.add(1, body)
    among = finish(engine)[1].only
    assert among.tokens == alone.tokens
    assert among.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_an_adapter_finds_its_own_prefixes_in_the_cache_and_those_of_no_other(model: PreTrainedModel) -> None:
    engine, merged = engine_with_all(model), merged_models(model)
    prompt = list(range(30))
    for address in (BASE, ONE, TWO):
        made = answer(engine, with_adapter(request(prompt), address)).only
        assert made.cached == 0
        assert worst_difference(merged[address], prompt, made) < 1e-4
    for address in (BASE, ONE, TWO):
        made = answer(engine, with_adapter(request(prompt), address)).only
        assert made.cached == 28  # seven blocks of four; the last token is always computed
        assert worst_difference(merged[address], prompt, made) < 1e-4


def test_an_adapter_that_is_loaded_again_does_not_find_what_was_computed_before_it_was_dropped(
    model: PreTrainedModel,
) -> None:
    engine = engine_with_all(model)
    prompt = list(range(30))
    answer(engine, with_adapter(request(prompt), ONE))
    engine.remove_adapter(ONE)
    engine.add_adapter(ONE, loaded(adapters(model)[ONE]))
    assert answer(engine, with_adapter(request(prompt), ONE)).only.cached == 0


def test_an_unknown_adapter_is_refused_by_name_and_the_engine_goes_on(model: PreTrainedModel) -> None:
    engine = engine_for(model)
    with pytest.raises(Refused, match=f"does not have adapter {ONE}: load it first") as refused:
        engine.add(1, with_adapter(request([1]), ONE))
    assert refused.value.code == Code.UNKNOWN_MODEL
    with pytest.raises(Refused) as refused:
        engine.add(1, with_adapter(request([1]), "x" * 1_000_000))
    assert len(refused.value.why) < 200
    assert not engine.has_work
    assert len(answer(engine, request([1])).only.tokens) == 12


def test_adapters_come_and_go_while_others_generate(model: PreTrainedModel) -> None:
    engine, merged = engine_for(model), merged_models(model)
    answers = Answers()
    engine.add_adapter(ONE, loaded(adapters(model)[ONE]))
    engine.add(1, with_adapter(request([1, 2, 3], max_tokens=40), ONE))
    engine.add(2, request([1, 2, 3], max_tokens=40))
    for _ in range(5):
        answers.take(engine.step())
    assert engine.add_adapter(TWO, loaded(adapters(model)[TWO]))
    engine.add(3, with_adapter(request([1, 2, 3], max_tokens=4), TWO))
    while 3 not in answers:
        answers.take(engine.step())
    engine.remove_adapter(TWO)
    engine.add_adapter(THREE, loaded(adapters(model)[THREE]))
    engine.add(4, with_adapter(request([1, 2, 3], max_tokens=8), THREE))
    finish(engine, answers)
    for ticket, address in ((1, ONE), (2, BASE), (3, TWO), (4, THREE)):
        assert worst_difference(merged[address], [1, 2, 3], answers[ticket].only) < 1e-4


def test_an_adapter_in_use_is_neither_evicted_nor_unloaded_until_its_requests_have_ended(
    model: PreTrainedModel,
) -> None:
    made = {address: loaded(factors) for address, factors in adapters(model).items()}
    engine = engine_for(model, adapters_bytes=made[ONE].bytes + made[TWO].bytes)
    engine.add_adapter(ONE, made[ONE])
    engine.add_adapter(TWO, made[TWO])
    engine.add(1, with_adapter(request([1, 2], max_tokens=6), ONE))
    engine.add(2, with_adapter(request([1, 2], max_tokens=60), TWO))
    answers = Answers()
    answers.take(engine.step())
    with pytest.raises(Refused, match="requests use adapter"):
        engine.remove_adapter(ONE)
    with pytest.raises(Refused, match="try again later") as refused:
        engine.add_adapter(THREE, made[THREE])
    assert refused.value.code == Code.OVERLOADED
    while 1 not in answers:
        answers.take(engine.step())
    engine.add_adapter(THREE, made[THREE])
    assert [address for address, _ in engine.adapters.items()] == [TWO, THREE]
    engine.abort(2)
    engine.remove_adapter(TWO)
    assert engine.stats.adapters == 1
    assert worst_difference(merged_models(model)[ONE], [1, 2], answers[1].only) < 1e-4


def test_an_adapter_on_the_output_layer_is_served_too() -> None:
    model = llama()
    factors = random_adapter(model, 4, targets=("lm_head", "o_proj"))
    engine = engine_for(model)
    engine.add_adapter(ONE, loaded(factors))
    prompt = [3, 4, 5]
    engine.add(1, with_adapter(request(prompt), ONE))
    engine.add(2, request(prompt))
    answers = finish(engine)
    assert worst_difference(with_merged(model, factors), prompt, answers[1].only) < 1e-4
    assert worst_difference(model, prompt, answers[2].only) < 1e-4


@pytest.mark.parametrize(
    ("name", "shape", "why"),
    [
        ("model.layers.9.self_attn.q_proj", (32, 32), "no such layer"),
        ("model.layers.0.self_attn.q_proj", (8, 4), r"is \[8, 2\] times \[2, 4\], but this model's is \[32, 32\]"),
    ],
)
def test_an_adapter_of_another_model_is_refused_and_changes_nothing(
    model: PreTrainedModel, name: str, shape: tuple[int, int], why: str
) -> None:
    engine = engine_for(model)
    foreign = {name: (torch.zeros(2, shape[1]), torch.zeros(shape[0], 2))}
    with pytest.raises(Refused, match=why):
        engine.add_adapter(ONE, loaded(foreign))
    assert engine.stats.adapters == 0


# ---- when the engine's own weights change ------------------------------------------------------------------------


def swapped(engine: Engine, model: PreTrainedModel, version: int) -> PreTrainedModel:
    new = another(model, seed=version)
    engine.swap_weights({name: tensor.clone() for name, tensor in new.state_dict().items()}, version, 1)
    return new


def patched(engine: Engine, model: PreTrainedModel, version: int) -> PreTrainedModel:
    """Add 1 to the third and the eighth element of a weight that adapters are on, by a delta."""
    name = "model.layers.0.self_attn.q_proj.weight"
    new = paged(model)
    new.set_attn_implementation("eager")
    flat = new.get_parameter(name).data.view(-1)
    where = torch.tensor([2, 7])
    flat[where] += version
    engine.patch_weights({name: TensorPatch(flat[where].clone(), where)}, version, 1)
    return new


def check_all(engine: Engine, own: PreTrainedModel, model: PreTrainedModel, version: int) -> None:
    merged = merged_models(model) | {BASE: own}
    prompt = list(range(5, 25))
    for ticket, address in enumerate((BASE, ONE, TWO, THREE)):
        engine.add(ticket, with_adapter(request(prompt, seed=ticket), address))
    answers = finish(engine)
    for ticket, address in enumerate((BASE, ONE, TWO, THREE)):
        made: Completion = answers[ticket].only
        assert worst_difference(merged[address], prompt, made) < 1e-4
        assert set(made.versions) == {0 if address else version}


@pytest.mark.parametrize("change", [swapped, patched])
def test_adapters_stay_on_the_base_when_the_engines_own_weights_change_twice(
    model: PreTrainedModel, change: Any
) -> None:
    engine = engine_with_all(model)
    check_all(engine, model, model, 0)
    check_all(engine, change(engine, model, 1), model, 1)
    check_all(engine, change(engine, model, 2), model, 2)


def test_answers_under_way_when_the_own_weights_change_are_those_of_their_adapters(model: PreTrainedModel) -> None:
    engine, merged = engine_with_all(model), merged_models(model)
    prompt = list(range(12))
    for ticket, address in enumerate((BASE, ONE, TWO)):
        engine.add(ticket, with_adapter(request(prompt, seed=ticket, max_tokens=30), address))
    answers = Answers()
    for _ in range(10):
        answers.take(engine.step())
    swapped(engine, model, 1)
    finish(engine, answers)
    assert set(answers[0].only.versions) == {0, 1}
    for ticket, address in ((1, ONE), (2, TWO)):
        assert set(answers[ticket].only.versions) == {0}
        assert worst_difference(merged[address], prompt, answers[ticket].only) < 1e-4


def test_an_engine_that_serves_other_weights_already_takes_no_adapters(model: PreTrainedModel) -> None:
    engine = engine_for(model)
    swapped(engine, model, 1)
    with pytest.raises(Refused, match="has no base for adapters") as refused:
        engine.add_adapter(ONE, loaded(adapters(model)[ONE]))
    assert refused.value.code == Code.UNSUPPORTED
    settings = ComputeSettings(kv_cache_bytes=4 << 20, max_model_len=CONTEXT, block_tokens=4)
    late = Engine(paged(model), settings, run=1, version=37)
    with pytest.raises(Refused, match="version 37"):
        late.add_adapter(ONE, loaded(adapters(model)[ONE]))


def test_a_change_of_weights_that_does_not_fit_leaves_the_base_as_it_is(model: PreTrainedModel) -> None:
    engine = engine_for(model)
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(EngineFault, match="does not fit this model's"):
        engine.patch_weights({name: TensorPatch(torch.ones(1), torch.tensor([1 << 20]))}, 1, 1)
    with pytest.raises(EngineFault, match="lack"):
        engine.swap_weights({}, 1, 1)
    for address, factors in adapters(model).items():
        engine.add_adapter(address, loaded(factors))
    check_all(engine, model, model, 0)


# ---- half precision ----------------------------------------------------------------------------------------------


def in_half(model: PreTrainedModel) -> PreTrainedModel:
    return paged(model).bfloat16()


def half_engine(model: PreTrainedModel) -> Engine:
    settings = ComputeSettings(
        kv_cache_bytes=4 << 20, max_model_len=CONTEXT, block_tokens=4, dtype="bfloat16", device="cpu"
    )
    return Engine(in_half(model), settings, run=1, version=0)


def logprobs_of(engine: Engine, address: str, prompt: list[int]) -> list[float]:
    body = msgspec.structs.replace(request(prompt, temperature=0.0, max_tokens=1), prompt_logprobs=True)
    engine.add(1, with_adapter(body, address))
    return finish(engine)[1].prompt_logprobs[1:]


def test_in_half_precision_an_adapter_gives_what_it_gives_as_the_engines_own() -> None:
    model = llama()
    made = {address: loaded(factors, torch.bfloat16) for address, factors in adapters(model).items()}
    engine = half_engine(model)
    for address, adapter in made.items():
        engine.add_adapter(address, adapter)
    prompt = list(range(40))
    plain = logprobs_of(half_engine(model), BASE, prompt)
    for address, adapter in made.items():
        alone = half_engine(model)
        alone.swap_weights(None, 1, 1, adapter.layers)
        expected = logprobs_of(alone, BASE, prompt)
        assert logprobs_of(engine, address, prompt) == pytest.approx(expected, abs=0.1)
        assert expected != pytest.approx(plain, abs=0.5)
    assert logprobs_of(engine, BASE, prompt) == pytest.approx(plain, abs=1e-6)


def test_an_adapter_of_the_engines_own_policy_does_not_reach_the_others() -> None:
    model = llama()
    made = {address: loaded(factors, torch.bfloat16) for address, factors in adapters(model).items()}
    engine = half_engine(model)
    engine.add_adapter(ONE, made[ONE])
    prompt = list(range(40))
    before = logprobs_of(engine, ONE, prompt)
    own: dict[str, LowRank] = dict(made[TWO].layers)
    engine.swap_weights(None, 1, 1, own)
    alone = half_engine(model)
    alone.swap_weights(None, 1, 1, own)
    assert logprobs_of(engine, BASE, prompt) == pytest.approx(logprobs_of(alone, BASE, prompt), abs=1e-6)
    assert logprobs_of(engine, ONE, prompt) == pytest.approx(before, abs=1e-6)
    engine.swap_weights(None, 2, 1, {})
    assert logprobs_of(engine, BASE, prompt) == pytest.approx(logprobs_of(half_engine(model), BASE, prompt), abs=1e-6)
    assert logprobs_of(engine, ONE, prompt) == pytest.approx(before, abs=1e-6)
