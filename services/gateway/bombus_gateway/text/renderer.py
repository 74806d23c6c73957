"""Renders conversations with the model's own chat template, to the same token ids as transformers does."""

import copy
import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, Self

import msgspec

from bombus.errors import Code, Refused
from bombus.hive.records import pack_tokens, unpack_tokens
from bombus.text.chat_template import ChatTemplate, TemplateRefused
from bombus.text.sandbox import at_one_time
from bombus.text.tokenizer import Tokenizer
from bombus_gateway.text.control import ControlTokens
from bombus_gateway.text.deltas import DeltaReader, ReasoningDelta
from bombus_gateway.text.forms import SAMPLES, TOOL, WORD, find_form, user
from bombus_gateway.text.guarding import Rendered, TextGuard
from bombus_gateway.text.losses import LossCheck, NotRendered
from bombus_gateway.text.message import ChatMessage
from bombus_gateway.text.reading.call_text import CallText, calls_come_singly, find_call_text
from bombus_gateway.text.reading.finding import RenderText, find_reading
from bombus_gateway.text.reading.syntax import Thinking
from bombus_gateway.text.shortening import NO_OUTLINE, Dialogue, HistoryOutline, Keep, ToolsKept, find_kept, short
from bombus_gateway.text.stops import find_stops
from bombus_gateway.text.thinking import ThinkingVariables, find_thinking
from bombus_gateway.text.words import free_word, strings

log = logging.getLogger(__name__)

KEPT_MAX = 16  # the most sets of variables for which shortening conversations is tried
PROMPT_END_TOKENS = 64  # how many of a prompt's last tokens are checked for open reasoning
_VARIABLE = "chat_template_kwargs.{}: {!r} contains the name of a control token, or part of one: remove it."


class Probe(msgspec.Struct, frozen=True):
    """A conversation with unique words in place of the sampled texts.

    The first `count` messages are the history. All words begin with `word`; `last` is the word at the end of message
    `count`. `sampled` lists the texts that must be rendered after the prompt for that message. `unclosed` says whether
    that message ends within its reasoning.
    """

    messages: list[ChatMessage]
    count: int
    word: str
    last: str
    sampled: list[str]
    unclosed: bool = False

    def without_doubled_thoughts(self) -> "Probe":
        """Return the probe without the reasoning of earlier answers that have both text and calls.

        gpt-oss's template writes the text of such an answer as its reasoning, and refuses a message with both reasoning
        and text.
        """
        messages = [
            {key: value for key, value in message.items() if key != "reasoning_content"}
            if index < self.count - 1 and message.get("content") and message.get("tool_calls")
            else message
            for index, message in enumerate(self.messages)
        ]
        return msgspec.structs.replace(self, messages=messages)


