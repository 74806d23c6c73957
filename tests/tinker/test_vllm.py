"""A client trains, saves and samples on a whole hive whose replica is a vLLM (`bombus install vllm`)."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from bombus.machine.environments import environments_folder, read_marker
from tests.tinker.test_hive import SENTENCES, learn, logprobs, made
from tests.tinker.test_sampling import PROMPT, sampled
from tests.tinker.whole_hive import PYTHON, Hive, running
from tinker import types

AGREE = 1e-4  # nats, fp32 against fp32
REPLICA = {"backend": "vllm", "eager": True, "threads": 1, "kv_cache_mb": 256, "max_running": 16, "max_loras": 2}
CLUSTER = {"engines": {"main": {"trainer": {"threads": 1}, "inference": [REPLICA]}}}

pytestmark = pytest.mark.skipif(
    not PYTHON or read_marker(environments_folder() / "vllm") is None,
    reason="needs BOMBUS_PYTHON (make test-tinker), and vLLM (bombus install vllm)",
)


@pytest.fixture(scope="module")
def hive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hive]:
    folder = tmp_path_factory.mktemp("hive")
    (folder / "cluster.yaml").write_text(json.dumps(CLUSTER))
    with running(folder, "--config", str(folder / "cluster.yaml")) as hive:
        yield hive


def scored(sampler: Any, tokens: list[int]) -> list[float | None]:
    found: list[float | None] = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    return found


def test_two_models_train_save_and_sample_side_by_side(service: Any) -> None:
    """More models than adapters fit one batch; each sampler's logprobs are those of its model's own `forward`."""
    models = [made(service, rank=rank, seed=rank) for rank in (2, 4, 8)]
    samplers = []
    for steps, model in enumerate(models, start=1):
        learn(model, steps)
        samplers.append(model.save_weights_and_get_sampling_client().result())
    found = [scored(sampler, SENTENCES[0]) for sampler in samplers]
    for model, scores in zip(models, found, strict=True):
        assert scores[0] is None
        assert scores[1:] == pytest.approx(logprobs(model)[0], abs=AGREE)
    assert found[0][1:] != pytest.approx(found[1][1:], abs=1e-2)
    learn(models[0], 2)
    assert scored(samplers[0], SENTENCES[0]) == pytest.approx(found[0], abs=1e-5), "a snapshot does not change"


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_have_the_logprobs_of_the_model_itself(service: Any, temperature: float) -> None:
    """At another temperature than 1, vLLM's own would be those of what it samples from."""
    model = made(service, rank=4, seed=7)
    learn(model, 2)
    sampler = model.save_weights_and_get_sampling_client().result()
    sequences = sampled(sampler, 3, temperature=temperature, seed=1)
    for each in sequences:
        assert len(each.tokens) == 6
        whole = scored(sampler, PROMPT + list(each.tokens))
        assert list(each.logprobs) == pytest.approx(whole[len(PROMPT) :], abs=AGREE)


def test_the_base_is_sampled_from_beside_its_adapters(service: Any) -> None:
    model = made(service, rank=4, seed=9)
    base = service.create_sampling_client(base_model=model.get_info().model_data.model_name).result()
    untrained = logprobs(model)[0]
    learn(model, 2)
    sampler = model.save_weights_and_get_sampling_client().result()
    waiting = [
        each.sample(
            prompt=types.ModelInput.from_ints(PROMPT),
            num_samples=4,
            sampling_params=types.SamplingParams(max_tokens=20, temperature=1.0, seed=3),
        )
        for each in (base, sampler)
    ]
    for each, future in zip((base, sampler), waiting, strict=True):
        sequence = future.result().sequences[0]
        whole = scored(each, PROMPT + list(sequence.tokens))
        assert list(sequence.logprobs) == pytest.approx(whole[len(PROMPT) :], abs=AGREE)
    assert scored(base, SENTENCES[0])[1:] == pytest.approx(untrained, abs=AGREE), "an adapter begins with zeros"


def test_alternatives_to_the_tokens_of_a_prompt_have_their_logprobs(service: Any) -> None:
    model = made(service, rank=4, seed=11)
    sampler = model.save_weights_and_get_sampling_client().result()
    asked = types.SamplingParams(max_tokens=1, temperature=1.0)
    answer = sampler.sample(
        prompt=types.ModelInput.from_ints(SENTENCES[0]),
        num_samples=1,
        sampling_params=asked,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
    ).result()
    rows = answer.topk_prompt_logprobs
    assert rows[0] is None
    for row, own in zip(rows[1:], answer.prompt_logprobs[1:], strict=True):
        assert len(row) == 3
        values = [logprob for _, logprob in row]
        assert values == sorted(values, reverse=True)
        assert max(values) >= own - AGREE
