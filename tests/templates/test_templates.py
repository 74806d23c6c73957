"""Chat templates of TRL's wheel and of two source packages, for a model of an unknown name, beside transformers."""

import importlib.util
import os
from itertools import product
from pathlib import Path

import pytest

from bombus.bus import Bus
from bombus_gateway.text.reading.finding import Reading
from tests.templates.battery import TALLY, Outcome, Subject, bridge, run, subject
from tests.templates.families import VARIANTS, family
from tests.templates.long_conversations import differences
from tests.templates.playing import play, play_pair
from tests.templates.sampling import forged, read_random_tokens
from tests.templates.sources import SOURCES, folder_of


def wheel() -> dict[str, Path]:
    """Return the templates of TRL's wheel, and those of the folder `TEMPLATES`, if there is one, by name.

    TRL itself is not imported: its dependencies are not installed. Those of `_training` are the same with marks for
    losses.
    """
    spec = importlib.util.find_spec("trl")
    assert spec is not None, "install TRL's wheel: make test-templates"
    assert spec.origin is not None
    folders = [Path(spec.origin).parent / "chat_templates"]
    if more := os.environ.get("TEMPLATES"):
        folders.append(Path(more))
    found = [path for folder in folders for path in sorted(folder.glob("*.jinja"))]
    return {path.stem: path for path in found if not path.stem.endswith("_training")}


def fetched() -> dict[str, Path]:
    """Return the templates of the source packages by name."""
    return {f"{name}/{path.stem}": path for name in SOURCES for path in sorted(folder_of(name).glob("*.jinja"))}


WHEEL, FETCHED = wheel(), fetched()
TEMPLATES = {**WHEEL, **FETCHED}
VARIANT = "plain tags"  # for tests that take longer, and for the many templates that were fetched
READ: set[Reading] = set()


@pytest.fixture(
    scope="module",
    params=[*product(WHEEL, VARIANTS), *product(FETCHED, [VARIANT])],
    ids=lambda param: f"{param[0]}, {param[1]}",
)
def made(request: pytest.FixtureRequest) -> tuple[str, Subject]:
    """Each template of the wheel with each kind of tokenizer, and each of the others with one.

    All tests of one are run before the next is made.
    """
    name, variant = request.param
    return name, subject(family(TEMPLATES[name].read_text(), variant))


@pytest.fixture(scope="module", params=TEMPLATES)
def played(request: pytest.FixtureRequest) -> Subject:
    """Each template with one kind of tokenizer, for tests that take longer."""
    return subject(family(TEMPLATES[request.param].read_text(), VARIANT))


def failures(outcomes: list[Outcome]) -> str:
    return "\n".join(f"{each.kind.upper()} {each.conversation}: {each.detail}" for each in outcomes if each.failed)


def test_all_templates_are_there() -> None:
    assert len(WHEEL) >= 41
    assert len(FETCHED) >= 100


def test_every_conversation_is_rendered_as_the_template_renders_it(made: tuple[str, Subject]) -> None:
    name, family_ = made
    outcomes = run(family_)
    TALLY.add(name, outcomes)
    assert not failures(outcomes), failures(outcomes)


def test_six_turns_are_one_sequence_where_the_template_keeps_history(made: tuple[str, Subject]) -> None:
    outcomes = bridge(made[1])
    assert not failures(outcomes), failures(outcomes)


def test_a_message_with_the_names_of_all_special_tokens_has_none_of_their_ids(made: tuple[str, Subject]) -> None:
    assert list(forged(made[1])) == []


def test_long_conversations_go_on_as_they_do_without_their_middle(played: Subject) -> None:
    assert differences(played.ours, 60, seed=1) == []


async def test_six_turns_through_a_gateway_are_recorded_as_the_template_keeps_them(played: Subject, bus: Bus) -> None:
    outcomes = await play(bus, played)
    assert not failures(outcomes), failures(outcomes)


async def test_two_calls_at_once_are_one_sequence_where_the_template_takes_one_at_a_time(
    played: Subject, bus: Bus
) -> None:
    outcomes = await play_pair(bus, played)
    assert not failures(outcomes), failures(outcomes)


def test_ten_thousand_random_sequences_of_tokens_are_read(played: Subject) -> None:
    reading = played.ours.renderer.reading
    if reading in READ:
        pytest.skip("a template before it has the same reader")
    read_random_tokens(played, 10_000, seed=7)
    READ.add(reading)