class TemplateRenderer:
    """Renders the conversations of one model.

    `history` says what to do if the template drops sampled text, such as the reasoning of earlier turns: "template"
    begins a new branch, and "keep" keeps the sampled tokens in the sequence.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, history: str = "template") -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._history = history
        self._given = _named(template)
        self._kept: dict[str, ToolsKept] = {}  # by template variables; shared by all copies of this renderer
        self.form = find_form(template)
        self.reading = find_reading(self._text, self._switched())
        written = self._written()
        names = _control_names(tokenizer, written, self.reading.markers)
        self._control = ControlTokens(tokenizer.fast, names, tokenizer.unknown, template.remakers())
        self._guard = TextGuard(self._control, tokenizer.specials.values())
        self._losses = LossCheck(self._text, "\0".join([written, *strings(template.variables)]))
        self.stop_token_ids = find_stops(self._text, tokenizer)
        if not self.stop_token_ids:
            log.warning("the model has no token that ends a completion: each completion runs to its token limit")
        self.looked_for = template.looked_for()
        # Some model files name a stop token that the template never writes, such as a plain-text token. It is left out
        # here.
        self._stops = {stop: tokenizer.added[stop] for stop in self.stop_token_ids if stop in tokenizer.added}

    def given(self, variables: Mapping[str, Any]) -> Self:
        """Return this renderer with template variables added or changed.

        Three things stay as they were determined when the renderer was created: the form of messages, how completions
        are read, and the tokens that end completions. Raises `Refused` if the text of a variable contains the name of a
        control token.
        """
        if not variables:
            return self
        for name, value in variables.items():
            if self._control.is_suspect(str(value), inner=False):
                raise Refused(Code.MALFORMED, _VARIABLE.format(name, value))
        return self._with(variables)

    def undated(self) -> Self:
        """Return this renderer with each date replaced by its format, so that it renders the same every day."""
        return self._with({"strftime_now": str})

    def _with(self, variables: Mapping[str, Any]) -> Self:
        made = copy.copy(self)
        made._template = self._template.given(variables)
        made._given = _named(made._template)
        made._losses = self._losses.given(made._text, strings(variables))
        return made

    def _switched(self) -> Iterator[RenderText]:
        """Yield renderings in each of which one of the template's switches, which a request may set, is turned on or
        off."""
        for name in self._template.switches():
            for value in (True, False):
                made = copy.copy(self)
                made._template = self._template.given({name: value})
                yield made._text

    def _written(self) -> str:
        """Return the texts that the template can write, joined by NUL.

        These are the texts in the template's source, plus renderings of samples, since templates build some texts, such
        as `<|user|>`.
        """
        texts = [self._template.literals()]
        for turns in SAMPLES:
            try:
                texts.append(self._text(turns, [TOOL] if turns[-1]["role"] == "tool" else [], True))
            except TemplateRefused:
                continue
        return "\0".join(texts)

    # ---- prompts ----

    def adapted(self, messages: Sequence[ChatMessage], outline: HistoryOutline = NO_OUTLINE) -> Sequence[ChatMessage]:
        """Return the messages with only roles that the template knows: if it does not know the role `developer`, that
        role becomes `system`."""
        places = (*outline.others, *range(outline.known, len(messages)))
        if not self.form.developer_as_system or all(messages[at]["role"] != "developer" for at in places):
            return messages
        return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]

    @at_one_time
    def render(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], generate: bool = True
    ) -> list[int]:
        """Return a whole prompt, up to the start of the assistant's turn or, without `generate`, to the end of the last
        message.

        Raises `Refused` if the template refuses the conversation or silently drops part of it.
        """
        try:
            rendered = self._rendered(messages, tools, generate)
        except TemplateRefused as error:
            raise NotRendered(f"The model's chat template refuses this conversation: {error}") from error
        self._losses.refuse_losses(messages, tools, rendered.plain())
        return self._encode(rendered.text, rendered)

    def extend(
        self,
        history: bytes,
        completion_at: int,
        messages: Sequence[ChatMessage],
        count: int,
        tools: Sequence[Mapping[str, Any]],
    ) -> list[int] | None:
        """Return the tokens to append to `history` (int32: a prompt and its completion, as they were sampled).

        The first `count` messages are the history, and the last of these was sampled from token `completion_at` on. The
        returned tokens are what the template writes after that message. Returns None if the template renders the
        history differently once the new messages follow. Raises the same `Refused` errors as `render`.

        Some templates refuse a message with several calls, although their models sample such messages. Only the text
        after the sampled message is needed, so the messages are then rendered with only their last call.
        """
        shorter = self.shortened(messages, count, tools)
        tail = None if shorter is None else self.extend_by(history, completion_at, shorter)
        return self.extend_as_given(history, completion_at, messages, count, tools) if tail is None else tail

    def extend_by(self, history: bytes, completion_at: int, shorter: Dialogue) -> list[int] | None:
        """Return what `extend` returns, by rendering a conversation that was `shortened`. Return None if the whole
        conversation is needed."""
        try:
            return self.extend_as_given(history, completion_at, *shorter)
        except Refused:
            return None  # rendering the whole conversation raises the right error

    @at_one_time
    def extend_as_given(
        self,
        history: bytes,
        completion_at: int,
        messages: Sequence[ChatMessage],
        count: int,
        tools: Sequence[Mapping[str, Any]],
    ) -> list[int] | None:
        """Return what `extend` returns, by rendering the given messages without shortening them."""
        for given in _forms_of_calls(messages, count, self._losses.shows_calls):
            tail = self._extended(history, completion_at, given, count, tools)
            if tail is not None:
                return tail
        single = _with_last_calls(messages, count)
        if single is None or (self._losses.shows_calls and not self._is_refused(messages, tools)):
            return None
        return self.extend_as_given(history, completion_at, single, count, tools)

    def _extended(
        self,
        history: bytes,
        completion_at: int,
        messages: Sequence[ChatMessage],
        count: int,
        tools: Sequence[Mapping[str, Any]],
    ) -> list[int] | None:
        # Reasoning is searched for in the whole prompt. For anything else the prompt's end is enough, and copying the
        # whole prompt takes long.
        since = 0 if self.reading.reasoning else max(completion_at - PROMPT_END_TOKENS, 0)
        prompt, completion = history[4 * since : 4 * completion_at], unpack_tokens(history[4 * completion_at :])
        probe = self._probe(prompt, completion, messages, count, free_word(strings([messages, tools])))
        try:
            probe, rendered = self._rendered_probe(probe, tools)
            kept = self._history == "keep" or self._keeps(probe, tools, rendered)
        except TemplateRefused:
            return None  # rendering the whole conversation says why
        if rendered.text.count(probe.last) != 1 or not kept:
            return None
        self._losses.refuse_losses(probe.messages, tools, rendered.plain(), count)
        after = rendered.text.partition(probe.last)[2]
        if probe.word in after:
            return None  # the template writes the parts of the answer in a different order than the model did
        ended = completion[-1] if completion and completion[-1] in self.stop_token_ids else None
        if ended is not None and (
            ended not in self._stops or self._ends_later(probe, tools, after, self._stops[ended])
        ):
            return None
        return self._after_completion(after, ended, bool(messages[count - 1].get("tool_calls")), rendered)

    def _rendered_probe(self, probe: Probe, tools: Sequence[Mapping[str, Any]]) -> tuple[Probe, Rendered]:
        try:
            return probe, self._rendered(probe.messages, tools)
        except TemplateRefused:
            probe = probe.without_doubled_thoughts()
            return probe, self._rendered(probe.messages, tools)

    def _probe(
        self, prompt: bytes, completion: Sequence[int], messages: Sequence[ChatMessage], count: int, word: str
    ) -> Probe:
        """Return the messages with the sampled texts replaced by words that begin with `word`.

        These words occur in none of the texts, so they mark the sampled parts in the rendering.
        """
        content, last_word = f"{word}w", f"{word}q"
        text = self._tokenizer.decode(completion)
        reasoned = bool(self._reasoning_of(prompt, text))
        earlier = self._has_reasoning(prompt)
        probe = list(messages)
        for index, message in enumerate(messages[:count]):
            if message["role"] == "assistant":
                probe[index] = {key: value for key, value in message.items() if key != "reasoning_content"}
                if reasoned if index == count - 1 else earlier:
                    probe[index]["reasoning_content"] = f"{word}x{index}"
        last = probe[count - 1]
        calls = last.get("tool_calls")
        if calls:
            function = {**calls[-1]["function"], "arguments": json.dumps({"a": last_word})}
            last["tool_calls"] = [*calls[:-1], {**calls[-1], "function": function}]
            last["content"] = content if (last.get("content") or "").strip() else last.get("content")
        else:
            last["content"] = last_word
        sampled = [last["reasoning_content"]] if reasoned else []
        sampled += [content] if last.get("content") == content else []
        thinking = self.reading.thinking
        if thinking and thinking.open in text:
            sampled.append(thinking.open)  # even if the reasoning is empty
        return Probe(probe, count, word, last_word, sampled, self._is_unclosed(prompt, text))

    def shortened(
        self,
        messages: Sequence[ChatMessage],
        count: int,
        tools: Sequence[Mapping[str, Any]],
        outline: HistoryOutline = NO_OUTLINE,
    ) -> Dialogue | None:
        """Return a shorter conversation for which `extend` returns the same tokens, or None if there is none."""
        keep = self.kept.where(messages[count:])
        return None if keep is None else short(messages, count, tools, self.looked_for, keep, outline)

    @property
    def kept(self) -> ToolsKept:
        """The tools to keep in shortened conversations, given the current variables."""
        if not self.is_tried:
            self._kept[self._given] = find_kept(self._goes_on)
        return self._kept.get(self._given, ToolsKept())

    @property
    def decodes_history(self) -> bool:
        """Whether `extend` decodes the whole history to look for reasoning in it."""
        return bool(self.reading.reasoning) and self._thinking_tokens is None

    @property
    def is_tried(self) -> bool:
        """Whether `kept` returns immediately. Otherwise it first runs trials, which take up to a second."""
        return self._given in self._kept or len(self._kept) >= KEPT_MAX

    def _goes_on(self, trial: Dialogue, keep: Keep) -> bool:
        """Return whether shortening a trial leaves its continuation unchanged, or true if the template refuses the
        trial."""
        found = short(*trial, (), keep)
        assert found is not None
        whole = self._continuations(trial, trial)
        return not whole or whole == self._continuations(trial, found)

    def _continuations(self, trial: Dialogue, given: Dialogue) -> list[list[int] | None]:
        """Return the tokens that follow a trial's answer when `given` is rendered: first without a stop token after the
        answer, then with one.

        Returns an empty list if the template refuses the conversation.
        """
        messages, count, tools = trial
        try:
            prompt = self._encode(text := self._text(messages[: count - 1], tools, True), Rendered(text, {}))
            words = self._encode(WORD, Rendered(WORD, {}))
            answers = (words, [*words, *self.stop_token_ids[:1]])
            return [self.extend_as_given(pack_tokens([*prompt, *answer]), len(prompt), *given) for answer in answers]
        except (TemplateRefused, Refused):
            return []

    def _is_unclosed(self, prompt: bytes, text: str) -> bool:
        """Return whether the completion `text` ends within reasoning that it or its prompt (int32) opened."""
        thinking = self.reading.thinking
        if thinking is None:
            return False
        opened = thinking.open if self._end_of(prompt).rstrip().endswith(thinking.open) else ""
        whole = opened + text
        return whole.rfind(thinking.open) > whole.rfind(thinking.close)

    def _reasoning_of(self, prompt: bytes, completion: str) -> str:
        """Return the reasoning in the completion of a prompt (int32)."""
        return self._read_reasoning(self._end_of(prompt), completion) if self.reading.reasoning else ""

    def _read_reasoning(self, prompt_end: str, text: str) -> str:
        reader = self.reading.reader(prompt_end, ())
        deltas = [*reader.feed(text), *reader.finish()]
        return "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))

    def _has_reasoning(self, prompt: bytes) -> bool:
        """Return whether a prompt (int32) contains closed reasoning with more than white space in it."""
        if not self.reading.reasoning:
            return False
        thinking, decode = self.reading.thinking, self._tokenizer.decode
        if thinking is None:
            return bool(self._read_reasoning("", decode(unpack_tokens(prompt))).strip())
        if self._thinking_tokens is not None:  # decode only the parts that may be reasoning, each once
            decoded = cache(lambda tokens: decode(unpack_tokens(tokens)))
            parts: Iterable[str] = map(decoded, opened(prompt, *self._thinking_tokens))
        else:
            parts = decode(unpack_tokens(prompt)).split(thinking.open)[1:]
        closed = (part.partition(thinking.close) for part in parts)
        return any(close and reasoning.strip() for reasoning, close, _ in closed)

    @cached_property
    def _thinking_tokens(self) -> tuple[int, int] | None:
        """The tokens of the marks around reasoning, if each mark is a single token."""
        thinking, ids = self.reading.thinking, {name: token for token, name in self._tokenizer.added.items()}
        if thinking is None or thinking.open not in ids or thinking.close not in ids:
            return None
        return ids[thinking.open], ids[thinking.close]

    def _keeps(self, probe: Probe, tools: Sequence[Mapping[str, Any]], rendered: Rendered) -> bool:
        """Return whether the template both leaves the last completion's prompt unchanged and renders all sampled
        parts."""
        if probe.unclosed:
            return False  # the template would close the reasoning
        before = self._text(probe.messages[: probe.count - 1], tools, True)
        whole = rendered.plain()
        return whole.startswith(before) and all(text in whole[len(before) :] for text in probe.sampled)

    def _ends_later(self, probe: Probe, tools: Sequence[Mapping[str, Any]], after: str, end: str) -> bool:
        """Return whether the first occurrence in `after` of `end`, a stop token's name, is at the end of a later
        message."""
        between = after.partition(end)[0].rstrip()
        if end not in after or not between:
            return False
        try:
            alone = self._text(probe.messages[: probe.count], tools, False)
        except TemplateRefused:
            return False
        # Some templates end the last message of a conversation differently, so the next message must also be in
        # `between`.
        following = (probe.messages[probe.count].get("content") or "").strip()
        shown = following in between or json.dumps(following, ensure_ascii=False)[1:-1] in between
        return shown and not alone.rpartition(probe.last)[2].startswith(between)

    def _after_completion(self, after: str, ended: int | None, called: bool, rendered: Rendered) -> list[int] | None:
        """Encode the text that follows a completion. Return None if the template ends the completion differently.

        `after` is the text after the completion's last word, `ended` is the stop token that ended the completion, and
        `called` says whether the completion has calls.
        """
        names = self._stops
        if ended is not None and names[ended] in after:
            tokens = self._encode(after[after.index(names[ended]) :], rendered)
            return tokens[1:]
        if ended is not None and self._history != "keep":
            return None  # the template does not end such a message with this token
        places = sorted((place, stop) for stop, name in names.items() if (place := after.find(name)) >= 0)
        if ended is not None:
            place = places[0][0] + len(names[places[0][1]]) if places else 0
        elif called:
            if not places:
                return None
            place = places[0][0]
        else:
            place = 0
        # The text is encoded after a control token, since some tokenizers mark the beginning of a text, and this is not
        # a beginning.
        context = next(iter(names.values()), "")
        tokens = self._encode(context + after[place:], rendered)
        return tokens[1:] if context else tokens

    def _encode(self, text: str, rendered: Rendered) -> list[int]:
        """Encode a part of a rendered conversation."""
        return self._control.encode(text, rendered.placeholders, guarded=rendered.suspect)

    # ---- rendering ----

    def _text(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], generate: bool) -> str:
        return self._template.render(self.form.apply(messages), tools, generate)

    def _is_refused(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> bool:
        try:
            self._text(messages, tools, True)
        except TemplateRefused:
            return True
        return False

    def _rendered(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], generate: bool = True
    ) -> Rendered:
        """Render a conversation so that none of its texts can forge control tokens. Raises the same errors as
        `TextGuard.render`."""

        def render(parts: Sequence[Any]) -> str:
            return self._template.render(parts[:-1], parts[-1], generate)

        return self._guard.render(render, [*self.form.apply(messages), list(tools)])

    # ---- completions ----

    def reader(self, prompt: bytes, tools: Sequence[Mapping[str, Any]]) -> DeltaReader:
        """Return a reader of the completion of a prompt (int32)."""
        end = self._end_of(prompt) if self.reading.begins_in_prompt else ""
        return self.reading.reader(end, tools)

    @cached_property
    def thinking(self) -> ThinkingVariables:
        """The template variables that control how much the model thinks."""

        def beginning(variables: Mapping[str, Any]) -> str | None:
            try:
                return self._with(variables)._text([user(WORD)], [], True)
            except TemplateRefused:
                return None

        template = self._template
        return find_thinking(beginning, template.looked_up(), template.words(), bool(self.reading.reasoning))

    @cached_property
    def call_text(self) -> CallText | None:
        """How the model's calls are written, or None if they are not JSON."""
        return find_call_text(self._text, self.reading, [*self._stops.values()])

    @cached_property
    def calls_come_singly(self) -> bool:
        """Whether each call can be read before the next one begins."""
        return calls_come_singly(self._text, self.reading)

    def reasoning_after(self, prompt: bytes) -> Thinking | None:
        """Return the marks of the reasoning with which the completion of a prompt (int32) may begin.

        Return None if the completion cannot begin with reasoning. `open` is empty if the prompt ends with the opening
        mark.
        """
        thinking, end = self.reading.thinking, self._end_of(prompt).rstrip()
        if thinking is None or end.endswith(thinking.close):
            return None
        return Thinking("", thinking.close) if end.endswith(thinking.open) else thinking

    def _end_of(self, prompt: bytes) -> str:
        """Return the text of the last tokens of a prompt (int32)."""
        return self._tokenizer.decode(unpack_tokens(prompt[-4 * PROMPT_END_TOKENS :]), with_specials=True)


