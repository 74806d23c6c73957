"""Describes a plain class as an environment: its tools, its decorated methods, and its mistakes."""

import inspect
import math
from collections.abc import Callable, Iterator
from functools import partialmethod, singledispatchmethod
from numbers import Real
from typing import Any

import msgspec
from pydantic import BaseModel

from bombus.environments.plain.marks import MethodKind, MethodMark, mark_of
from bombus.environments.plain.tools import MethodTool, NoTool, tool_of
from bombus.errors import BombusError

NOT_TOOLS = frozenset({"reset", "close", "play", "gold", "state"})
NAMES = ("task", "transcript", "state")
NAMES_IN_PLAY = (*NAMES, "calls")
TOOLS_MAX = 128


class WrongClass(BombusError):
    """A class cannot be used as an environment. `problems` lists the reasons as sentences."""

    def __init__(self, name: str, problems: tuple[str, ...]) -> None:
        super().__init__(f"{name} cannot be used as an environment. " + " ".join(problems))
        self.problems = problems


class MarkedMethod(msgspec.Struct, frozen=True, kw_only=True):
    """A decorated method. `names` are its arguments' names."""

    name: str
    mark: MethodMark
    names: tuple[str, ...] = ()


class PlainClass(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a class that is an environment. A class with a `play` method has agents and no tools."""

    name: str
    tools: dict[str, MethodTool] = {}
    rewards: tuple[MarkedMethod, ...] = ()
    metrics: tuple[MarkedMethod, ...] = ()
    stops: tuple[MarkedMethod, ...] = ()
    success: MarkedMethod | None = None
    plays: bool = False
    has_reset: bool = True
    has_gold: bool = False
    tools_run_together: bool = False


def describe(kind: type, *, is_made: bool = False) -> PlainClass:
    """Describe a class as an environment. Raises `WrongClass` with all of the class's mistakes.

    `is_made` means that an instance already exists, so there is no check that the class can be instantiated.
    """
    if issubclass(kind, BaseModel):
        why = "It is a pydantic model, whose own methods would be tools: use a plain class that holds a model."
        raise WrongClass(kind.__name__, (why,))
    reading = _Reading(kind)
    found = reading.read()
    if not is_made:
        reading.check_making()
    if reading.problems:
        raise WrongClass(kind.__name__, tuple(reading.problems))
    return found


class _Reading:
    """Reads one class. `problems` collects its mistakes as sentences."""

    def __init__(self, kind: type) -> None:
        self.problems: list[str] = []
        self._kind = kind
        self._name = kind.__name__

    def read(self) -> PlainClass:
        self._check_lost()
        marked = {kind: list[MarkedMethod]() for kind in MethodKind}
        methods = dict(self._methods())
        plays = "play" in methods
        tools: dict[str, MethodTool] = {}
        for name, method in methods.items():
            mark = mark_of(method)
            if mark is None and (lost := self._mark_of_base(name)) is not None:
                self._say(
                    f"`{name}` overrides a method with @{lost.kind} and has no decorator itself: decorate it too, or "
                    "give it another name."
                )
            elif mark is not None:
                marked[mark.kind].append(self._marked(name, method, mark, plays))
            elif name not in NOT_TOOLS and not plays:
                self._add_tool(name, method, tools)
        self._check_shape(methods, plays, marked)
        if not isinstance(getattr(self._kind, "tools_run_together", False), bool):
            self._say("`tools_run_together` is neither True nor False: set it to one of them.")
        if len(tools) > TOOLS_MAX:
            self._say(f"It has {len(tools)} tools, but the limit is {TOOLS_MAX}: split it into several classes.")
        return PlainClass(
            name=self._name,
            tools=tools,
            rewards=tuple(marked[MethodKind.REWARD]),
            metrics=tuple(marked[MethodKind.METRIC]),
            stops=tuple(marked[MethodKind.STOP]),
            success=next(iter(marked[MethodKind.SUCCESS]), None),
            plays=plays,
            has_reset="reset" in methods,
            has_gold="gold" in methods,
            tools_run_together=bool(getattr(self._kind, "tools_run_together", False)),
        )

    def check_making(self) -> None:
        """Note a problem if the class cannot be instantiated without arguments."""
        if missing := sorted(getattr(self._kind, "__abstractmethods__", ())):
            self._say(f"It is abstract and cannot be instantiated: it does not define {', '.join(missing)}.")
        try:
            inspect.signature(self._kind).bind()
        except (TypeError, ValueError):
            self._say(
                f"It cannot be created without arguments: give them defaults, or pass `lambda: {self._name}(...)` "
                "instead of the class."
            )

    def _check_lost(self) -> None:
        """Note attributes that would be ignored silently: decorated attributes that are not public methods, and wrapped
        methods."""
        for name, found in self._attributes():
            is_method = inspect.isfunction(found)
            is_hidden = name.startswith("_")
            mark = next((mark for layer in _layers(found) if (mark := mark_of(layer)) is not None), None)
            if mark is not None and is_hidden:
                self._say(f"`{name}` has @{mark.kind} and begins with an underscore: give it a public name.")
            elif mark is not None and not is_method:
                self._say(f"`{name}` has @{mark.kind} and is a {type(found).__name__}: make it a plain method.")
            elif is_method and name == "state":
                self._say("`state` names the attribute that rewards take, and cannot be a tool: give it another name.")
            elif not is_hidden and not is_method and _is_wrapped(found):
                self._say(
                    f"`{name}` is a method wrapped in a {type(found).__name__}, so it is not a tool: remove the "
                    "wrapper, or begin its name with an underscore."
                )

    def _attributes(self) -> Iterator[tuple[str, object]]:
        """Yield the attributes of the class, in the order of their definition, inherited ones first."""
        for name in dict.fromkeys(name for each in reversed(self._kind.__mro__[:-1]) for name in vars(each)):
            yield name, inspect.getattr_static(self._kind, name)

    def _methods(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Yield the public methods, in the order of their definition, inherited ones first."""
        for name, found in self._attributes():
            if not name.startswith("_") and inspect.isfunction(found):
                yield name, found

    def _mark_of_base(self, name: str) -> MethodMark | None:
        """Return the mark of the method that a base class defines under this name, or None."""
        found = (mark_of(vars(base)[name]) for base in self._kind.__mro__[1:] if name in vars(base))
        return next((mark for mark in found if mark is not None), None)

    def _add_tool(self, name: str, method: Callable[..., Any], tools: dict[str, MethodTool]) -> None:
        try:
            tools[name] = tool_of(name, method)
        except NoTool as error:
            self._say(f"The tool `{name}`: {error}. A method that is not a tool begins with an underscore.")

    def _marked(self, name: str, method: Callable[..., Any], mark: MethodMark, plays: bool) -> MarkedMethod:
        names = tuple(list(inspect.signature(method).parameters)[1:])
        known = NAMES_IN_PLAY if plays and mark.kind != MethodKind.STOP else NAMES
        for each in names:
            if each not in known:
                self._say(
                    f"The {mark.kind} `{name}` takes `{each}`, which does not exist: its arguments must be among "
                    f"{_listed(known)}."
                )
        if mark.kind == MethodKind.REWARD:
            self._check_reward(name, mark, plays)
        return MarkedMethod(name=name, mark=mark, names=names)

    def _check_reward(self, name: str, mark: MethodMark, plays: bool) -> None:
        wrong = [each for each in ("weight", "low", "high") if not _is_finite(getattr(mark, each))]
        for each in wrong:
            self._say(f"The reward `{name}` has {each}={getattr(mark, each)!r}, which is not a finite number.")
        if not wrong and mark.low >= mark.high:
            self._say(f"The reward `{name}` has low={mark.low:g} and high={mark.high:g}: low must be less than high.")
        if mark.role and not plays:
            self._say(f"The reward `{name}` has the role {mark.role!r}, but only a class with `play` has roles.")

    def _check_shape(
        self,
        methods: dict[str, Callable[..., Any]],
        plays: bool,
        marked: dict[MethodKind, list[MarkedMethod]],
    ) -> None:
        if plays:
            self._check_play(methods["play"], bool(marked[MethodKind.STOP]))
        elif "reset" not in methods:
            self._say("It has no `reset(self, task)`, which returns the first message, or `play(self, task, agents)`.")
        for name, arguments in (("reset", ("task",)), ("close", ()), ("gold", ("task",))):
            if name in methods:
                self._check_parameters(name, methods[name], arguments)
        if not marked[MethodKind.REWARD]:
            self._say("It has no method with @reward, which says what an episode is worth.")
        if len(marked[MethodKind.SUCCESS]) > 1:
            self._say("It has several methods with @success: keep one.")
        for name in NOT_TOOLS & methods.keys():
            if mark_of(methods[name]) is not None:
                self._say(f"`{name}` has a special meaning and cannot be decorated: rename the method.")

    def _check_play(self, method: Callable[..., Any], has_stop: bool) -> None:
        self._check_parameters("play", method, ("task", "agents"))
        if not inspect.iscoroutinefunction(method):
            self._say("`play` is not `async def`, but it must `await` its agents.")
        if has_stop:
            self._say("It has `play`, which decides when to end, and a method with @stop, which would never be called.")

    def _check_parameters(self, name: str, method: Callable[..., Any], arguments: tuple[str, ...]) -> None:
        try:
            inspect.signature(method).bind(None, **dict.fromkeys(arguments))
        except TypeError:
            wanted = ", ".join(("self", *arguments))
            self._say(f"`{name}` cannot be called as `{name}({wanted})`: give it these arguments, by these names.")

    def _say(self, sentence: str) -> None:
        self.problems.append(sentence)


def _layers(found: object) -> Iterator[object]:
    """Yield a class's attribute, and the functions inside it, such as the function in a static method or a property."""
    yield found
    for name in ("__func__", "fget", "func", "__wrapped__"):
        if callable(layer := getattr(found, name, None)):
            yield layer


def _is_wrapped(found: object) -> bool:
    if isinstance(found, partialmethod | singledispatchmethod):
        return True
    is_known = isinstance(found, staticmethod | classmethod | type)
    return callable(found) and not is_known and inspect.isfunction(getattr(found, "__wrapped__", None))


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:-1]) + f" and {names[-1]}"
