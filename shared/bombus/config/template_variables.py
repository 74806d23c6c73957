"""The variables that a job or a request may pass to a chat template."""

from collections.abc import Mapping

VARIABLES_MAX = 64
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# The variables that rendering itself passes to a template: no other variable may have one of these names.
GIVEN = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "raise_exception",
        "strftime_now",
        *SPECIAL_TOKENS,
    }
)


def problem_of(variables: Mapping[str, bool | int | float | str]) -> str:
    """Return a clause that says why these variables cannot be passed to a chat template, or "" if they can."""
    taken = sorted(GIVEN & variables.keys())
    if taken:
        return f"{taken[0]} is set by the renderer; leave it out"
    large = [name for name, value in variables.items() if isinstance(value, int) and not -(2**63) <= value < 2**63]
    if large:
        return f"{large[0]} is a whole number of more than 64 bits"
    if len(variables) > VARIABLES_MAX:
        return f"there are {len(variables)} variables, but the limit is {VARIABLES_MAX}"
    return ""
