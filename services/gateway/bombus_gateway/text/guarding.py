"""Renders conversations so that their texts cannot forge control tokens. A conversation for which this is uncertain is
refused."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from bombus.errors import Code, Refused
from bombus.text.chat_template import TemplateRefused
from bombus_gateway.text.control import ControlTokens, escaped, restored
from bombus_gateway.text.words import free_word, strings

TRIES = 32  # maximum number of renderings made to find the names that the template looks for
_TYPE = ("type",)
_FORGED = (
    "{} contains the name of a control token, {!r}, or part of it, which the model's chat template would turn into the "
    "token: remove it."
)

# Renders the messages and the tools, which are the last part.
RenderParts = Callable[[Sequence[Any]], str]
_Held = tuple[int, str]  # (index of a part, name of a control token in it)


class Rendered(msgspec.Struct, frozen=True):
    """A conversation as text. `placeholders` maps the names of control tokens in its messages to the characters that
    replace them.

    `suspect` is true if a text in the conversation may become a control token in another way. The conversation is then
    encoded with `guarded`.
    """

    text: str
    placeholders: dict[str, str]
    suspect: bool = False

    def plain(self) -> str:
        """Return the text as the template renders it, without placeholders."""
        return restored(self.text, self.placeholders)


class TextGuard:
    """Prevents the texts of conversations from forging one model's control tokens."""

    def __init__(self, control: ControlTokens, special_names: Collection[str]) -> None:
        self._control = control
        self._special_names = frozenset(special_names)

    def render(self, render: RenderParts, parts: Sequence[Any]) -> Rendered:
        """Render the messages and tools of a conversation. Raises `TemplateRefused` if the template refuses them, and
        `Refused` for a forgery.

        A template may look for the name of a control token in a message, as some do to find reasoning in it. Such a
        name is not replaced, since that would change the rendering. If a text becomes a control token because of this,
        or because the template changes texts, all names are replaced. If a text still becomes a control token, the
        conversation is refused.
        """
        plain = render(parts)
        suspects = [self._suspects(part) for part in parts]
        if not any(suspects):
            return Rendered(plain, {})
        held = self._held(parts)
        placeholders = self._control.placeholders({name for _, name in held}, (plain, *strings(parts)))
        trial = _Trial(self._control, render, parts, plain, placeholders)
        trial.settle(held)
        found = Rendered(trial.text, placeholders, suspect=True)
        # If two renderings of the same parts differ (because of a clock, say), a difference does not show that the
        # template looks for a name.
        steady = not trial.left or render(parts) == plain
        kept = {pair for pair in trial.left if steady and _is_assistants(parts[pair[0]])}
        allowed = self._allowed(render, parts, suspects, kept)
        if self._excess(found, allowed) is None:
            return found
        trial.replace_all(set(held) - kept)
        found = Rendered(trial.text, placeholders, suspect=True)
        excess = self._excess(found, allowed)
        if excess is not None:
            raise Refused(Code.MALFORMED, _FORGED.format(self._place(suspects, excess), excess))
        return found

    def _place(self, suspects: Sequence[set[str]], name: str) -> str:
        """Return the field of the request that contains a name or part of it: `tools` or `messages.N`."""
        holding = [i for i, texts in enumerate(suspects) if any(self._control.is_suspect_of(name, t) for t in texts)]
        index = next(iter(holding), next(i for i, texts in enumerate(suspects) if texts))
        return "tools" if index == len(suspects) - 1 else f"messages.{index}"

    def _held(self, parts: Sequence[Any]) -> list[_Held]:
        """Return the names in each part, sorted by name, with those in assistant messages last.

        Added tokens that are not special, such as `<think>`, are allowed in an assistant message, since models write
        them.
        """
        found = [(index, name) for index, part in enumerate(parts) for name in self._names(part)]
        return sorted(found, key=lambda pair: (_is_assistants(parts[pair[0]]), pair[1], pair[0]))

    def _names(self, part: Any) -> set[str]:
        found = set(self._control.find("\0".join(strings(part))))
        return found & self._special_names if _is_assistants(part) else found

    def _suspects(self, part: Any) -> set[str]:
        """Return the texts of a part that may become control tokens."""
        found = {text for text in set(_texts(part)) if self._control.is_suspect(text)}
        if found and _is_assistants(part):
            none = dict.fromkeys(self._own_names, "")  # some templates remove these
            return {text for text in found if self._control.is_suspect(self._control.replaced(text, none))}
        return found

    def _allowed(
        self, render: RenderParts, parts: Sequence[Any], suspects: Sequence[set[str]], left: Collection[_Held]
    ) -> Counter[int] | None:
        """Count the conversation's control tokens when its suspect texts are replaced by harmless words.

        The names that the template looks for in an assistant message are not replaced. Returns None if the template
        refuses the words.
        """
        word = free_word(strings(parts))
        # Use the same word for the same text everywhere, because templates look for the call that a result belongs to.
        word_of = {text: f"{word}{index}q" for index, text in enumerate(sorted(set().union(*suspects)))}
        harmless = []
        for index, (part, texts) in enumerate(zip(parts, suspects)):
            kept = {name for place, name in left if place == index}
            kept |= self._own_names if _is_assistants(part) else set()
            words = self._words({text: word_of[text] for text in texts}, kept, word) if texts else {}
            harmless.append(changed_part(part, _by_words(words)) if texts else part)
        try:
            return self._control.count(self._control.encode(render(harmless), {}))
        except TemplateRefused:
            return None

    def _words(self, word_of: Mapping[str, str], kept: Collection[str], word: str) -> dict[str, str]:
        """Return a replacement for each text: the first of three forms that is harmless.

        The first form is the text, with a word in place of each name that is not in `kept`. The second is the first
        form between two words. The third consists only of words, with the kept names between them. The first two keep
        the rest of the text, since the template may look for something in it, such as `/no_think`.
        """
        none = dict.fromkeys(kept, "")
        others = dict.fromkeys(self._control.names - frozenset(kept), word)
        found = {}
        for text, own in word_of.items():
            rest = self._control.replaced(text, others)
            forms = (rest, f"{own} {rest} {own}")
            harmless = (form for form in forms if not self._control.is_suspect(self._control.replaced(form, none)))
            found[text] = next(harmless, own.join(["", *(n for n in self._control.find(text) if n in kept), ""]))
        return found

    @property
    def _own_names(self) -> frozenset[str]:
        return self._control.names - self._special_names

    def _excess(self, found: Rendered, allowed: Counter[int] | None) -> str | None:
        """Return the name of a control token that occurs more often in the rendering than in `allowed`, or None."""
        if allowed is None:
            return next(iter(found.placeholders), "")
        count = self._control.count(self._control.encode(found.text, found.placeholders, guarded=found.suspect))
        excess = min(count - allowed, default=None)
        return None if excess is None else self._control.name_of(excess)


