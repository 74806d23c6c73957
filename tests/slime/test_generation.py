"""What hook files and the driver generate with: the tokenizer of the engine's model."""

from pathlib import Path

import pytest

from bombus.errors import Refused
from bombus.slime.generation import load_tokenizer


def test_the_models_that_come_with_bombus_have_a_tokenizer_and_a_name_that_has_none_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("tiny")
    assert tokenizer.decode(tokenizer.encode("bees")) == "bees"
    with pytest.raises(Refused, match=r"the tokenizer of '/.*none' cannot be loaded: give a model's folder"):
        load_tokenizer(str(tmp_path / "none"))
