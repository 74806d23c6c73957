"""`python -m tests.insight.picture`: draws docs/web.png, the page of the run in examples/, in Chromium."""

import io
import os
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from bombus.commands.web import SEEN_AT
from tests.insight.test_web_browser import CHROMIUM

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs/web.png"
COLOURS = 96  # enough for lines and text, in a third of the bytes


def main() -> None:
    command = [sys.executable, "-m", "bombus", "web", "--log", "examples/letters.bombuslog", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ, cwd=ROOT) as process:
        assert process.stdout is not None
        address = process.stdout.readline().removeprefix(SEEN_AT).strip()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1200, "height": 900})
            page.goto(f"{address}run/main-1")
            page.locator(".charts svg").nth(8).wait_for()
            shot = page.screenshot()
            browser.close()
        process.terminate()
    Image.open(io.BytesIO(shot)).convert("RGB").quantize(COLOURS).save(PICTURE, optimize=True)
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
