"""Translates the amount of thinking that a client requests into variables of the model's chat template.

Templates use different names for these variables. Rendering shows which names a template reads: a variable that changes
nothing in the rendering is not used.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import msgspec

Variables = dict[str, bool | int | float | str]

NO_EFFORT = "none"
# For each effort, the values to try in this order: the effort itself, then the nearest others.
NEAREST = {
    "minimal": ("minimal", "low", "medium", "high"),
    "low": ("low", "minimal", "medium", "high"),
    "medium": ("medium", "high", "low"),
    "high": ("high", "max", "xhigh", "medium"),
    "xhigh": ("xhigh", "max", "high"),
    "max": ("max", "xhigh", "high"),
}
_COMMON = ("low", "medium", "high")  # tried with every template; others only if the template's source has the word
_BUDGET = "thinking_budget"  # in tokens
# The variables that turn thinking on and off, and their values for on and off.
_SWITCHES: dict[str, tuple[bool | int | str, bool | int | str]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "thinking_mode": ("enabled", "disabled"),
    _BUDGET: (-1, 0),
}
_EFFORTS = ("reasoning_effort", "thinking_effort", "reasoning_strength")
_OFF = (NO_EFFORT, "no_think")  # efforts that mean no thinking


class RequestedThinking(NamedTuple):
    """The thinking that a client requests, with the name of the request field that each part came from.

    `on` says whether the model should think; None leaves it at the model's default. `effort` is a key of `NEAREST`, and
    `usual` is the default effort. `budget` is in tokens. An empty effort or a budget of 0 means that none was
    requested. A part without a field name is silently ignored if the template has no variable for it.
    """

    on: bool | None = None
    effort: str = ""
    budget: int = 0
    usual: str = "medium"
    on_field: str = ""
    effort_field: str = ""
    budget_field: str = ""

    @property
    def field(self) -> str:
        """The first field name that is not empty, or an empty string."""
        return self.on_field or self.effort_field or self.budget_field


class ThinkingVariables(msgspec.Struct, frozen=True):
    """The variables of a chat template that control a model's thinking.

    `switches` maps variables to their values for on and off, `efforts` maps variables to the efforts that they accept,
    and `off` maps effort variables to the values that turn thinking off. `thinks` says whether the model thinks unless
    thinking is turned off.
    """

    switches: dict[str, tuple[bool | int | str, bool | int | str]] = {}
    efforts: dict[str, tuple[str, ...]] = {}
    off: Variables = {}
    thinks: bool = False

    def given(self, asked: RequestedThinking) -> tuple[Variables, list[str]]:
        """Return the variables for the requested thinking, and the fields for which the template has no variable."""
        variables: Variables = {}
        if asked.on is not None:
            variables = {name: values[not asked.on] for name, values in self.switches.items()}
        if asked.on is False and not variables:
            variables = dict(self.off)
        is_switched = bool(variables) or bool(self.off) or asked.on in (None, self.thinks)
        left_out = [] if is_switched else [asked.on_field]
        if asked.on is False:
            left_out += [asked.effort_field] if asked.effort not in ("", asked.usual) else []
            return variables, [field for field in left_out if field]
        efforts = self._nearest(asked.effort or (asked.usual if asked.on and self.off else ""))
        is_exact = all(value == asked.effort for value in efforts.values()) if efforts else asked.effort == asked.usual
        left_out += [asked.effort_field] if asked.effort and not is_exact else []
        budget: Variables = {_BUDGET: asked.budget} if asked.budget and _BUDGET in self.switches else {}
        left_out += [asked.budget_field] if asked.budget and not budget else []
        return variables | efforts | budget, [field for field in left_out if field]

    def _nearest(self, effort: str) -> Variables:
        return {
            name: next(value for value in NEAREST[effort] if value in taken)
            for name, taken in self.efforts.items()
            if effort and any(value in taken for value in NEAREST[effort])
        }


def find_thinking(
    render: Callable[[Mapping[str, Any]], str | None], names: Collection[str], words: Collection[str], thinks: bool
) -> ThinkingVariables:
    """Find the thinking variables of a template that looks up `names` and whose source contains `words`.

    `render` renders the start of a conversation with the given additional variables; it returns None if the template
    refuses them.
    """
    switches = {
        name: values
        for name, values in _SWITCHES.items()
        if name in names and None not in (shown := {render({name: value}) for value in values}) and len(shown) > 1
    }
    on = {name: values[0] for name, values in switches.items()}
    efforts: dict[str, tuple[str, ...]] = {}
    off: Variables = {}
    for name in (each for each in _EFFORTS if each in names):
        tried = {effort: render({**on, name: effort}) for effort in NEAREST if effort in (*_COMMON, *words)}
        taken = {effort: text for effort, text in tried.items() if text is not None}
        none = next((word for word in _OFF if word in words and _is_another(render({name: word}), taken)), "")
        if none:
            off[name] = none
        if none or len({render(on), *taken.values()}) > 1:
            efforts[name] = tuple(taken)
    return ThinkingVariables(switches, efforts, off, thinks)


def _is_another(text: str | None, taken: Mapping[str, str]) -> bool:
    """Return whether `text` was rendered and differs from the rendering for every effort in `taken`."""
    return text is not None and text not in taken.values()
