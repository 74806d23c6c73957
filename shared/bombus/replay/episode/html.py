"""An episode as one self-contained HTML page without scripts, fonts or network access. All text in it is escaped."""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import exp
from typing import Any

import msgspec

from bombus.replay.episode.style import EPISODE, FRAME
from bombus.replay.episode.text import branch_lines, extends, facts, outcome
from bombus.replay.episode.tree import EpisodeTranscript, Token, Turn, TurnReply

POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(transcript: EpisodeTranscript, where: str) -> str:
    """Return the whole document; `where` names the log that the episode was read from."""
    footer = f"<footer>bombus replay episode {_text(transcript.story.id)} · {_text(where)}</footer>"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(transcript.story.id)}</title>\n<style>{FRAME}{EPISODE}</style>\n</head>\n"
        '<body class="episode-frame">\n<main class="episode">\n'
        + f"{body(transcript)}\n{footer}\n</main>\n</body>\n</html>\n"
    )


def body(transcript: EpisodeTranscript) -> str:
    """Return the episode as part of a page whose style sheet has `EPISODE`.

    Each call's section says when the call began and ended, in seconds after the claim, as `data-began` and
    `data-ended`.
    """
    largest = max((abs(turn.advantage) for turn in transcript.turns if turn.advantage is not None), default=0.0)
    tokens = [token for turn in transcript.turns for reply in turn.replies for token in reply.tokens]
    widest = max((abs(token.difference) for token in tokens if token.difference is not None), default=0.0)
    scales = TokenScales(largest, widest, tuple(sorted({token.version for token in tokens if token.version >= 0})))
    parts = [
        _head(transcript, scales),
        *(_turn(turn, scales) for turn in transcript.turns),
        *(f'<p class="note">{_text(note)}</p>' for note in (*transcript.lost, *transcript.notes)),
    ]
    return "\n".join(parts)


class TokenScales(msgspec.Struct, frozen=True):
    """What tokens are coloured relative to: the largest advantage and difference of the episode, and its policy
    versions."""

    advantage: float
    difference: float
    versions: tuple[int, ...]


def _text(text: str) -> str:
    """Escape text, and spell out characters that would be invisible."""
    visible = "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)
    return escape(visible, quote=True)


def _head(transcript: EpisodeTranscript, scales: TokenScales) -> str:
    story = transcript.story
    rows = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts(story))
    lines = "".join(
        f"<dt>branch {number}</dt><dd>{' → '.join(_link(int(turn)) for turn in line.split(' -> '))}</dd>"
        for number, line in enumerate(branch_lines(transcript), 1)
    )
    why = transcript.no_differences
    unknown, because = (" disabled", f" ({_text(why)})") if why else ("", "")
    return f"""<header>
<h1>episode {_text(story.id)}</h1>
<p class="became">{_text(outcome(story))}</p>
<dl>{rows}{lines}</dl>
<fieldset>
<legend>tokens coloured by</legend>
<label><input type="radio" name="by" id="by-logprob" checked> how unlikely they were</label>
<label><input type="radio" name="by" id="by-difference"{unknown}> sampler and trainer differ{because}</label>
<label><input type="radio" name="by" id="by-advantage"> advantage</label>
<label><input type="radio" name="by" id="by-version"> policy version{_range_of(scales.versions)}</label>
<label><input type="radio" name="by" id="by-mask"> whether they are trained on</label>
<span class="key"><span class="t m">not trained</span> · point at a token for its figures</span>
</fieldset>
</header>"""


def _range_of(versions: Sequence[int]) -> str:
    if not versions:
        return ""
    return f" ({versions[0]})" if len(versions) == 1 else f" ({versions[0]} to {versions[-1]})"


def _link(number: int) -> str:
    return f'<a href="#call-{number}">call {number}</a>'


