"""Every name by which a job chooses an algorithm has a formula, and a row in docs/algorithms.md."""

import re
from enum import StrEnum
from pathlib import Path

import pytest
import torch

from bombus.config.algorithms import Aggregation, Correction, Estimator, KlEstimator, Loss, Overlong
from bombus.config.trainer import TrainerConfig
from bombus.datums.advantages import group_advantages
from bombus_trainer.algorithms.corrections import CorrectionRule, sampler_correction
from bombus_trainer.algorithms.kl import KL_ESTIMATES
from bombus_trainer.algorithms.losses import SURROGATES
from bombus_trainer.data.batch import EpisodeGroup, mini_batches, prepare
from tests.trainer.small_batches import VOCAB, call, episode, tiny_settings

PAGE = (Path(__file__).parents[3] / "docs/algorithms.md").read_text()
SECTIONS: dict[str, type[StrEnum]] = {
    "adv_estimator": Estimator,
    "loss": Loss,
    "loss_aggregation": Aggregation,
    "kl_estimator": KlEstimator,
    "correction": Correction,
    "overlong": Overlong,
}
LIMITS = {"max_response_length_in_one_turn": 100}


def test_every_name_of_an_algorithm_has_a_formula() -> None:
    assert set(SURROGATES) == set(Loss)
    assert set(KL_ESTIMATES) == set(KlEstimator)
    for estimator in Estimator:
        assert len(group_advantages([0.0, 1.0], [1, 1], estimator)) == 2
        assert estimator.over_batch in (True, False)
    for correction in Correction:
        rule = CorrectionRule(correction, 0.5, 2.0)
        sequences_N = torch.zeros(1, dtype=torch.long)
        assert len(sampler_correction(torch.zeros(1), torch.zeros(1), sequences_N, 1, rule).importance_N) == 1
    members = [episode(name, reward, call(name, [1, 2], [3, 4])) for name, reward in (("a", 0.0), ("b", 1.0))]
    chosen: list[dict[str, object]] = [{"loss_aggregation": each} for each in Aggregation]
    chosen += [{"overlong": each, "overlong_buffer": 20} for each in Overlong]
    for choice in chosen:
        settings = tiny_settings(LIMITS, **choice)
        batch = prepare([EpisodeGroup("t", tuple(members))], settings, VOCAB)
        assert len(mini_batches(batch, settings, 1, 0)[0]) == 2


@pytest.mark.parametrize("loss", Loss)
def test_every_loss_has_bounds_and_a_correction_of_its_own(loss: Loss) -> None:
    config = TrainerConfig(loss=loss)
    assert (config.clip_low, config.clip_high) == loss.clip_range
    assert config.correction in Correction


@pytest.mark.parametrize("setting", SECTIONS)
def test_every_name_of_an_algorithm_has_a_row_in_the_docs(setting: str) -> None:
    found = re.search(rf"^## [^\n]*`{setting}`[^\n]*\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert found, f"docs/algorithms.md has a section for {setting}"
    rows = set(re.findall(r"^\| `(\w+)`", found[1], re.MULTILINE))
    assert {str(name) for name in SECTIONS[setting]} <= rows
