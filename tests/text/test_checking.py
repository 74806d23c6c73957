"""What of a model's text files is refused before anything runs."""

import json
from pathlib import Path
from time import thread_time
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from bombus.config.job import ModelConfig
from bombus.errors import EngineFault
from bombus.text.chat_template import SWITCHES_MAX, ChatTemplate, TemplateRefused
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
        ("{{ raise_exception('no') }}", "refuses even a single user message: no; set model.chat_template in the "),
        ("{{ 1 / 0 }}", "refuses even a single user message: ZeroDivisionError: division by zero"),
        ("{{ messages[1].content }}", "refuses even a single user message"),
        ("Hello", "drops user messages; set model.chat_template in the job to another"),
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


# ---- markers ----

TURNS = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
CHATML = [{"id": 2 + index, "content": name} for index, name in enumerate(("<|im_start|>", "<|im_end|>"))]


def test_a_marker_around_texts_that_is_not_a_token_is_refused() -> None:
    check_text(files(TURNS, added_tokens=tokens(*CHATML)), model())
    with pytest.raises(EngineFault) as no:
        check_text(files(TURNS + "<|eot_id|>", added_tokens=tokens(*CHATML)), model())
    assert str(no.value) == (
        "the tokenizer of 'some/model' does not fit its chat template: the template writes '<|eot_id|>', which is not "
        "a token; correct the tokenizer's files, set model.tokenizer to the model's own, or set model.chat_template to "
        "a template that fits"
    )
    answers = TURNS + "{% if messages | length > 1 %}<|after|>{% endif %}"
    with pytest.raises(EngineFault, match=r"writes '<\|after\|>'"):
        check_text(files(answers, added_tokens=tokens(*CHATML)), model(tokenizer="another"))


@pytest.mark.parametrize(
    "more",
    [
        "{# an image is <|image|> #}",
        "{% if '<|think_on|>' in messages[0].content %}{% endif %}",
        "{% if messages[0].content.type == 'image' %}<|image|>{% endif %}",
        "{% for tool in tools or [] %}<|tool|>{{ tool }}{% endfor %}",
        "{% for call in messages[0].tool_calls or [] %}<｜tool▁calls▁begin｜>{{ call }}{% endfor %}",
        "{% if messages[0].role == 'root' %}{{ raise_exception('a <|root|> first') }}{% endif %}",
        "{% set nobody = '<|NONE|>' %}",
    ],
)
def test_a_marker_that_no_conversation_of_texts_shows_need_not_be_a_token(more: str) -> None:
    check_text(files(more + TURNS, added_tokens=tokens(*CHATML)), model())


def test_a_template_whose_markers_are_all_plain_text_fits_unless_they_are_those_of_chatml() -> None:
    zephyr = "{% for message in messages %}<|user|>{{ message.content }}{{ eos_token }}{% endfor %}"
    check_text(
        {
            **files(zephyr, added_tokens=tokens({"id": 2, "content": "<|end_of_text|>"})),
            "tokenizer_config.json": json.dumps({"eos_token": "<|end_of_text|>"}).encode(),
        },
        model(),
    )
    with pytest.raises(EngineFault, match=r"writes '<\|im_end\|>'"):
        check_text(files(TURNS), model())


def test_a_template_that_the_job_gives_may_write_markers_as_text() -> None:
    check_text(with_chat_template(files(), TURNS), model(chat_template=TURNS))


def tokens(*given: dict[str, Any]) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [{**flags, "special": True, **token} for token in given]


# ---- templates that take too much ----


@pytest.mark.parametrize(
    "expression",
    [
        "7 ** (10 ** 8)",
        "'a' * 10 ** 9",
        "1000000000 * [0]",
        "'%1000000000d' % 1",
        "'%*d' | format(1000000000, 1)",
        "'a' | center(1000000000)",
        "'a' | indent(1000000000, true)",
        "[1] | batch(1000000000, 0) | list",
        "5.5 | round(100000000, 'floor')",
        "messages | tojson(indent=1000000000)",
        "'a'.ljust(1000000000)",
    ],
)
def test_a_template_cannot_make_texts_or_numbers_of_any_size(expression: str) -> None:
    template = ChatTemplate("{{ " + expression + " }}", {})
    with pytest.raises(TemplateRefused):
        template.render([], (), True)


def test_a_template_may_repeat_and_format_in_measure() -> None:
    template = ChatTemplate("{{ '-' * 3 }}{{ '%03d' % 7 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ 3 * 4 }}{{ 'a' | center(3) }}", {})
    assert template.render([], (), True) == "---00710243" + "12 a "


LOOP, END = "{% for a in range(1000) %}", "{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        LOOP * 3 + END * 3,
        LOOP * 2 + "{% for b in messages[0].content %}x{% endfor %}" + END * 2,
        LOOP * 2 + "{% for b in range(9) | map('string') %}x{% endfor %}" + END * 2,
        "{% for a in [[1, 2]] recursive %}{% if loop.depth0 < 30 %}{{ loop([a, a]) }}{% endif %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(30) }}",
        "{% set ns = namespace(x='aa') %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for a in range(60) %}"
        "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}{% endfor %}",
        LOOP + "{{ messages[0].content * 1000 }}" + END,
        LOOP * 2 + "{{ ([messages] * 1000) | list | length }}" + END * 2,
        "{% set x = messages[0].content * 9000 %}" + LOOP * 2 + "{{ x.split('b') | length }}" + END * 2,
        "{% set x = messages[0].content * 9000 %}" + LOOP * 2 + "{{ x | upper | length }}" + END * 2,
        "{% set x = [1] * 9000 %}" + LOOP * 2 + "{{ x | sort | length }}" + END * 2,
        LOOP * 2 + "{{ messages | tojson | length }}" + END * 2,
    ],
)
def test_a_template_that_a_message_makes_take_for_ever_is_refused_and_the_process_goes_on(source: str) -> None:
    template = ChatTemplate("{% if 'bee' in messages[0].content %}" + source + "{% endif %}", {})
    long = {"role": "user", "content": "bee" * 1000}
    began_s = thread_time()
    with pytest.raises(TemplateRefused, match=r"steps; send fewer messages|longer than|more than \d+ characters"):
        template.render([long], (), True)
    assert thread_time() - began_s < 2.0
    assert template.render([{"role": "user", "content": "wasp"}], (), True) == ""


def test_a_template_may_look_at_all_messages_for_each_of_many() -> None:
    source = "{% for a in messages %}{% for b in messages[loop.index0:] %}{{ '' ~ b.role[:0] }}{% endfor %}{% endfor %}"
    assert ChatTemplate(source, {}).render([{"role": "user", "content": "a"}] * 300, (), True) == ""


@pytest.mark.parametrize(
    "source", ["{% break %}", "{% for a in b %}" * 25 + "{% endfor %}" * 25, "{{ " + "9" * 5000 + " }}"]
)
def test_a_template_that_python_cannot_compile_is_refused(source: str) -> None:
    with pytest.raises(EngineFault, match="cannot be compiled"):
        ChatTemplate(source, {})


def test_only_a_few_variables_may_turn_reasoning_on() -> None:
    many = "".join(f"{{{{ v{index} }}}}{{{{ thinking_{index} }}}}" for index in range(300))
    found = ChatTemplate(many, {}).switches()
    assert len(found) == SWITCHES_MAX
    assert all("think" in name for name in found)
    assert ChatTemplate("{{ enable_thinking }}{{ reasoning_effort }}{{ date }}", {}).switches() == [
        "enable_thinking",
        "reasoning_effort",
    ]
