"""Draws docs/overwatch.svg, the picture in docs/operations.md, of a made-up run: python -m tests.overwatch.picture."""

import asyncio
import html
import re
from pathlib import Path

from tests.overwatch.story import rolling
from tests.overwatch.test_app import WIDE, app_of

PICTURE = Path(__file__).parents[2] / "docs" / "overwatch.svg"


async def picture() -> str:
    """Return the screen of a run that has learned for a while, as SVG. The same run gives the same picture."""
    app = app_of(rolling())
    async with app.run_test(size=WIDE):
        return app.export_screenshot(title="bombus overwatch")


def words(svg: str) -> list[str]:
    """Return what the picture says, piece by piece, without its colours and positions."""
    return [html.unescape(found).strip() for found in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]


if __name__ == "__main__":
    PICTURE.write_text(asyncio.run(picture()), encoding="utf-8")
