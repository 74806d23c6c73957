"""What harnesses do to their conversations: the moves of the wire contract, each with what it may cost."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from tests.histories import entries
from tests.histories.entries import Entry
from tests.histories.harness import Harness, Line

FAR = 177  # answers, which is how far a harness was seen to go back


async def turn(harness: Harness, line: Line) -> None:
    """Go on as usual."""
    line.go_on()
    harness.tell(line, "asks")
    await harness.ask(line)


async def rewind(harness: Harness, line: Line, back: int = 0) -> None:
    """Go back to some earlier answer and on from there, or ask again for it."""
    places = line.answers
    back = back or line.chance.choice((1, 2, 3, FAR))
    at = places[max(0, len(places) - back)]
    again = line.chance.random() < 0.4
    harness.tell(
        line, f"rewinds by {min(back, len(places))} answers{' and asks for the last anew' if again else ''}", 1
    )
    line.entries = line.entries[: at if again else at + 1]
    if not again:
        line.go_on()
    await harness.ask(line)


async def compact(harness: Harness, line: Line) -> None:
    """Let the history be summarised, by an auxiliary call or by an ordinary one, and go on with the summary."""
    if line.waits_for_results:
        line.go_on()
    side = next((each for each in harness.dialect.auxiliary_calls if each.purpose == "compaction"), None)
    if side is not None and line.chance.random() < 0.7:
        harness.tell(line, "compacts by an auxiliary call", 2)
        summary = await harness.aside(line, side)
    else:
        harness.tell(line, "compacts by an ordinary call", 2)
        ask = (entries.system("Summarize what follows."), entries.user(line.words(5, 9)))
        summary = await harness.send(Line(line.name, line.chance, ask, ()), ask)
    kept = _last_turn(line) if line.chance.random() < 0.6 else ()
    head = line.entries[:1] if line.entries[0].kind == "system" else ()
    text = summary.text if summary is not None else ""
    line.entries = (*head, entries.user(f"The conversation until now: {text} {line.words()}"), *kept)
    if kept:
        line.go_on()
    await harness.ask(line)


def _last_turn(line: Line) -> tuple[Entry, ...]:
    """Return the last answer with what comes after it, which a compaction keeps word for word."""
    return line.entries[line.answers[-1] :]


async def delegate(harness: Harness, line: Line) -> None:
    """Begin a sub-agent, which works at the same time as the agent itself."""
    sub = harness.new_line(f"{line.name}.{len(harness.lines)}")
    harness.lines.append(sub)
    harness.tell(line, f"begins {sub.name}", 1)
    line.go_on()
    await _at_once(harness, [line, sub])


async def swarm(harness: Harness, line: Line) -> None:
    """Begin sub-agents that all ask the same, at once or one after another."""
    first = harness.new_line(f"{line.name}.{len(harness.lines)}")
    twins = [first, *(harness.new_line(f"{first.name}{'abc'[n]}", first) for n in range(line.chance.randint(1, 3)))]
    harness.tell(line, f"begins {len(twins)} sub-agents like {first.name}", len(twins))
    harness.lines += twins
    if line.chance.random() < 0.5:
        await _at_once(harness, twins)
    else:
        for each in twins:
            await harness.ask(each)


async def auxiliary_call(harness: Harness, line: Line) -> None:
    """Make a call on the harness's own account, such as for a title."""
    side = line.chance.choice(harness.dialect.auxiliary_calls)
    if side.appended and line.waits_for_results:
        line.go_on()
    harness.tell(line, f"makes an auxiliary call: {side.purpose}", 1 if side.appended else 0)
    await harness.aside(line, side)


async def inject(harness: Harness, line: Line) -> None:
    """Put a reminder into an earlier message, or move a time in it, and go on."""
    places = [at for at, entry in enumerate(line.entries) if entry.kind in ("system", "user", "results")]
    at = line.chance.choice(places)
    entry = line.entries[at]
    word = line.words()
    if entry.kind == "results":
        (id, text), *rest = entry.results
        changed = replace(entry, results=((id, f"{text}\n{word}"), *rest))
    else:
        changed = replace(entry, text=f"{entry.text}\n{word}")
    harness.tell(line, f"changes entry {at} of {len(line.entries)} ({entry.kind})", 1)
    line.entries = (*line.entries[:at], changed, *line.entries[at + 1 :])
    await turn(harness, line)


