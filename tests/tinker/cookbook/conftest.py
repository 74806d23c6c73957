"""A hive for recipes, and what one of them has taught a model."""

from collections.abc import Iterator

import pytest

from tests.tinker.cookbook.alphabet_model import write_alphabet_model
from tests.tinker.cookbook.data_sets import write_data_sets, write_preferences
from tests.tinker.cookbook.recipes import MODEL, SL, Recipes
from tests.tinker.whole_hive import running


@pytest.fixture(scope="package")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recipes]:
    folder = tmp_path_factory.mktemp("cookbook")
    write_alphabet_model(folder / MODEL)  # where recipes look for a tokenizer of that name
    write_data_sets(folder)
    write_preferences(folder)
    with running(tmp_path_factory.mktemp("hive"), "--base", f"{MODEL}={folder / MODEL}") as hive:
        yield Recipes(folder, hive.url)


@pytest.fixture(scope="package")
def taught(recipes: Recipes) -> list[dict[str, float]]:
    """Have sl_loop teach the form of an answer, with the log `taught`, and return its metrics."""
    return recipes.run("sl_loop", "taught", **SL, save_every=20)