def _turn(turn: Turn, scales: TokenScales) -> str:
    facts = [
        _text(extends(turn)) if not turn.parent else f"extends {_link(turn.parent)}",
        f"{turn.prompt_tokens} prompt tokens, {turn.prompt_added} of them new",
        f"temperature {turn.sampling.temperature:g}",
        f"{turn.seconds:.2f} s",
    ]
    if turn.auxiliary_call:
        facts.insert(0, f"auxiliary call {_text(turn.auxiliary_call)}")
    if turn.role:
        facts.insert(0, f"role {_text(turn.role)}")
    if turn.untrained:
        facts.append(f"<em>not trained: {_text(turn.untrained)}</em>")
    elif turn.advantage is not None:
        facts.append(f'advantage <b class="{_sign(turn.advantage)}">{turn.advantage:+.4f}</b>')
    if turn.overridden:
        facts.append(f"overridden or left out: {_text(', '.join(turn.overridden))}")
    if turn.variables:
        facts.append(f"template variables {_text(json.dumps(turn.variables, ensure_ascii=False))}")
    tools = _tools(turn.tools)
    messages = "".join(_message(message) for message in turn.messages)
    shown = "" if turn.messages else " open"
    prompt = f"<details{shown}><summary>prompt tokens as text</summary><pre>{_text(turn.prompt)}</pre></details>"
    replies = "".join(_reply(reply, turn, scales) for reply in turn.replies)
    times = f'data-began="{turn.began_s:.3f}" data-ended="{turn.began_s + turn.seconds:.3f}"'
    return f"""<section id="call-{turn.number}" {times}>
<h2>call {turn.number} <code>{_text(turn.call)}</code></h2>
<p class="facts">{" · ".join(facts)}</p>
{tools}{messages}{prompt}{replies}
</section>"""


def _tools(tools: Iterable[Mapping[str, Any]]) -> str:
    names = [str(tool.get("function", tool).get("name", "?")) for tool in tools]
    if not names:
        return ""
    described = _text(json.dumps(list(tools), indent=2, ensure_ascii=False))
    return f"<details><summary>tools: {_text(', '.join(names))}</summary><pre>{described}</pre></details>"


def _message(message: Mapping[str, Any]) -> str:
    role = str(message.get("role", "?"))
    content = message.get("content")
    shown = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) if content else ""
    calls = "".join(_call(call.get("function", {})) for call in message.get("tool_calls") or ())
    body = f"<pre>{_text(shown)}</pre>" if shown or not calls else ""
    return f'<article class="message"><h3>{_text(role)}</h3>{body}{calls}</article>'


def _call(function: Mapping[str, Any]) -> str:
    name, arguments = str(function.get("name", "?")), str(function.get("arguments", ""))
    return f'<pre class="call">{_text(name)}({_text(arguments)})</pre>'


def _reply(reply: TurnReply, turn: Turn, scales: TokenScales) -> str:
    tokens = "".join(_token(token, turn.advantage, scales) for token in reply.tokens)
    calls = (reply.message or {}).get("tool_calls") or ()
    called = "".join(_call(call.get("function", {})) for call in calls)
    return (
        f'<article class="reply"><h3>assistant <small>{len(reply.tokens)} tokens, {_text(reply.finish)}</small></h3>'
        f'<pre class="tokens">{tokens}</pre>{called}</article>'
    )


def _token(token: Token, advantage: float | None, scales: TokenScales) -> str:
    """Return a token as a `<span>`.

    `--u` is how unlikely the token was, `--a` and `--d` are its advantage and difference relative to the largest in the
    episode, and `--v` is the place of its version among those in the episode, each from 0 to 1.
    """
    mine = advantage if token.trained else None
    version = token.version if token.version >= 0 else "-"
    figures = [f"token {token.id}", f"logprob {token.logprob:.4f} (p {exp(min(token.logprob, 0.0)):.3f})"]
    if token.difference is not None:
        figures.append(f"trainer's logprob {token.logprob + token.difference:.4f} ({token.difference:+.4f})")
    figures.append(f"version {version}")
    figures.append("not trained" if not token.trained else "trained" if mine is None else f"advantage {mine:+.4f}")
    share = abs(mine) / scales.advantage if mine is not None and scales.advantage else 0.0
    place = scales.versions.index(version) if isinstance(version, int) else 0
    kind = f"t {_sign(mine)}" if token.trained else "t m"
    shown = _text(token.text).replace("\n", "↵\n") or "∅"
    style = f"--u:{1 - exp(min(token.logprob, 0.0)):.3f};--a:{share:.3f}"
    if token.difference is not None and scales.difference:
        style += f";--d:{abs(token.difference) / scales.difference:.3f}"
    if len(scales.versions) > 1:
        style += f";--v:{place / (len(scales.versions) - 1):.3f}"
    return f'<span class="{kind}" style="{style}" title="{escape(" · ".join(figures))}">{shown}</span>'


def _sign(advantage: float | None) -> str:
    return "none" if not advantage else "up" if advantage > 0 else "down"
