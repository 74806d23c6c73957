"""Every chat template of TRL's wheel, for a model of an unknown name, beside transformers."""

import importlib.util
import os
from functools import cache
from pathlib import Path

import pytest

from tests.templates.battery import TALLY, Outcome, bridge, run
from tests.templates.families import VARIANTS, Family, family


def templates() -> dict[str, Path]:
    """Return the wheel's templates by name, and those of the folder `TEMPLATES`, if there is one.

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


TEMPLATES = templates()
each_template = pytest.mark.parametrize("name", TEMPLATES)
each_variant = pytest.mark.parametrize("variant", VARIANTS)


@cache
def made(name: str, variant: str) -> Family:
    return family(TEMPLATES[name].read_text(), variant)


def failures(outcomes: list[Outcome]) -> str:
    return "\n".join(f"{each.kind.upper()} {each.conversation}: {each.detail}" for each in outcomes if each.failed)


def test_the_wheel_has_its_templates() -> None:
    assert len(TEMPLATES) >= 41


@each_variant
@each_template
def test_every_conversation_is_rendered_as_the_template_renders_it(name: str, variant: str) -> None:
    outcomes = run(made(name, variant))
    TALLY.add(name, outcomes)
    assert not failures(outcomes), failures(outcomes)


@each_variant
@each_template
def test_six_turns_are_one_sequence_where_the_template_keeps_history(name: str, variant: str) -> None:
    outcomes = bridge(made(name, variant))
    assert not failures(outcomes), failures(outcomes)
