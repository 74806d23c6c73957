"""What a job asks of the torch trainer, and what that cannot do."""

from bombus.job import parse_job
from bombus.run_config import RunConfig
from bombus_trainer.settings import TrainerSettings


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
    ours = {"adv_estimator": "estimator", "tis_clip": "importance_cap", "tis_clip_low": "importance_floor"}
    assert {name: getattr(settings, ours.get(name, name)) for name in asked} == asked
    lengths = settings.response_tokens_max, settings.turn_tokens_max, settings.model_len_max
    assert (settings.aggregation, lengths) == ("constant", (15000, 4096, 18000))


def test_a_job_that_asks_for_nothing_trains_with_the_trainers_own_defaults() -> None:
    settings = TrainerSettings.of_job(job())
    assert settings == TrainerSettings(bin_tokens=settings.bin_tokens)


def test_names_that_are_not_ours_are_verls() -> None:
    verls = TrainerSettings.of_job(job(backend="verl", adv_estimator="gpg", loss="sapo"))
    assert (verls.verl_adv_estimator, verls.verl_policy_loss) == ("gpg", "sapo")
    ours = TrainerSettings.of_job(job(backend="verl", adv_estimator="reinforce++", loss="vanilla"))
    assert (ours.verl_adv_estimator, ours.verl_policy_loss) == ("", "")
    assert (ours.estimator, ours.loss) == ("reinforce_plus_plus", "clipped")
