"""An episode in a terminal. Colour is optional: everything that colour shows is also expressed in words."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from bombus.figures import duration, one_line, seconds_between
from bombus.replay.episode.story import EpisodeStory
from bombus.replay.episode.tree import EpisodeTranscript, Token, Turn, TurnReply
from bombus.replay.moments import clock, date

DIM, BOLD, GREEN, RED, RESET = "\x1b[2m", "\x1b[1m", "\x1b[32m", "\x1b[31m", "\x1b[0m"


def text(transcript: EpisodeTranscript, tokens_max: int, colour: bool) -> Iterator[str]:
    """Yield the lines to print. `tokens_max` is how many tokens of each reply are listed one by one."""
    paint = _Paint(colour)
    yield from head(transcript, paint)
    for turn in transcript.turns:
        yield ""
        yield from _turn(turn, tokens_max, paint)
    for line in (*transcript.lost, *transcript.notes):
        yield ""
        yield f"note: {one_line(line)}"


class _Paint:
    def __init__(self, colour: bool) -> None:
        self._colour = colour

    def __call__(self, code: str, text: str) -> str:
        return f"{code}{text}{RESET}" if self._colour else text


def outcome(story: EpisodeStory) -> str:
    """Return a clause that says how an episode ended."""
    if story.aborted is not None:
        detail = f" ({story.aborted.detail})" if story.aborted.detail else ""
        return f"aborted: {story.aborted.reason}{detail}"
    if story.outcome is None:
        return "still open at the end of the log"
    success = {None: "", True: ", a success", False: ", no success"}[story.outcome.is_success]
    return f"ended with reward {story.outcome.reward:g}{success}; {story.fate}"


def facts(story: EpisodeStory) -> list[tuple[str, str]]:
    """Return everything about an episode except its calls, as (name, value) pairs."""
    claimed = f"{date(story.claimed_ns)} {clock(story.claimed_ns)}"
    if story.over_ns:
        took = duration(seconds_between(story.claimed_ns, story.over_ns))
        claimed += f"; over {clock(story.over_ns)}, {took} later"
    rows = [
        ("task", story.task or "-"),
        ("client", story.client),
        (
            "engine",
            f"{story.engine}, run {story.run}, {story.type} episode, policy version {story.version} at the claim",
        ),
        ("claimed", claimed),
    ]
    if story.sampler is not None:
        rows.append(("sampler", story.sampler.checkpoint or "the base of the run"))
    if story.outcome is not None:
        rewards = story.outcome.call_rewards
        if rewards is not None:
            rows.append(("rewards", ", ".join(f"{reward:g}" for reward in rewards) + " (one for each call)"))
        for name, values in (("metadata", story.outcome.metadata), ("metrics", story.outcome.log_metrics)):
            if values:
                rows.append((name, json.dumps(values, ensure_ascii=False)))
    if story.group is not None:
        others = ", ".join(f"{member.reward:g}" for member in story.group.episodes if member.episode != story.id)
        rows.append(("group", f"{len(story.group.episodes)} episodes; rewards of the others: {others or '-'}"))
    return [(name, one_line(value)) for name, value in rows]


def branch_lines(transcript: EpisodeTranscript) -> list[str]:
    """Return a line with the turn numbers of each branch, or an empty list if there is only one branch."""
    branches = transcript.branches()
    if len(branches) < 2:
        return []
    return [" -> ".join(map(str, branch)) for branch in branches]


def head(transcript: EpisodeTranscript, paint: _Paint) -> Iterator[str]:
    story = transcript.story
    yield paint(BOLD, f"episode {one_line(story.id)}: {one_line(outcome(story))}")
    for name, value in facts(story):
        yield f"  {name:<9} {value}"
    yield f"  {'calls':<9} {len(transcript.turns)}"
    for number, line in enumerate(branch_lines(transcript), 1):
        yield f"  {'branch ' + str(number):<9} calls {line}"


def extends(turn: Turn) -> str:
    if not turn.parent:
        return "starts a branch"
    choice = f", reply {turn.parent_reply + 1}" if turn.parent_reply else ""
    return f"extends call {turn.parent}{choice}"


def _turn(turn: Turn, tokens_max: int, paint: _Paint) -> Iterator[str]:
    role = f", role {turn.role}" if turn.role else ""
    role += f", auxiliary call {turn.auxiliary_call}" if turn.auxiliary_call else ""
    yield paint(BOLD, f"call {turn.number}") + f"  {turn.call}{one_line(role)}"
    sampled = sum(len(reply.tokens) for reply in turn.replies)
    prompt = f"{turn.prompt_tokens} prompt tokens ({turn.prompt_added} of them new)"
    completion = f"{sampled} sampled at temperature {turn.sampling.temperature:g}"
    yield f"  {extends(turn)}; {prompt}, {completion}, {turn.seconds:.2f} s"
    if turn.untrained:
        yield paint(DIM, f"  not trained: {turn.untrained}")
    elif turn.advantage is not None:
        yield "  advantage " + paint(RED if turn.advantage < 0 else GREEN, f"{turn.advantage:+.4f}")
    if turn.overridden:
        yield f"  overridden or left out: {one_line(', '.join(turn.overridden))}"
    yield from _prompt(turn)
    for index, reply in enumerate(turn.replies):
        yield from _reply(reply, f"reply {index + 1}" if len(turn.replies) > 1 else "reply", tokens_max, turn, paint)


def _prompt(turn: Turn) -> Iterator[str]:
    if turn.variables:
        yield f"  variables {one_line(json.dumps(turn.variables, ensure_ascii=False))}"
    if any(turn.seen):
        for name, part in zip(("prompt", "added") if turn.seen[0] else ("", "prompt"), turn.seen):
            yield from _as_seen(name, part)
        return
    for tool in turn.tools:
        yield f"  tool      {one_line(_tool_name(tool))}"
    for message in turn.messages:
        yield from message_lines(message)
    if not turn.messages:
        yield f"  {'prompt':<9} {_quoted(turn.prompt)}"


def _as_seen(name: str, prompt: str) -> Iterator[str]:
    """Yield the lines of a prompt. Line breaks are shown as ↵, other invisible characters as escapes."""
    for line in prompt.splitlines(keepends=True):
        shown = "".join(char if char.isprintable() else "↵" if char == "\n" else repr(char)[1:-1] for char in line)
        yield f"  {name:<9} {shown}"
        name = ""


def message_lines(message: Mapping[str, Any], name: str = "") -> Iterator[str]:
    """Yield a message as its role (or `name`) and its text, with one line for each tool call."""
    role = name or one_line(str(message.get("role", "?")))
    content = message.get("content")
    if content or not message.get("tool_calls"):
        shown = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        first, *rest = shown.splitlines() or [""]
        yield f"  {role:<9} {one_line(first)}"
        for line in rest:
            yield f"  {'':<9} {one_line(line)}"
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        yield f"  {role:<9} calls {one_line(str(function.get('name')))}({one_line(str(function.get('arguments', '')))})"


def _tool_name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function", tool)
    return f"{function.get('name', '?')}: {function.get('description', '')}"


def _reply(reply: TurnReply, name: str, tokens_max: int, turn: Turn, paint: _Paint) -> Iterator[str]:
    if reply.message is not None:
        yield from message_lines(reply.message, name)
    else:
        yield f"  {name:<9} {_quoted(''.join(token.text for token in reply.tokens))}"
    if not tokens_max or not reply.tokens:
        return
    yield f"  {'':<9} {'token':>5}  mask    logprob  version  advantage  text   ({reply.finish})"
    for index, token in enumerate(reply.tokens[:tokens_max]):
        yield _token(index, token, turn, paint)
    if len(reply.tokens) > tokens_max:
        yield f"  {'':<9} and {len(reply.tokens) - tokens_max} more: --tokens {len(reply.tokens)}"


def _token(index: int, token: Token, turn: Turn, paint: _Paint) -> str:
    advantage = f"{turn.advantage:+9.4f}" if token.trained and turn.advantage is not None else f"{'-':>9}"
    version = token.version if token.version >= 0 else "-"
    figures = f"{index:>5}  {token.trained:>4}  {token.logprob:9.4f}  {version:>7}  {advantage}"
    line = f"  {'':<9} {figures}  {_quoted(token.text)}"
    return line if token.trained else paint(DIM, line)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=not text.isprintable())
