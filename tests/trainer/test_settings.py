"""How a job becomes the trainer's settings, and what is refused."""

import logging
from pathlib import Path

import pytest
from pydantic import ValidationError

from bombus.config.documents import parse_job
from bombus.config.job import RunConfig
from bombus_trainer.loading import load_backend
from bombus_trainer.options import TrainerOptions
from bombus_trainer.settings import CPU_BIN_TOKENS, TrainerSettings


def job(**trainer: object) -> RunConfig:
    return parse_job({"bombus": {"trainer": trainer}})


def test_every_algorithm_of_a_job_reaches_the_trainer() -> None:
    asked = {
        "adv_estimator": "dr_grpo",
        "loss": "gspo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "correction": "icepop",
        "tis_clip": 5.0,
        "tis_clip_low": 0.5,
        "use_opsm": True,
        "opsm_delta": 0.2,
        "kl_coef": 0.1,
        "kl_estimator": "k2",
        "entropy_coef": 0.01,
        "overlong": "penalty",
        "overlong_buffer": 100,
        "overlong_penalty": 0.5,
    }
    settings = TrainerSettings.of_job(job(**asked))
    assert {name: getattr(settings.config, name) for name in asked} == asked
    assert (settings.estimator, settings.loss, settings.config.loss_aggregation) == ("dr_grpo", "gspo", "constant")


def test_micro_batches_are_the_jobs_on_a_gpu_and_smaller_on_a_cpu() -> None:
    asked = job(max_tokens_per_bin=32_000)
    assert TrainerSettings.of_job(asked, "cuda").bin_tokens == 32_000
    assert TrainerSettings.of_job(asked).bin_tokens == CPU_BIN_TOKENS
    assert TrainerSettings.of_job(asked, "cpu", 64_000).bin_tokens == 32_000, "more than the job wants is no use"
    assert TrainerSettings.of_job(asked, "cuda", 9_000).bin_tokens == 9_000


def test_a_micro_batch_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="3 is neither 0 nor at least 16"):
        TrainerOptions(folder=tmp_path, bin_tokens=3)


def test_a_limit_on_the_jobs_micro_batches_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bombus_trainer.loading")
    tiny = {"model": {"path": "tiny"}}
    for asked in (32_000, 512):
        load_backend(
            parse_job({"bombus": {**tiny, "trainer": {"max_tokens_per_bin": asked}}}), TrainerOptions(folder=tmp_path)
        )
    assert [each.message for each in caplog.records if "micro-batch" in each.message] == [
        "micro-batches hold at most 4096 tokens here, fewer than the job's limit of 32000: raise --bin-tokens for more"
    ]


def test_names_that_are_not_ours_are_looked_up_in_verl() -> None:
    verls = TrainerSettings.of_job(job(backend="verl", adv_estimator="gpg", loss="sapo"))
    assert (verls.verl_adv_estimator, verls.verl_policy_loss) == ("gpg", "sapo")
    ours = TrainerSettings.of_job(job(backend="verl", adv_estimator="reinforce++", loss="vanilla"))
    assert (ours.verl_adv_estimator, ours.verl_policy_loss) == ("", "")
    assert (ours.estimator, ours.loss) == ("reinforce_plus_plus", "clipped")
