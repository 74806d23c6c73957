"""The battery of `make test-templates` on templates of our own, which have the habits of those of many families."""

import pytest

from bombus.bus import Bus
from bombus_gateway.text.shortening import Keep, ToolsKept
from tests.templates.battery import Outcome, Subject, bridge, run, subject
from tests.templates.families import family
from tests.templates.long_conversations import differences
from tests.templates.playing import play

TURNS_OF_CHATML = "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
ASK_OF_CHATML = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

# ChatML, with a system message of its own where there is none.
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are a bee.<|im_end|>\n' }}{% endif %}"
    f"{{% for message in messages %}}{TURNS_OF_CHATML}{{% endfor %}}{ASK_OF_CHATML}"
)

# Headers, bos, the date, trimmed contents, tools in the system message, and one call at most.
HEADERS = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system, messages = messages[0].content | trim, messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + strftime_now('%d %b %Y') + '\n' + system }}
{%- for tool in tools or [] %}
    {{- '\n' + tool | tojson(indent=4) }}
{%- endfor %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length > 1 %}{{ raise_exception('One call at a time!') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
    {%- else %}
        {{- message.content | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""

# Turns that must alternate, the system message before the first user's text, no tools.
INSTRUCTIONS = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system, messages = messages[0].content + '\n\n', messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate!') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system if loop.first else '') + message.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""

# Reasoning is dropped before the last question, and looked for in contents; calls and tools in the Hermes form.
REASONING = """
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n' }}{% endif %}
    {%- for tool in tools %}{{- tool | tojson + '\n' }}{% endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set thought, text = message.reasoning_content or '', message.content %}
        {%- if '</think>' in text %}
            {%- set thought = text.split('</think>')[0].split('<think>')[-1].strip() %}
            {%- set text = text.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and thought %}{{- '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}
        {{- text }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- elif not (message.role == 'system' and loop.first and tools) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""

# Channels, one call in a turn, whose name its result takes over, and results as JSON.
CHANNELS = """
{%- set ns = namespace(tool='') %}
{%- for tool in tools or [] %}{{- '<|start|>developer<|message|>' + tool.function | tojson + '<|end|>' }}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.thinking and message.tool_calls %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- for call in (message.tool_calls or [])[:1] %}
            {%- set ns.tool = 'functions.' + call.function.name %}
            {{- '<|start|>assistant to=' + ns.tool + '<|channel|>commentary<|message|>' }}
            {{- call.function.arguments | tojson + '<|call|>' }}
        {%- endfor %}
        {%- if message.content or not message.tool_calls %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>' + ns.tool + ' to=assistant<|message|>' + message.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}
"""

# Contents as lists of parts, as models that see have them; developers and tools are nothing to it.
PARTS = """
{%- for message in messages if message.role in ['system', 'user', 'assistant'] %}
    {{- message.role | capitalize + ': ' }}
    {%- for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
    {{- '<end_of_utterance>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant:' }}{% endif %}
"""

# Writes each argument of a call as Python does, so that it fails where the arguments are one text.
PYTHONIC = """
{{- bos_token }}
{%- for tool in tools or [] %}{{- '<|tool|>' + tool | tojson }}{% endfor %}
{%- for message in messages %}
    {{- '<|' + message.role + '|>\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {%- set ns = namespace(words=[]) %}
        {%- for name, value in call.function.arguments.items() %}
            {%- set shown = "'" + value + "'" if value is string else value | string %}
            {%- set ns.words = ns.words + [name + '=' + shown] %}
        {%- endfor %}
        {{- '<tool_call>[' + call.function.name + '(' + ns.words | join(', ') + ')]</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{% endif %}
"""

# Numbers each result by the calls before it.
NUMBERED = """
{%- set ns = namespace(number=0) %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {%- set ns.number = ns.number + 1 %}
        {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}</tool_call>' }}
    {%- endfor %}
    {{- (' of call ' ~ ns.number if message.role == 'tool' else '') + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""

# Writes the tools in front of all messages that are like the last one of the user.
TOOLS_LAST = """
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
    {%- if message == asked[-1] %}{{- '<|tools|>' + (tools or []) | tojson }}{% endif %}
    {{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""

TEMPLATES = {
    "a default system message": DEFAULT_SYSTEM,
    "headers": HEADERS,
    "instructions": INSTRUCTIONS,
    "reasoning": REASONING,
    "channels": CHANNELS,
    "parts": PARTS,
    "pythonic": PYTHONIC,
}
VARIANT_OF = {"reasoning": "plain tags", "pythonic": "stripping", "instructions": "sentencepiece"}


@pytest.fixture(scope="module", params=TEMPLATES)
def made(request: pytest.FixtureRequest) -> Subject:
    return subject(family(TEMPLATES[request.param], VARIANT_OF.get(request.param, "all special"), small=True))


def failures(outcomes: list[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.failed]


def test_conversations_are_rendered_as_the_template_renders_them(made: Subject) -> None:
    assert failures(run(made)) == []


def test_six_turns_are_one_sequence_where_the_template_keeps_history(made: Subject) -> None:
    assert failures(bridge(made)) == []


def test_long_conversations_go_on_as_they_do_without_their_middle(made: Subject) -> None:
    assert differences(made.ours, 40, seed=1) == []


@pytest.mark.parametrize(
    ("template", "kept"),
    [(NUMBERED, ToolsKept()), (TOOLS_LAST, ToolsKept(Keep.CALLED_TOOLS, Keep.TOOLS))],
    ids=["calls", "tools"],
)
def test_what_is_left_out_does_not_matter_to_the_template(template: str, kept: ToolsKept) -> None:
    made = subject(family(template, "all special", small=True))
    assert made.ours.renderer.kept == kept
    assert differences(made.ours, 40, seed=1) == []


async def test_six_turns_through_a_gateway_are_recorded_as_the_template_keeps_them(made: Subject, bus: Bus) -> None:
    assert failures(await play(bus, made)) == []