class _Trial:
    """Finds the names in a conversation that can be replaced without changing the rendering."""

    def __init__(
        self,
        control: ControlTokens,
        render: RenderParts,
        parts: Sequence[Any],
        plain: str,
        placeholders: Mapping[str, str],
    ) -> None:
        self._control, self._render, self._parts, self._placeholders = control, render, parts, placeholders
        self._plain = self.text = plain
        self._replaced: set[_Held] = set()
        self._tries = 0
        self.left: set[_Held] = set()

    def settle(self, pairs: Sequence[_Held]) -> None:
        """Replace the names that the template does not look for: all at once if possible, otherwise by bisection.

        If the bisection takes more than `TRIES` renderings, the remaining names are not replaced.
        """
        if not pairs:
            return
        if self._tries < TRIES and self._try(pairs):
            return
        if len(pairs) == 1 or self._tries >= TRIES:
            self.left.update(pairs)
            return
        middle = len(pairs) // 2
        self.settle(pairs[:middle])
        self.settle(pairs[middle:])

    def replace_all(self, pairs: Iterable[_Held]) -> None:
        """Replace names even if that changes the rendering."""
        self._replaced.update(pairs)
        text = self._rendered(self._replaced)
        self.text = self.text if text is None else text

    def _try(self, pairs: Sequence[_Held]) -> bool:
        self._tries += 1
        replaced = self._replaced.union(pairs)
        text = self._rendered(replaced)
        if text is None or not self._is_same(restored(text, self._placeholders)):
            return False
        self._replaced, self.text = replaced, text
        return True

    def _is_same(self, text: str) -> bool:
        """Return whether a text is the same as the rendering without placeholders, except perhaps for its order, since
        some templates sort names."""
        if text == self._plain:
            return True
        return len(text) == len(self._plain) and Counter(text) == Counter(self._plain)

    def _rendered(self, replaced: Collection[_Held]) -> str | None:
        names: dict[int, dict[str, str]] = {}
        for index, name in replaced:
            names.setdefault(index, {})[name] = self._placeholders[name]
        parts = [
            changed_part(part, partial(self._control.replaced, words=names[index])) if index in names else part
            for index, part in enumerate(self._parts)
        ]
        try:
            text = self._render(parts)
        except TemplateRefused:
            return None
        for character in self._placeholders.values() if "\\ud8" in text else ():
            text = text.replace(escaped(character), character)
        return text


def _texts(part: Any) -> Iterable[str]:
    """Return the texts of a part, except a message's role."""
    return strings({key: item for key, item in part.items() if key != "role"} if isinstance(part, dict) else part)


def _by_words(words: Mapping[str, str]) -> Callable[[str], str]:
    return lambda text: words.get(text, text)


def _is_assistants(part: Any) -> bool:
    return isinstance(part, Mapping) and part["role"] == "assistant"


def changed(value: Any, change: Callable[[str], str], kept: Collection[str] = ()) -> Any:
    """Apply `change` to all texts and keys of a JSON value, except those under the top-level keys `kept`."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            key if key in kept else change(str(key)): item if key in kept else changed(item, change)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [changed(item, change, kept) for item in value]
    return value


def changed_part(part: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to the texts in a message or in the list of tools, except for the few that templates compare.

    The exceptions are the role of the message, and the types of its content parts, calls and tools.
    """
    if not isinstance(part, Mapping):
        return changed(part, change, _TYPE)
    return {key: item if key == "role" else changed(item, change, _TYPE) for key, item in part.items()}
