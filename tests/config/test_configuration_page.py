"""docs/configuration.md matches the sources, and names every key that they read."""

from tests.config.configuration_page import PAGE, keys, page


def test_the_page_matches_the_sources() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.config.configuration_page"


def test_every_key_of_every_document_is_named() -> None:
    text = page()
    for kind, names in keys().items():
        for name in names:
            assert f"| `{name}` |" in text, f"{kind}: {name}"
