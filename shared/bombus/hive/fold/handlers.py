"""The table of handlers, one for each kind of event, and functions that several handlers use."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from bombus.hive.bounded import trim
from bombus.hive.events import Event
from bombus.hive.fold import operations
from bombus.hive.state import COMMANDS_KEPT, EngineState, Phase

EventT = TypeVar("EventT", bound=Event)
Handler: TypeAlias = Callable[[EngineState, EventT], None]


class Handlers(dict[type[Event], Callable[[EngineState, Any], None]]):
    """Maps each kind of event to the function that folds it into the state of the event's engine."""

    def on(self, kind: type[EventT]) -> Callable[[Handler[EventT]], Handler[EventT]]:
        """Decorate the function that folds the events of a kind."""

        def register(handler: Handler[EventT]) -> Handler[EventT]:
            self[kind] = handler
            return handler

        return register


def enter(engine: EngineState, phase: Phase, at_ns: int) -> None:
    """Enter a phase."""
    engine.phase = phase
    engine.phase_since_ns = at_ns


def remember(engine: EngineState, command: str) -> None:
    """Record that a command was carried out in this run."""
    if command:
        engine.commands[command] = engine.run
        trim(engine.commands, COMMANDS_KEPT)


def release_replicas(engine: EngineState) -> None:
    """Allow quarantined replicas to serve again."""
    for replica in engine.replicas.values():
        replica.quarantined = None


def forget_lost(engine: EngineState) -> None:
    """Reset the count of trainers lost in a row."""
    if engine.trainers_lost:
        operations.forget_lost(engine.clients)
    engine.trainers_lost = 0


def keep_time(engine: EngineState, at_ns: int) -> None:
    """Start or stop the stopwatch `trying`, which runs while there is a trainer that could rebuild suspended models."""
    rests = engine.suspended or engine.rest_wanted or engine.asleep
    engine.clients.trying.run(engine.serves_operations and engine.trainer != "" and not rests, at_ns)
