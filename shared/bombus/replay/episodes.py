"""`bombus replay episodes`: the ended episodes of a log, one per line, sorted by reward, tokens or time."""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import aclosing
from heapq import nsmallest
from operator import itemgetter

from bombus.hive.events import EpisodeEnded, EpisodeType, Outcome
from bombus.replay.opening import add_source_arguments
from bombus.replay.running import BadUsage, run_on_source
from bombus.replay.source import Source
from bombus.terminal import complain, escaped, json_escaped, say

SORTED_BY: dict[str, Callable[[Outcome], float]] = {
    "reward": lambda outcome: outcome.reward,
    "tokens": lambda outcome: outcome.completion_tokens,
    "time": lambda _: 0.0,
}
SHOWN = 20
METRICS_SHOWN = 4  # number of metrics per episode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_arguments(parser)
    parser.add_argument("--engine", default="", metavar="NAME", help="only episodes of this engine")
    parser.add_argument("--task", default="", metavar="ID", help="only episodes of this task")
    parser.add_argument("--held-out", action="store_true", help="evaluation episodes instead of training episodes")
    parser.add_argument(
        "--sort",
        choices=SORTED_BY,
        default="time",
        help="which come first: the lowest reward, the fewest sampled tokens, or the oldest (default: time)",
    )
    parser.add_argument("--reverse", action="store_true", help="begin with the highest or newest instead")
    parser.add_argument(
        "--limit", type=int, default=SHOWN, metavar="N", help=f"print at most N episodes (default: {SHOWN})"
    )
    parser.add_argument("--json", action="store_true", help="print each episode in full, as one JSON object per line")


def run(arguments: argparse.Namespace) -> int:
    return run_on_source("bombus replay episodes", _show, arguments)


async def _show(source: Source, arguments: argparse.Namespace) -> None:
    if arguments.limit < 1:
        raise BadUsage("--limit must be at least 1")
    found: list[tuple[float, int, Outcome, EpisodeEnded]] = []
    place = 0
    kind = EpisodeType.EVAL if arguments.held_out else EpisodeType.TRAIN
    sign = -1 if arguments.reverse else 1
    worth = SORTED_BY[arguments.sort]
    async with aclosing(source.events()) as entries:
        async for entry in entries:
            event = entry.event
            if not isinstance(event, EpisodeEnded) or event.type != kind or arguments.engine not in ("", event.engine):
                continue
            for outcome in event.outcomes:
                if arguments.task in ("", outcome.task):
                    place += sign
                    found.append((sign * worth(outcome), place, outcome, event))
            if len(found) > 2 * arguments.limit:
                found = nsmallest(arguments.limit, found, key=itemgetter(0, 1))
    for _, _, outcome, event in nsmallest(arguments.limit, found, key=itemgetter(0, 1)):
        say(json_escaped(_as_json(outcome, event)) if arguments.json else escaped(" ".join(_columns(outcome, event))))
    if not found:
        complain(f"bombus replay episodes: no such episode has ended in {source.title}")


def _columns(outcome: Outcome, event: EpisodeEnded) -> Iterator[str]:
    yield f"{outcome.episode:<16} reward {outcome.reward:>8.4g} {outcome.completion_tokens:>7} tokens"
    yield f"version {event.version}, task {outcome.task}"
    if outcome.is_success is not None:
        yield "(a success)" if outcome.is_success else "(no success)"
    for name, value in list(outcome.log_metrics.items())[:METRICS_SHOWN]:
        yield f"{name} {value:.4g}"


def _as_json(outcome: Outcome, event: EpisodeEnded) -> str:
    line = {
        "episode": outcome.episode,
        "engine": event.engine,
        "task": outcome.task,
        "client": event.client,
        "reward": outcome.reward,
        "is_success": outcome.is_success,
        "completion_tokens": outcome.completion_tokens,
        "version": event.version,
        "ended_ns": event.at_ns,
        "log_metrics": outcome.log_metrics,
        "metadata": outcome.metadata,
    }
    return json.dumps(line, ensure_ascii=False)
