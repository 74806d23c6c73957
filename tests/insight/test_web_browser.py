"""The page in a real browser: Chromium, driven from outside."""

import gzip
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bombus.commands.web import SEEN_AT
from bombus.datums.differences import StepDifferences, object_name
from bombus.hive import events as ev
from bombus.hive.events import Event
from bombus.machine.process import free_port
from bombus.replay.archive import BlobFrame, pack
from tests.insight.long_log import story_events, write_archive
from tests.logs.facts import TINY

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
    pytest.mark.xdist_group("browser"),  # where it is started once
]
HOSTILE = """<img src=x onerror="window.hacked=1">'"</script><script>window.hacked=1</script>"""
STEPS = 14
WIDTHS = (400, 1600)
PATHS = (
    "/",
    "/run/main-1",
    "/?at=40",
    "/run/main-1?at=900&axis=minutes",
    "/run/main-1?step=3&axis=tokens",
    "/run/main-1/step/3?sort=spread",
    "/episode/main-1-1",
    "/runs?run=main-1",
)


def hostile(event: Event) -> Event:
    """Return an event in which all that clients choose would run a script if it was not shown as text."""
    if isinstance(event, ev.EpisodeClaimed):
        return msgspec.structs.replace(event, client=HOSTILE, task_hint=HOSTILE)
    if isinstance(event, ev.EpisodeEnded):
        outcomes = [
            msgspec.structs.replace(each, data_set=HOSTILE, log_metrics={HOSTILE: 1.0}) for each in event.outcomes
        ]
        return msgspec.structs.replace(event, client=HOSTILE, outcomes=tuple(outcomes))
    if isinstance(event, ev.StepCompleted):
        return msgspec.structs.replace(event, metrics={**event.metrics, HOSTILE: 1.0})
    return event


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("web") / "run.bombuslog"
    events = [hostile(event) for event in story_events(STEPS)]
    last = max(n for n, event in enumerate(events) if isinstance(event, ev.EpisodeClaimed))
    write_archive(path, events[: last + 1])  # so that an episode is open
    with served(path) as address:
        yield address


