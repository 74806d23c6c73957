"""What `bombus replay episode` takes from services: it satisfies the protocols, and may be absent."""

from pathlib import Path

import pytest

from bombus.cli import NotInstalled, load
from bombus.replay import providers
from bombus.replay.providers import CallAdvantages, TokenTexts
from bombus_gateway.text.token_texts import token_texts
from bombus_trainer.replay.formulas import call_advantages


def test_the_services_register_what_the_protocols_describe() -> None:
    texts: TokenTexts = token_texts
    advantages: CallAdvantages = call_advantages
    assert providers.token_texts() is texts
    assert providers.call_advantages() is advantages


def test_a_function_that_nobody_registered_is_named_with_its_extra() -> None:
    with pytest.raises(NotInstalled) as caught:
        providers.registered("nothing", extra="gateway")
    assert str(caught.value) == "the entry point bombus.replay:nothing is not installed: pip install 'bombus[gateway]'"


def test_a_registered_service_whose_package_is_absent_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "bumblebee-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: bumblebee\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{providers.GROUP}]\nbumblebee = bumblebee.text:token_texts\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NotInstalled) as caught:
        providers.registered("bumblebee", extra="trainer")
    assert str(caught.value) == "bumblebee is not installed: pip install 'bombus[trainer]'"


def test_a_command_whose_service_is_not_installed_names_its_extra() -> None:
    with pytest.raises(NotInstalled) as caught:
        load("bombus_nothing.cli", extra="gateway")
    assert str(caught.value) == "bombus_nothing is not installed: pip install 'bombus[gateway]'"
