"""The playground: one small page to try a world by hand, on servers with a single slot."""

import html
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).with_name("playground.html")


def playground(name: str) -> Mapping[str, tuple[str, bytes]]:
    """Return the page by its path, with its type of content.

    It takes the slot while it is open: on a server with several, a forgotten page would take one from a training run.
    """
    page = PAGE.read_text().replace("{{name}}", html.escape(name))
    return {"/": ("text/html; charset=utf-8", page.encode())}