def _named(template: ChatTemplate) -> str:
    """Return a text that names a template's variables."""
    return repr(sorted(template.variables.items()))


def opened(tokens: bytes, opening: int, closing: int) -> Iterator[bytes]:
    """Yield the tokens (int32) after each opening token, up to and including the first closing token.

    If another opening token comes first, the tokens end before that one. They then include any closing mark that was
    spelled out as text.
    """
    start, end = pack_tokens([opening]), pack_tokens([closing])
    at = _place(tokens, start, 0, len(tokens))
    while at < len(tokens):
        following = _place(tokens, start, at + 4, len(tokens))
        yield tokens[at + 4 : min(_place(tokens, end, at + 4, following) + 4, following)]
        at = following


def _place(tokens: bytes, token: bytes, since: int, until: int) -> int:
    """Return the byte offset of a token in `tokens` (int32) between two byte offsets, or `until` if it is not there."""
    at = tokens.find(token, since, until)
    while at % 4 and at >= 0:
        at = tokens.find(token, at + 1, until)
    return until if at < 0 else at


def _control_names(tokenizer: Tokenizer, written: str, markers: Collection[str]) -> set[str]:
    """Return the names of control tokens: all special tokens, and added tokens that the template or the markers
    contain.

    Added tokens that are white space or alphanumeric words are control tokens only if they are special. A special token
    of a single character does not count, since ordinary text contains it: one tokenizer uses the full stop for unknown
    text.
    """
    known = {name for name in tokenizer.added.values() if name in written or name in markers}
    added = {name for name in known if not name.isspace() and not name.isalnum()}
    return added | {name for name in tokenizer.specials.values() if len(name) > 1}


def _forms_of_calls(messages: Sequence[ChatMessage], count: int, shows_calls: bool) -> Iterator[Sequence[ChatMessage]]:
    """Yield the messages as they are, and then, if message `count` has calls, with empty text in that message.

    Some templates end a turn of calls only if its content is empty text. Others drop calls that have text next to them
    (`shows_calls` is false). With the latter, what the template writes after calls alone is also used after sampled
    text and calls.
    """
    yield messages
    last = messages[count - 1]
    if last.get("tool_calls") and (last.get("content") is None or (last["content"] and not shows_calls)):
        yield [*messages[: count - 1], {**last, "content": ""}, *messages[count:]]


def _with_last_calls(messages: Sequence[ChatMessage], count: int) -> list[ChatMessage] | None:
    """Return the messages, with only the last call in each of the first `count`. Return None if each of those already
    has at most one call."""
    if all(len(message.get("tool_calls") or ()) < 2 for message in messages[:count]):
        return None
    return [
        {**message, "tool_calls": message["tool_calls"][-1:]}
        if index < count and message.get("tool_calls")
        else message
        for index, message in enumerate(messages)
    ]
