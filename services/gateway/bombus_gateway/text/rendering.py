"""Chooses a model's renderer: our own for ChatML, the `renderers` library's for the models that it knows."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from bombus.errors import EngineFault
from bombus_gateway.text.chatml import ChatML, is_chatml
from bombus_gateway.text.message import ChatMessage
from bombus_gateway.text.tokenizer import Tokenizer
from bombus_gateway.text.tool_calls import Delta

log = logging.getLogger(__name__)

CONTEXT_TOKENS_DEFAULT = 1 << 20


class DeltaReader(Protocol):
    """Reads one completion while it is generated, and returns its deltas."""

    def feed(self, text: str, tokens: list[int]) -> list[Delta]:
        """`text` is the new text, `tokens` are the new ids."""
        ...

    def finish(self) -> list[Delta]: ...


class Renderer(Protocol):
    """Turns messages into token ids, and sampled tokens back into deltas.

    `extend` returns only the tokens after `history` (int32), whose last completion begins at `completion_at`, or None
    when the model's template would change earlier tokens. `reader` makes a reader of what is sampled after `prompt`
    (int32); it looks for tool calls when it is given tools.
    """

    stop_token_ids: tuple[int, ...]

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> list[int]: ...

    def extend(
        self,
        history: bytes,
        completion_at: int,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
    ) -> list[int] | None: ...

    def reader(self, prompt: bytes, tools: Sequence[Mapping[str, Any]], stops: Sequence[str]) -> DeltaReader: ...


class TextModel:
    """A model's tokenizer and renderer. `context_tokens` is the longest sequence that the model can take."""

    def __init__(self, files: Mapping[str, bytes], name: str) -> None:
        """Load from the files of the model's folder; `name` is the job's name for it.

        Raises `EngineFault` when the tokenizer cannot be used, or no renderer fits.
        """
        self.tokenizer = Tokenizer(files)
        self.renderer = choose_renderer(self.tokenizer, name)
        limit = self.tokenizer.model_config.get("max_position_embeddings")
        self.context_tokens = limit if isinstance(limit, int) and limit > 0 else CONTEXT_TOKENS_DEFAULT


def choose_renderer(tokenizer: Tokenizer, name: str) -> Renderer:
    """Return the renderer that gives the tokens of the model's own template. Raises `EngineFault` without one."""
    if is_chatml(tokenizer):
        return ChatML(tokenizer)
    from bombus_gateway.text.library import library_renderer  # the library takes a while to import

    found = library_renderer(tokenizer, name)
    if found is None:
        raise EngineFault(
            f"no renderer fits {name!r}: its chat template is not plain ChatML, and the renderers library does not "
            "list the model; call it by its name on the hub, or train it with a ChatML template"
        )
    log.info("the model is rendered by the renderers library", extra={"model": name, "renderer": found.name})
    return found
