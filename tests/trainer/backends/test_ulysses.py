"""Attention of two ranks that have a part of a row each is that of the whole row."""

from typing import Any

import pytest
import torch

from bombus.errors import EngineFault
from bombus_trainer.backends.verl.ulysses import check_heads, ulysses_attention
from tests.effort import long_only
from tests.trainer.backends.row_parts import CASES
from tests.verl.processes import found_by_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by_ranks("tests.trainer.backends.row_parts", 2, tmp_path_factory.mktemp("ranks"))


@long_only
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_of_the_parts_are_those_of_the_whole_row(found: dict[str, Any], case: str) -> None:
    assert len(found[case]) == (5 if case == "sinks" else 4)
    assert max(found[case]) < 1e-5


@long_only
def test_ranks_join_their_terms_and_get_the_gradients_of_their_own(found: dict[str, Any]) -> None:
    assert found["joined"] == [[1.0, 2.0, 3.0, 4.0, 5.0], [3.0, 4.0, 5.0]]


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    check_heads(6, 3)
    with pytest.raises(EngineFault, match="the model's layers have 6 heads, which 4 ranks cannot share: set it"):
        check_heads(6, 4)


def test_a_layer_that_does_not_pass_the_row_on_is_refused() -> None:
    side = torch.zeros(1, 2, 3, 4)
    with pytest.raises(EngineFault, match="its layers do not pass on extra arguments to their attention function"):
        ulysses_attention(torch.nn.Identity(), side, side, side, None)
