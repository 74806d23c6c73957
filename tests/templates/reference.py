"""What transformers makes of a conversation: the expectation that our renderer is compared with.

- A conversation that the template renders: the ids of `apply_chat_template`.
- One on which the template raises: a refusal.
- One of which the template loses a part without a word: a refusal. A part is lost when the rendering stays the same
  although the tools, the text of a system, developer, user or tool message, or a call are others. The text of an
  assistant's turn, which some templates lose beside calls, may be refused and may be rendered: what a model wrote
  itself is not rendered again while its episode is one sequence.
- A developer's message, to a template that raises on it or loses it: a refusal, or the ids that it has as a system's.
- One with names of special tokens in its texts: ids that decode to the template's text, with no more special tokens
  than the same conversation has when harmless words stand in place of these names. Some names mean something to the
  template (`content.split('</think>')`), so that harmless words give another rendering. With these only the text is
  compared.
"""

import copy
import re
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple, Self

from bombus_gateway.text.message import ChatMessage
from tests.templates.conversations import Conversation
from tests.templates.families import Family
from tests.templates.template_text import Case, Refusal, TemplateText, template_text


class Ids(NamedTuple):
    """These ids; `or_refused` where a refusal is as good."""

    ids: list[int]
    or_refused: bool


class Safe(NamedTuple):
    """Any ids that decode to `text`. If `specials` is given, they must have exactly these special tokens."""

    text: str
    specials: Counter[int] | None
    or_refused: bool


Expected = Ids | Safe | Refusal


@cache
def _cases(texts: TemplateText, number: int, conversations: "Conversations", names: tuple[str, ...]) -> list[Case]:
    return texts.cases(conversations[number], names)


class Conversations(tuple[Conversation, ...]):
    """Conversations that are the same object wherever they are used."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Reference:
    """transformers' tokenizer of one family."""

    def __init__(self, family: Family) -> None:
        from transformers import PreTrainedTokenizerFast

        self.family = family
        self.fast = family.fast
        self.texts = template_text(family.template, family.bos, family.eos)
        self._theirs = PreTrainedTokenizerFast(tokenizer_object=family.fast, bos_token=family.bos, eos_token=family.eos)
        added = self.fast.get_added_tokens_decoder().items()
        self.special_ids = {index for index, token in added if token.special}

    def at(self, now: datetime) -> Self:
        """Return the same at another time: some templates write it."""
        made = copy.copy(self)
        made.texts = self.texts.at(now)
        return made

    def cases(self, conversations: Conversations) -> list[Case]:
        names = self.family.names
        return [
            each for number in range(len(conversations)) for each in _cases(self.texts, number, conversations, names)
        ]

    def ids(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Render a conversation to ids. Raises what the template raises."""
        return list(
            self._theirs.apply_chat_template(
                self.texts.form.apply(messages),
                tools=list(tools) or None,
                tokenize=True,
                add_generation_prompt=True,
                return_dict=False,
                chat_template=self.texts.template,
            )
        )

    def decoded(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, with the names of special ones."""
        return self.shown(str(self.fast.decode(list(ids), skip_special_tokens=False)))

    def shown(self, text: str) -> str:
        """Return a text as it is compared: without white space where the tokenizer does not keep all of it."""
        return text if self.family.exact_text else re.sub(r"[\s▁]", "", text)

    def specials_of(self, ids: Sequence[int]) -> Counter[int]:
        return Counter(index for index in ids if index in self.special_ids)

    def expected(self, case: Case) -> Expected:
        if case.refusal is not None:
            return case.refusal
        ids = self.ids(case.conversation.messages, case.conversation.tools)
        if not case.names:
            return Ids(ids, case.or_refused)
        if case.harmless is None:
            return Safe(self.decoded(ids), None, case.or_refused)
        specials = self.specials_of(self.ids(case.harmless.messages, case.harmless.tools))
        return Safe(self.decoded(ids), specials, case.or_refused)
