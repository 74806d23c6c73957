"""The base that these tests share."""

from pathlib import Path

import pytest

from tests.trainer.small_batches import tiny_model_folder


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("base"))
