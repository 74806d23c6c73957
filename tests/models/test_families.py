"""docs/models.md says what engine and trainer do with each family. `make test-models` walks through all of them."""

import os

import pytest

from tests.models.families import NOT_TRIED, families, measure
from tests.models.table import AGREES, PAGE, listed

COMPUTED, REFUSED, UNTRIED = listed(PAGE.read_text())
EVERY = bool(os.environ.get("BOMBUS_EVERY_FAMILY"))
A_FEW = ("cohere2", "deepseek_v3", "gemma2", "gemma3_text", "gpt_oss", "granite", "mistral", "phi", "phi3")
A_FEW_REFUSED = ("bert", "diffllama", "mamba", "qwen3_next")


def test_the_page_lists_every_family_of_transformers_once_and_25_are_computed() -> None:
    assert sorted([*COMPUTED, *REFUSED, *UNTRIED]) == families(), "run: python -m tests.models.table"
    assert len(COMPUTED) >= 25


@pytest.mark.parametrize("family", sorted(COMPUTED) if EVERY else A_FEW)
def test_engine_and_trainer_agree_with_transformers(family: str) -> None:
    assert family in COMPUTED
    found = measure(family)
    assert not found.refusals
    assert found.engine is not None
    assert found.trainer is not None
    assert max(found.engine, found.trainer) < AGREES


@pytest.mark.parametrize("family", sorted(REFUSED) if EVERY else A_FEW_REFUSED)
def test_engine_and_trainer_refuse_in_one_sentence_each(family: str) -> None:
    assert family in REFUSED
    for sentence in measure(family).refusals:
        assert "cannot be" in sentence
        assert "\n" not in sentence


@pytest.mark.parametrize("family", sorted(UNTRIED) if EVERY else ())
def test_what_is_not_tried_cannot_be(family: str) -> None:
    (sentence,) = measure(family).refusals
    assert NOT_TRIED in sentence
