"""What of a model's text files is refused before anything runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from bombus.config.job import ModelConfig
from bombus.errors import EngineFault
from bombus.text.checking import check_text, with_chat_template

GOOD = "{% for message in messages %}{{ message.content }}{% endfor %}"
PARTS = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endfor %}"
)


def files(template: str | None = GOOD, **described: Any) -> dict[str, bytes]:
    words = json.loads(Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).to_str())
    made = {"tokenizer.json": json.dumps({**words, **described}).encode()}
    return made if template is None else {**made, "chat_template.jinja": template.encode()}


def model(**given: Any) -> ModelConfig:
    return ModelConfig(path="some/model", **given)


@pytest.mark.parametrize(
    "template",
    [
        GOOD,
        PARTS,
        "{% if messages | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}" + GOOD,
        "{{ bos_token }}{{ messages }}",
    ],
)
def test_a_template_that_shows_what_a_user_says_is_good(template: str) -> None:
    check_text(files(template), model())


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (None, "'some/model' has no chat template: set model.chat_template in the job to one, or to none for plain "),
        (" \n", "'some/model' has no chat template"),
        ("{% for message in messages %}", "the model's chat template cannot be compiled: Unexpected end of template"),
        ("{{ messages | shout }}", "the model's chat template cannot be compiled: No filter named 'shout'"),
        (
            "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
            "the model's chat template cannot be compiled: maximum recursion",
        ),
        ("{{ raise_exception('no') }}", "refuses even a single message of a user: no; set model.chat_template in the "),
        ("{{ 1 / 0 }}", "refuses even a single message of a user: ZeroDivisionError: division by zero"),
        ("{{ messages[1].content }}", "refuses even a single message of a user"),
        ("Hello", "drops what a user says; set model.chat_template in the job to another"),
    ],
)
def test_a_template_that_no_conversation_can_be_rendered_with_is_refused(template: str | None, why: str) -> None:
    with pytest.raises(EngineFault) as no:
        check_text(files(template), model())
    assert why in str(no.value)


@pytest.mark.parametrize(
    ("described", "why"),
    [
        (
            {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
            "a tokenizer with a decoder of type WordPiece",
        ),
        ({"model": {"type": "Unheard"}}, "tokenizer.json cannot be read"),
    ],
)
def test_a_tokenizer_that_a_gateway_cannot_read_is_refused(described: dict[str, Any], why: str) -> None:
    for chat_template in ("", "none"):
        with pytest.raises(EngineFault, match=why):
            check_text(files(**described), model(chat_template=chat_template))


def test_a_job_of_plain_completions_needs_no_template() -> None:
    for template in (None, "{{ broken"):
        check_text(files(template), model(chat_template="none"))


def test_the_jobs_template_and_variables_are_what_is_checked(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text(GOOD)
    for given in (GOOD, str(tmp_path / "mine.jinja")):
        check_text(with_chat_template(files("{{ broken"), given), model(chat_template=given))
    with pytest.raises(EngineFault, match="'nowhere' is neither a template nor a file here"):
        with_chat_template(files(), "nowhere")
    demanding = "{% if not tone %}{{ raise_exception('which tone?') }}{% endif %}" + GOOD
    check_text(files(demanding), model(chat_template_kwargs={"tone": "soft"}))
    with pytest.raises(EngineFault, match=r"which tone\?"):
        check_text(files(demanding), model())


def test_of_several_templates_the_default_one_is_taken() -> None:
    listed = [{"name": "rag", "template": "{{ broken"}, {"name": "default", "template": GOOD}]
    check_text({**files(None), "tokenizer_config.json": json.dumps({"chat_template": listed}).encode()}, model())
