"""The digest of a model's prompts tells apart what would be rendered differently."""

import pytest

from bombus_gateway.text.prompt_digest import DIGITS, prompt_digest
from bombus_gateway.text.rendering import TextModel, TextOptions
from tests.gateway.openai_hive import FILES, TEMPLATE, TEXT

HERMES = TextOptions(tools="hermes")


def model_of(template: str = TEMPLATE, options: TextOptions = HERMES) -> TextModel:
    return TextModel({**FILES, "chat_template.jinja": template.encode()}, "any", options)


def test_the_same_files_and_options_have_the_same_digest_whatever_the_model_is_called() -> None:
    assert model_of().format == TEXT.format
    assert len(TEXT.format.template) == DIGITS


@pytest.mark.parametrize(
    "other",
    [
        model_of(TEMPLATE.replace("You are a bee", "You are a wasp")),
        model_of(options=TextOptions()),
        model_of(options=TextOptions(tools="hermes", history="keep")),
        model_of(options=TextOptions({"calm": True}, tools="hermes")),
        model_of(options=TextOptions(tools="hermes", chat=False)),
        TextModel({**FILES, "tokenizer.json": FILES["tokenizer.json"] + b"\n"}, "any", HERMES),
    ],
    ids=["template", "tools", "history", "variables", "no conversations", "tokenizer"],
)
def test_what_decides_prompts_is_in_it(other: TextModel) -> None:
    assert other.format.template != TEXT.format.template


def test_what_is_rendered_is_in_it_and_not_only_what_it_is_rendered_from() -> None:
    """Two versions of bombus read the same files, and may still render them differently."""
    same = prompt_digest(model_of().renderer, "the same sources")
    assert same == prompt_digest(TEXT.renderer, "the same sources")
    other = model_of(TEMPLATE.replace("You are a bee", "You are a wasp"))
    assert same != prompt_digest(other.renderer, "the same sources")


def test_it_is_the_same_on_another_day() -> None:
    dated = TEMPLATE + "{{ strftime_now('%d %B %Y, %H:%M:%S.%f') }}"
    assert model_of(dated).format == model_of(dated).format
    assert model_of(dated).format != model_of(dated.replace("%B", "%b")).format