async def remind(harness: Harness, line: Line) -> None:
    """Ask with a reminder at the end that is gone in the next request."""
    line.go_on()
    last = line.entries[-1]
    harness.tell(line, "asks with a reminder that it takes back", 1)
    if last.kind == "user":
        shown = (*line.entries[:-1], replace(last, text=f"{last.text}\n{line.words()}"))
    else:
        shown = (*line.entries, entries.user(line.words()))
    await harness.ask(line, shown)


async def rewrite(harness: Harness, line: Line) -> None:
    """Replace an earlier answer by other words."""
    at = line.chance.choice(line.answers)
    harness.tell(line, f"replaces answer {at} of {len(line.entries)}", 1)
    after = line.entries[at + 1 :]
    if after and after[0].kind == "results":
        after = (entries.user(line.words()), *after[1:])
    line.entries = (*line.entries[:at], entries.own(line.words()), *after)
    await turn(harness, line)


async def clear(harness: Harness, line: Line) -> None:
    """Put one sentence in place of all results of tools but the last."""
    places = [at for at, entry in enumerate(line.entries) if entry.kind == "results"][:-1]
    harness.tell(line, f"clears {len(places)} results", 1)
    changed = list(line.entries)
    for at in places:
        changed[at] = replace(changed[at], results=tuple((id, "[cleared]") for id, _ in changed[at].results))
    line.entries = tuple(changed)
    await turn(harness, line)


async def refuse(harness: Harness, line: Line) -> None:
    """Leave the answer that comes out of the history, and say what was wrong with it."""
    line.go_on()
    harness.tell(line, "refuses an answer", 1)
    before = line.entries
    await harness.ask(line)
    line.entries = (*before, entries.user(f"Format error: {line.words()}"))
    await harness.ask(line)


async def other_tools(harness: Harness, line: Line) -> None:
    """Go on with another list of tools."""
    line.tools = (
        line.tools[:-1] if line.tools and line.chance.random() < 0.5 else (*line.tools, f"more{len(line.tools)}")
    )
    harness.tell(line, f"has the tools {', '.join(line.tools) or 'no tools'}", 1)
    await turn(harness, line)


async def respell(harness: Harness, line: Line) -> None:
    """Write the answers that stand where they were sampled back in another way than before."""
    harness.tell(line, "spells answers anew")
    changed = list(line.entries)
    for at in line.answers:
        if not harness.truth.stands(line.tools, line.entries, at):
            continue
        said = changed[at].said
        assert said is not None
        style = harness.style(line, said, own_ids=changed[at].style.own_ids)
        changed[at] = replace(changed[at], style=style)
    line.entries = tuple(changed)
    await turn(harness, line)


async def together(harness: Harness, line: Line) -> None:
    """Let all conversations go on at the same time."""
    lines = harness.lines[-4:]
    harness.tell(line, f"all of {', '.join(each.name for each in lines)} go on")
    for each in lines:
        if each.entries[-1].kind in ("answer", "own"):
            each.go_on()
    await _at_once(harness, lines)


async def _at_once(harness: Harness, lines: Sequence[Line]) -> None:
    harness.at_once = True
    await asyncio.gather(*(harness.ask(each) for each in lines))
    harness.at_once = False


class Weighed(NamedTuple):
    move: Callable[[Harness, Line], Awaitable[None]]
    weight: float
    may: Callable[[Harness, Line], bool] = lambda harness, line: True


def _answered(harness: Harness, line: Line) -> bool:
    return bool(line.answers)


MOVES = (
    Weighed(turn, 10),
    Weighed(rewind, 1.2, _answered),
    Weighed(compact, 0.8, _answered),
    Weighed(delegate, 1, lambda harness, line: len(harness.lines) < 5),
    Weighed(swarm, 0.5, lambda harness, line: len(harness.lines) < 4),
    Weighed(auxiliary_call, 1),
    Weighed(inject, 0.8, _answered),
    Weighed(remind, 0.6, _answered),
    Weighed(rewrite, 0.4, _answered),
    Weighed(clear, 0.4, lambda harness, line: sum(entry.kind == "results" for entry in line.entries) > 1),
    Weighed(refuse, 0.5, _answered),
    Weighed(other_tools, 0.3, lambda harness, line: bool(line.answers) and not line.stops),
    Weighed(respell, 1, _answered),
    Weighed(together, 1.5, lambda harness, line: len(harness.lines) > 1),
)


async def move(harness: Harness) -> None:
    """Make one move of one conversation."""
    line = harness.chance.choice(harness.lines)
    possible = [each for each in MOVES if each.may(harness, line)]
    (chosen,) = harness.chance.choices(possible, [each.weight for each in possible])
    await chosen.move(harness, line)