@contextmanager
def served(log: Path, port: int = 0) -> Iterator[str]:
    """Serve the pages of a log, and yield their address."""
    command = [sys.executable, "-m", "bombus", "web", "--log", str(log), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(SEEN_AT)
        try:
            yield line.removeprefix(SEEN_AT).strip().rstrip("/")
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page, and everything that went wrong on it."""

    def __init__(self, browser: Any, address: str, width: int = 1600, **options: Any) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, **options)
        self.address = address
        self.faults: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", lambda said: self.faults.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))

    def go(self, path: str) -> Any:
        self.page.goto(self.address + path)
        self.page.wait_for_selector("body[data-ready=yes]")
        if "/run" in path and "/step/" not in path:
            self.drawn()
        return self.page

    def drawn(self) -> None:
        self.page.wait_for_selector("[data-chart=reward] svg")

    def at(self) -> str:
        return str(self.page.locator("#position").input_value())

    def number(self) -> int:
        return int(self.page.locator("#moment").inner_text().split(" ")[0].replace(",", ""))


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Opened]:
    opened = Opened(browser, address)
    yield opened
    opened.page.close()
    assert opened.faults == []


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_has_an_error_or_is_wider_than_the_window(browser: Any, address: str, width: int) -> None:
    opened = Opened(browser, address, width)
    for path in PATHS:
        page = opened.go(path)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        assert page.locator("h1").count() == 1
        assert page.locator("main").count() == 1
    assert opened.faults == []
    assert opened.hosts == {address.removeprefix("http://")}
    opened.page.close()


def test_what_clients_choose_is_shown_as_text_and_runs_nothing(opened: Opened) -> None:
    page = opened.go("/")
    assert page.get_by_role("cell", name=HOSTILE).count() > 0
    page = opened.go("/run/main-1")
    page.locator("[data-chart=reward] summary").click()
    expect(page.locator("[data-chart=reward] table")).to_contain_text(HOSTILE)
    page.locator("[data-chart=reward] svg path[aria-roledescription='point']").first.hover(force=True)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0


def test_the_slider_moves_every_page_by_keyboard(opened: Opened) -> None:
    page = opened.go("/run/main-1")
    end = opened.number()
    assert f"steps 1 to {STEPS - 1} " in page.locator("#facts").inner_text()
    points = page.locator("[data-chart=loss] svg path[aria-roledescription='point']")
    expect(points).to_have_count(STEPS - 1)
    page.locator("#position").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#moment")).to_contain_text(f"{end - 1:,} of {end:,}")
    for _ in range(4):
        page.keyboard.press("PageDown")
    expect(page.locator("#facts")).not_to_contain_text(f"steps 1 to {STEPS - 1} ")
    expect(points).not_to_have_count(STEPS - 1)
    assert 0 < points.count() < STEPS - 1
    assert f"at={opened.number()}" in page.url
    assert page.evaluate("document.activeElement.id") == "position"
    expect(page.locator("#live")).to_have_attribute("aria-pressed", "false")
    page.locator("nav a").first.click()
    page.wait_for_selector("#engines")
    assert opened.number() < end - 1
    page.locator("#live").press("Enter")
    expect(page.locator("#moment")).to_contain_text(f"{end:,} of {end:,}")
    assert "at=" not in page.url


def test_the_axis_is_chosen_and_a_chart_has_its_numbers_as_a_table(opened: Opened) -> None:
    page = opened.go("/run/main-1")
    page.get_by_label("Horizontal axis").select_option("tokens")
    page.wait_for_url("**axis=tokens**")
    opened.drawn()
    assert "tokens sampled so far" in page.locator("[data-chart=reward] svg").text_content()
    assert page.get_by_label("Horizontal axis").input_value() == "tokens"
    page.locator("[data-chart=loss] summary").press("Enter")
    rows = page.locator("[data-chart=loss] tbody tr")
    expect(rows).to_have_count(STEPS - 1)
    assert float(rows.first.locator("th").inner_text()) > 100


def test_a_bar_of_the_rewards_leads_to_the_episodes_of_its_range(opened: Opened) -> None:
    page = opened.go("/run/main-1?step=3")
    page.wait_for_selector("#rewards svg")
    spec = json.loads(page.locator("#rewards [data-drawn]").get_attribute("data-drawn"))
    assert sum(bin["episodes"] for bin in spec["data"]["values"]) == 32
    page.locator("#rewards svg .mark-rect path").last.click()
    page.wait_for_url("**/run/main-1/step/3?low=*")
    page.wait_for_load_state("networkidle")
    opened.faults.clear()  # the page of a step does not exist yet


def test_charts_are_dark_where_the_page_is_and_change_with_it(opened: Opened) -> None:
    page = opened.go("/run/main-1")

    def colours() -> tuple[str, str]:
        opened.drawn()
        colour = "each => getComputedStyle(each).fill"
        label = page.locator("[data-chart=reward] .role-axis-title text").first.evaluate(colour)
        return label, page.evaluate("getComputedStyle(document.body).backgroundColor")

    assert colours() == ("rgb(29, 29, 31)", "rgb(251, 250, 247)")
    page.emulate_media(color_scheme="dark")
    assert colours() == ("rgb(236, 235, 230)", "rgb(22, 22, 26)")


def test_everything_that_can_be_used_has_a_name_and_the_first_stop_skips_to_the_content(opened: Opened) -> None:
    page = opened.go("/run/main-1")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input:not([type=hidden]), select, button, summary, main a')]"
        ".filter(each => !(each.textContent.trim() || each.labels?.length)).length"
    )
    assert unnamed == 0
    assert page.get_by_role("figure", name="Reward", exact=True).count() == 1
    assert page.get_by_role("slider", name="Event").count() == 1


def test_the_slider_says_where_a_run_does_not_exist_yet_and_comes_back(opened: Opened) -> None:
    page = opened.go("/run/main-1")
    end = opened.number()
    page.locator("#position").focus()
    page.keyboard.press("Home")
    expect(page.locator("#moment")).to_contain_text(f"0 of {end:,}")
    expect(page.get_by_role("alert")).to_contain_text("has no run main-1")
    assert page.locator("#facts").count() == 0
    page.keyboard.press("End")
    expect(page.locator("#facts")).to_contain_text(f"steps 1 to {STEPS - 1} ")
    assert page.locator("[data-chart=reward] svg").count() == 1
    assert page.evaluate("document.activeElement.id") == "position"
    assert all("404" in fault for fault in opened.faults)
    opened.faults.clear()


def test_the_axis_is_chosen_at_the_position_of_the_slider(opened: Opened) -> None:
    page = opened.go("/run/main-1")
    page.locator("#position").focus()
    page.keyboard.press("PageDown")
    page.wait_for_url("**at=*")
    before = opened.at()
    page.get_by_label("Horizontal axis").select_option("tokens")
    page.wait_for_url("**axis=tokens**")
    opened.drawn()
    assert opened.number() == int(before)


def test_the_slider_moves_the_pages_of_steps_and_episodes(opened: Opened) -> None:
    page = opened.go("/run/main-1/step/1")
    page.locator("#position").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#groups a").first).to_have_attribute("href", f"/episode/main-1-7?at={opened.at()}")
    page = opened.go("/episode/main-1-1")
    page.get_by_label("advantage").check()
    assert "still open" not in page.locator("#episode").inner_text()
    page.goto(opened.address + "/episode/main-1-1?at=16")
    page.locator("#position").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#moment")).to_contain_text("17 of")
    page.locator("#live").press("Enter")
    expect(page.locator("#episode")).not_to_contain_text("still open")


def test_more_tabs_than_a_browser_has_connections_can_be_open_since_hidden_ones_give_theirs_back(
    browser: Any, address: str
) -> None:
    context = browser.new_context()  # whose tabs share six connections
    hide = "Object.defineProperty(document, 'visibilityState', {configurable: true, get: () => 'hidden'});"
    for number in range(8):
        page = context.new_page()
        page.goto(f"{address}/episode/main-1-{number + 1}", timeout=15_000)
        page.wait_for_selector("#episode")
        page.evaluate(f"{hide} document.dispatchEvent(new Event('visibilitychange'))")
    context.close()


def test_a_page_shows_the_curves_of_the_log_that_has_taken_the_place_of_its_own(browser: Any, tmp_path: Path) -> None:
    """As when a hive's folder was removed, and a new hive was started."""
    first, second, port = tmp_path / "first.bombuslog", tmp_path / "second.bombuslog", free_port()
    write_archive(first, [*story_events(STEPS)])
    write_archive(second, [*story_events(STEPS // 2)])
    with served(first, port) as address:
        opened = Opened(browser, address)
        page = opened.go("/run/main-1")
        page.locator("[data-chart=loss] summary").press("Enter")
        rows = page.locator("[data-chart=loss] tbody tr")
        expect(rows).to_have_count(STEPS)
    with served(second, port):
        expect(rows).to_have_count(STEPS // 2, timeout=20_000)
        page.close()


# ---- a run with calls -----------------------------------------------------------------------------------------------

BRANCHED = "main-1-5"  # an episode of step 1 with three calls in two branches
TRAINED = 15  # tokens of it
DIFFERENCE = 0.25  # of its first token, and the largest


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a recorded run of a real model, to which the differences of an episode were added."""
    values = struct.pack(f"<{TRAINED}e", DIFFERENCE, *[-DIFFERENCE / 2] * (TRAINED - 1))
    made = msgspec.msgpack.encode(StepDifferences(run=1, step=1, episodes={BRANCHED: values}))
    frames, last, end = gzip.decompress(TINY.read_bytes()), 0, 0
    while end < len(frames):  # each has its length before it
        last, end = end, end + 4 + int.from_bytes(frames[end : end + 4], "little")
    log = tmp_path_factory.mktemp("played") / "run.bombuslog"
    log.write_bytes(gzip.compress(frames[:last] + pack(BlobFrame(object_name("main", 1), made)) + frames[last:]))
    with served(log) as address:
        yield address


@pytest.fixture
def pages(browser: Any, played: str) -> Iterator[Opened]:
    opened = Opened(browser, played)
    yield opened
    opened.page.close()
    assert opened.faults == []


def background(page: Any, token: int) -> str:
    colour: str = page.evaluate(f"getComputedStyle(document.querySelectorAll('.tokens .t')[{token}]).backgroundColor")
    return colour


def test_the_filters_of_a_step_choose_groups_and_episodes(pages: Opened) -> None:
    page = pages.go("/run/main-1/step/1")
    rows, cells = page.locator("#groups tbody tr"), page.locator("#groups .cell")
    tasks = rows.locator("th").all_inner_texts()
    assert len(tasks) == 2
    highest = max(float(text) for text in cells.all_inner_texts())
    page.get_by_label("Task contains").fill(tasks[1])
    page.get_by_label("Task contains").press("Enter")
    page.wait_for_url("**task=**")
    expect(rows.locator("th")).to_have_text([tasks[1]])
    page.get_by_label("Task contains").fill("")
    page.get_by_label("Reward from").fill(str(highest))
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**task=&low=*")
    assert {float(text) for text in page.locator("#groups .cell:not(.dim)").all_inner_texts()} == {highest}
    page.get_by_label("Reward from").fill("9")
    page.get_by_label("Reward from").press("Enter")
    expect(rows).to_have_text(["No group matches."])
    page.get_by_label("Reward from").fill("")
    page.get_by_label("Order").select_option("worst")
    page.wait_for_url("**sort=worst**")
    means = [float(text) for text in rows.locator("td:nth-of-type(1)").all_inner_texts()]
    assert means == sorted(means)
    page.get_by_role("link", name="step 2 →").press("Enter")
    page.wait_for_url("**/step/2?sort=worst")
    assert page.get_by_label("Order").input_value() == "worst"


def test_a_cell_leads_to_its_episode_by_keyboard_and_back_to_its_step_and_run(pages: Opened) -> None:
    page = pages.go("/run/main-1/step/1")
    page.locator("#groups").focus()
    page.keyboard.press("Tab")
    name = page.evaluate("document.activeElement.title.split(':')[0]")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/episode/{name}")
    page.get_by_role("link", name="step 1").press("Enter")
    page.wait_for_url("**/run/main-1/step/1")
    page.get_by_role("link", name="Run main-1").press("Enter")
    page.wait_for_url("**/run/main-1")


def test_a_bar_of_a_real_run_shows_the_episodes_of_its_range(pages: Opened) -> None:
    page = pages.go("/run/main-1?step=1")
    page.wait_for_selector("#rewards svg")
    page.locator("#rewards svg .mark-rect path").last.click()
    page.wait_for_url("**/run/main-1/step/1?low=*")
    low, high = (float(page.get_by_label(label, exact=True).input_value()) for label in ("Reward from", "to"))
    lit = [float(text) for text in page.locator("#groups .cell:not(.dim)").all_inner_texts()]
    assert lit
    assert all(low <= reward <= high for reward in lit)
    assert all(not low <= float(text) <= high for text in page.locator("#groups .cell.dim").all_inner_texts())


def test_tokens_are_coloured_by_each_of_their_figures_by_keyboard(pages: Opened) -> None:
    page = pages.go(f"/episode/{BRANCHED}")
    seen = {"by-logprob": background(page, 0)}
    page.locator("#by-logprob").focus()
    for each in ("by-difference", "by-advantage", "by-version", "by-mask"):
        page.keyboard.press("ArrowDown")
        assert page.evaluate("document.activeElement.id") == each
        seen[each] = background(page, 0)
        if each == "by-difference":
            assert background(page, 1) != seen[each]
    assert len(set(seen.values())) == len(seen)
    assert f"({DIFFERENCE:+.4f})" in page.locator(".tokens .t").first.get_attribute("title")
    page = pages.go("/episode/main-1-3")
    expect(page.locator("#by-difference")).to_be_disabled()
    assert "left this episode out" in page.locator("fieldset").inner_text()


def test_branches_lead_to_their_calls(pages: Opened) -> None:
    page = pages.go(f"/episode/{BRANCHED}")
    branches = page.locator("dt", has_text="branch")
    assert branches.all_inner_texts() == ["branch 1", "branch 2"]
    page.locator("header dl a").last.press("Enter")
    assert page.evaluate("document.querySelector(':target').matches('section')")


def test_an_episode_is_replayed_in_the_time_that_it_took(pages: Opened) -> None:
    page = pages.go(f"/episode/{BRANCHED}")
    calls, replies = page.locator("section[data-began]:visible"), page.locator(".reply:visible")
    expect(calls).to_have_count(3)
    page.locator("#second").focus()
    page.keyboard.press("Home")
    expect(replies).to_have_count(0)
    page.locator("#second").fill(page.locator("section[data-began]").nth(1).get_attribute("data-began"))
    expect(calls).to_have_count(2)
    expect(replies).to_have_count(1)
    page.get_by_label("Speed").select_option("16")
    page.get_by_role("button", name="Replay").press("Enter")
    expect(replies).to_have_count(3)
    expect(page.locator("#play")).to_have_attribute("aria-pressed", "false")
