"""docs/models.md says what becomes of each family in engine, trainer and doctor: `make test-models` tries them all."""

import os

import pytest

from tests.models.families import families, measure, tensors_lost_by_export
from tests.models.table import AGREES, PAGE, listed, reason

COMPUTED, REFUSED = listed(PAGE.read_text())
EVERY = bool(os.environ.get("BOMBUS_EVERY_FAMILY"))
A_FEW = (
    "afmoe",
    "cohere2",
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "gemma4",
    "gpt_oss",
    "granite",
    "mistral",
    "phi",
    "phi3",
)
A_FEW_WITH_BUFFERS = ("apertus", "deepseek_v3")
A_FEW_REFUSED = ("bert", "diffllama", "gemma4_assistant", "lfm2", "mamba", "musicgen", "qwen3_next")


def test_the_page_lists_every_family_of_transformers_once_and_25_are_computed() -> None:
    assert sorted([*COMPUTED, *REFUSED]) == families(), "run: python -m tests.models.table"
    assert len(COMPUTED) >= 25


@pytest.mark.parametrize("family", sorted(COMPUTED) if EVERY else A_FEW)
def test_engine_and_trainer_agree_with_transformers_and_the_doctor_finds_nothing(family: str) -> None:
    assert family in COMPUTED
    found = measure(family)
    assert not found.untried
    assert not found.refusals
    assert found.engine is not None
    assert found.trainer is not None
    assert max(found.engine, found.trainer) < AGREES


@pytest.mark.parametrize("family", sorted(COMPUTED) if EVERY else A_FEW_WITH_BUFFERS)
def test_the_first_version_of_a_run_has_every_tensor_of_the_given_folder(family: str) -> None:
    assert tensors_lost_by_export(family) == []


@pytest.mark.parametrize("family", sorted(REFUSED) if EVERY else A_FEW_REFUSED)
def test_engine_trainer_and_doctor_refuse_in_one_sentence_each(family: str) -> None:
    found = measure(family)
    assert not found.untried
    for sentence in (found.served, found.trained, found.doctor_served, found.doctor_trained):
        assert "cannot be" in sentence
        assert "\n" not in sentence
        assert len(sentence) < 600
    assert reason(found.served) == REFUSED[family], "run: python -m tests.models.table"


@pytest.mark.parametrize("family", ["granitemoehybrid", "lfm2"])
def test_a_model_of_attention_alone_is_computed_though_its_family_is_of_hybrids(family: str) -> None:
    found = measure(family, layer_types=["full_attention"] * 32, num_key_value_heads=8)
    assert not found.refusals
    assert found.engine is not None
    assert found.trainer is not None
    assert max(found.engine, found.trainer) < AGREES
