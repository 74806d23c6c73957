"""The folder of a demo: which demo goes on there, and in which experiment."""

from pathlib import Path

import pytest

from bombus.demo.folder import DEMO, DemoOf, open_folder
from bombus.errors import Refused


def test_a_demo_that_goes_on_keeps_its_experiment_and_any_other_has_its_own(tmp_path: Path) -> None:
    """All were one experiment: in a hive that runs, one went on with the weights of another, or was refused."""
    first, again = DemoOf("tiny", 0, "a1"), DemoOf("tiny", 0, "b2")
    assert open_folder(tmp_path / "one", first) is None
    assert open_folder(tmp_path / "one", again) == first
    assert open_folder(tmp_path / "other", again) is None
    names = {demo.experiment(game) for demo in (first, again) for game in ("tiny-1", "tiny-2", "needle")}
    assert len(names) == 6
    assert first.experiment("needle") == "demo-a1-needle"


def test_a_demo_of_another_model_or_seed_is_refused(tmp_path: Path) -> None:
    open_folder(tmp_path / "one", DemoOf("tiny", 0, "a1"))
    for wanted in (DemoOf("tiny", 1, "a1"), DemoOf("smollm2", 0, "a1")):
        with pytest.raises(Refused, match="has a demo of the model tiny with seed 0, but this one is of the model"):
            open_folder(tmp_path / "one", wanted)


def test_a_demo_of_an_older_version_goes_on_in_the_experiment_that_it_began(tmp_path: Path) -> None:
    (tmp_path / DEMO).write_text('{"model":"tiny","seed":0}')
    earlier = open_folder(tmp_path, DemoOf("tiny", 0, "a1"))
    assert earlier is not None
    assert earlier.experiment("tiny-1") == "demo"
