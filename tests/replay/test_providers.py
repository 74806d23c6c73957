"""The parts of services that `bombus replay episode` uses: they satisfy their protocols, and may be absent."""

import pytest

import bombus_gateway.text.token_texts
import bombus_trainer.replay.formulas
from bombus.cli import NotInstalled, load
from bombus.replay.providers import AdvantageProvider, TokenTextProvider, advantage_provider, token_text_provider


def test_the_services_define_what_the_protocols_ask_for() -> None:
    texts: TokenTextProvider = bombus_gateway.text.token_texts
    advantages: AdvantageProvider = bombus_trainer.replay.formulas
    assert token_text_provider() is texts
    assert advantage_provider() is advantages


def test_a_service_that_is_not_installed_is_named_with_its_extra() -> None:
    with pytest.raises(NotInstalled) as caught:
        load("bombus_nothing.text", extra="gateway")
    assert str(caught.value) == "bombus_nothing is not installed: pip install 'bombus[gateway]'"
