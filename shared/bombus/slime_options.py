"""Other servers' names of a trainer's options, slime's above all, read as our own."""

from collections.abc import Iterator, Mapping

from bombus.errors import Code, Refused

RENAMED = {
    "eps_clip_high": "clip_high",
    "eps_clip_c": "dual_clip",
    "kl_loss_coef": "kl_coef",
    "kl_loss_type": "kl_estimator",
    "sample_packing_sequence_len": "max_tokens_per_bin",  # xorl's
}
SWITCHES: dict[str, tuple[str, dict[bool, object]]] = {
    "use_tis": ("correction", {True: "token_tis", False: "none"}),
    "calculate_per_token_loss": ("loss_aggregation", {True: "token", False: "episode"}),
    "disable_grpo_std_normalization": ("normalise_by_std", {True: False, False: True}),
}
ESTIMATORS: dict[object, dict[str, object]] = {  # there an estimator may stand for a loss too
    "gspo": {"adv_estimator": "grpo", "loss": "gspo"},
    "cispo": {"adv_estimator": "grpo", "loss": "cispo"},
    "ppo": {"adv_estimator": "gae"},
}


def from_slime(given: Mapping[str, object]) -> dict[str, tuple[object, str]]:
    """Each of our fields with its value and the option that gave it. What is not slime's passes as it is.

    `eps_clip` is both bounds while the upper one is not given. `kl_loss_coef` counts only while `use_kl_loss` is not
    false. Raises `Refused(BAD_CONFIG)` when two options say the same thing, or a switch is neither true nor false.
    """
    found: dict[str, tuple[object, str]] = {}
    for option, value in given.items():
        for field, ours in _read(option, value):
            if field in found:
                names = f"bombus.trainer.{found[field][1]} and bombus.trainer.{option}"
                raise Refused(Code.BAD_CONFIG, f"{names} set the same thing: give only one of them")
            found[field] = (ours, option)
    if given.get("eps_clip") is not None and "clip_high" not in found:
        found["clip_high"] = (given["eps_clip"], "eps_clip")
    if "use_kl_loss" in given and not _switch("use_kl_loss", given["use_kl_loss"]):
        found.pop("kl_coef", None)
    return found


def _read(option: str, value: object) -> Iterator[tuple[str, object]]:
    if option in SWITCHES:
        field, meaning = SWITCHES[option]
        yield field, meaning[_switch(option, value)]
    elif option == "advantage_estimator":
        yield from (ESTIMATORS.get(value) or {"adv_estimator": value}).items()
    elif option == "eps_clip":
        yield "clip_low", value
    elif option in RENAMED and value is not None:  # none: slime's own way to say that it was not given
        yield RENAMED[option], value
    elif option not in RENAMED and option != "use_kl_loss":
        yield option, value


def _switch(option: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise Refused(Code.BAD_CONFIG, f"bombus.trainer.{option} = {value!r} is refused: it takes true or false")
    return value
