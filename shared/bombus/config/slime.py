"""Translates other servers' names for trainer options, mainly slime's, into ours."""

from collections.abc import Iterator, Mapping

from bombus.config.groups import bad_config
from bombus.config.trainer import TrainerConfig

RENAMED = {
    "eps_clip_high": "clip_high",
    "eps_clip_c": "dual_clip",
    "kl_loss_coef": "kl_coef",
    "kl_loss_type": "kl_estimator",
    "tis_upper_bound": "tis_clip",
    "tis_lower_bound": "tis_clip_low",
    "sample_packing_sequence_len": "max_tokens_per_bin",  # xorl's name
}
SWITCHES: dict[str, tuple[str, dict[bool, object]]] = {
    "calculate_per_token_loss": ("loss_aggregation", {True: "token", False: "episode"}),
    "disable_grpo_std_normalization": ("normalise_by_std", {True: False, False: True}),
}
ESTIMATORS: dict[object, dict[str, object]] = {  # slime's names for estimators that also select a loss
    "gspo": {"adv_estimator": "grpo", "loss": "gspo"},
    "cispo": {"adv_estimator": "grpo", "loss": "cispo"},
}
CORRECTIONS: dict[str, dict[str, str]] = {  # keyed by tis_level, then tis_mode
    "token": {"truncate": "token_tis", "clip": "token_tis", "mask": "token_mask"},
    "sequence": {"truncate": "sequence_tis", "clip": "sequence_tis", "mask": "sequence_mask"},
}
TIS = ("tis_mode", "tis_level", "use_tis")
OTHERS = ("eps_clip", "advantage_estimator", "use_kl_loss", *TIS)
SLIMES = (RENAMED.keys() | SWITCHES.keys() | set(OTHERS)) - {"sample_packing_sequence_len"}  # only slime's


def from_slime(given: Mapping[str, object]) -> dict[str, tuple[object, str]]:
    """Return each of our fields that is set, with its value and the option that set it. Options that are not slime's
    pass through.

    `eps_clip` sets both bounds unless the upper bound is given too. `kl_loss_coef` has no effect if `use_kl_loss` is
    false. Raises `Refused(BAD_CONFIG)` if two options set the same field, if an option does not accept its value, or
    for a nonzero `kl_coef` alongside slime's options.
    """
    found: dict[str, tuple[object, str]] = {}
    for option, value in _without_kl_in_reward(given).items():
        for field, ours in _read(option, value):
            _put(found, field, ours, option)
    _put_correction(found, given)
    if given.get("eps_clip") is not None and "clip_high" not in found:
        found["clip_high"] = (given["eps_clip"], "eps_clip")
    if "use_kl_loss" in given and not _switch("use_kl_loss", given["use_kl_loss"]):
        found.pop("kl_coef", None)
    return found


def _put(found: dict[str, tuple[object, str]], field: str, value: object, option: str) -> None:
    if field in found:
        names = f"bombus.trainer.{found[field][1]} and bombus.trainer.{option}"
        raise bad_config(f"{names} set the same thing: give only one of them")
    found[field] = (value, option)


def _read(option: str, value: object) -> Iterator[tuple[str, object]]:
    if option in SWITCHES:
        field, meaning = SWITCHES[option]
        yield field, meaning[_switch(option, value)]
    elif option == "advantage_estimator":
        yield from (ESTIMATORS.get(value) or {"adv_estimator": value}).items()
    elif option == "eps_clip":
        yield "clip_low", value
    elif option in RENAMED and value is not None:  # None is slime's default for options that are not given
        yield RENAMED[option], value
    elif option not in RENAMED and option not in OTHERS:
        yield option, value


def _without_kl_in_reward(given: Mapping[str, object]) -> Mapping[str, object]:
    """Return the options without slime's `kl_coef`, which must be 0. `kl_coef` is assumed to be slime's if any other
    option is slime's."""
    slimes = sorted(SLIMES & given.keys())
    if not slimes or "kl_coef" not in given:
        return given
    if given["kl_coef"]:
        raise bad_config(
            f"bombus.trainer.kl_coef = {given['kl_coef']} is refused alongside slime's {slimes[0]}: slime's kl_coef "
            "subtracts the KL from the reward, which bombus does not do; give kl_loss_coef for a KL in the loss"
        )
    return {option: value for option, value in given.items() if option != "kl_coef"}


def _put_correction(found: dict[str, tuple[object, str]], given: Mapping[str, object]) -> None:
    """Set the correction that `use_tis`, `tis_level` and `tis_mode` together select.

    Truncation ignores `tis_lower_bound`. In the other modes, the lower bound defaults to 1 / the upper bound.
    """
    options = [option for option in TIS if given.get(option) is not None]
    if not options:
        return
    if "use_tis" in options and not _switch("use_tis", given["use_tis"]):
        _put(found, "correction", "none", "use_tis")
        return
    by_mode = CORRECTIONS[_one_of("tis_level", given.get("tis_level"), CORRECTIONS, "token")]
    mode = _one_of("tis_mode", given.get("tis_mode"), by_mode, "truncate")
    _put(found, "correction", by_mode[mode], options[0])
    if mode == "truncate":
        if found.get("tis_clip_low", (0, ""))[1] == "tis_lower_bound":
            del found["tis_clip_low"]
    elif "tis_clip_low" not in found:
        upper, option = found.get("tis_clip", (TrainerConfig.model_fields["tis_clip"].default, options[0]))
        if isinstance(upper, float | int) and upper > 0:
            found["tis_clip_low"] = (1 / upper, option)


def _one_of(option: str, value: object, names: Mapping[str, object], default: str) -> str:
    if value is None:
        return default
    if not isinstance(value, str) or value not in names:
        raise bad_config(f"bombus.trainer.{option} = {value!r} is refused: it must be one of {', '.join(names)}")
    return value


def _switch(option: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise bad_config(f"bombus.trainer.{option} = {value!r} is refused: it must be true or false")
    return value
