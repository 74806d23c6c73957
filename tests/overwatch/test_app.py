"""The screen itself: pictures of it, and what its keys do.

After an intended change run `pytest tests/overwatch/test_app.py --snapshot-update`, then look at the pictures.
"""

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from textual.pilot import Pilot

from bombus.errors import Code, Refused
from bombus.hive import events as ev
from bombus.hive.events import Event
from bombus.hive.records import CallRef
from bombus_overwatch.app import Help, Overwatch
from bombus_overwatch.browser import Browser, Confirm
from bombus_overwatch.model import EpisodeRecord
from bombus_overwatch.widgets import Banner, EpisodesPanel, KeyBar, Notice, Panel, PhaseBar, ReplicasPanel, TailPanel
from tests.overwatch.story import SECOND, Story, ToldWatch, failed, operating, rolling
from tests.patience import PATIENCE_S

WIDE = (120, 36)
Compare = Callable[..., bool]


def app_of(story: Story) -> Overwatch:
    """Return the screen with its clock stopped two seconds after the story's last event."""
    return Overwatch("demo", ToldWatch(story.events), clock=lambda: story.now_ns + 2 * SECOND)


def tell(app: Overwatch, *events: Event) -> None:
    assert isinstance(app.log_watch, ToldWatch)
    app.log_watch.tell(*events)


def text(
    app: Overwatch, panel: type[Banner | KeyBar | PhaseBar | Notice | TailPanel | EpisodesPanel | ReplicasPanel]
) -> str:
    return app.screen_stack[0].query_one(panel).render().plain


@pytest.fixture(scope="module")
def story() -> Story:
    return rolling(6)


# ---- pictures -------------------------------------------------------------------------------------------------


def test_an_engine_that_rolls_with_its_curves(snap_compare: Compare) -> None:
    assert snap_compare(app_of(rolling()), terminal_size=WIDE)


def test_an_engine_that_could_not_boot(snap_compare: Compare) -> None:
    assert snap_compare(app_of(failed()), terminal_size=(100, 30))


def test_a_small_terminal_gone_back_in_time(snap_compare: Compare) -> None:
    assert snap_compare(app_of(rolling()), press=["pageup", "left"], terminal_size=(80, 24))


def test_the_models_of_a_run_of_operations(snap_compare: Compare) -> None:
    assert snap_compare(app_of(operating()), terminal_size=WIDE)


def test_the_groups_of_a_run(snap_compare: Compare) -> None:
    assert snap_compare(app_of(rolling(2)), press=["enter", "down"], terminal_size=WIDE)


def test_a_confirmation(snap_compare: Compare) -> None:
    assert snap_compare(app_of(rolling(2)), press=["s"], terminal_size=(80, 24))


# ---- from a run to an episode ---------------------------------------------------------------------------------


class Operator:
    """Notes what it is asked to do, and refuses if it is told to."""

    def __init__(self, refusal: str = "") -> None:
        self.asked: list[str] = []
        self._refusal = refusal

    def _ask(self, what: str) -> None:
        if self._refusal:
            raise Refused(Code.WRONG_PHASE, self._refusal)
        self.asked.append(what)

    async def stop(self, engine: str) -> None:
        self._ask(f"stop {engine}")

    async def abort(self, engine: str, record: EpisodeRecord) -> None:
        self._ask(f"abort {record.episode} of {record.client} on {engine}")


def operated(story: Story, operator: Operator) -> Overwatch:
    app = app_of(story)
    app.operator = operator
    return app


def page(app: Overwatch) -> str:
    """Return what the screen on top shows, line by line."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)


async def shows(app: Overwatch, pilot: Pilot[None], wanted: str) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while wanted not in page(app):
        assert asyncio.get_running_loop().time() < deadline, page(app)
        await pilot.pause(0.02)


async def test_enter_goes_from_a_run_to_an_episode_and_escape_back_to_where_one_was() -> None:
    app = app_of(rolling(2))
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        await pilot.press("enter", *["down"] * 16)
        await shows(app, pilot, "engine main › run 1\n")
        await pilot.press("enter")
        await shows(app, pilot, "engine main › run 1 › step 2 gcd chain #14\n")
        await pilot.press("down", "enter")
        await shows(app, pilot, "engine main › run 1 › step 2 gcd chain #14 › main-1-64\n")
        await shows(app, pilot, "no success; trained in step 2 (event 202)")
        assert page(app).count("note: call call") == 2, "its two calls"
        await pilot.press("escape", "enter")
        await shows(app, pilot, "› main-1-64\n")
        await pilot.press("escape", "escape", "enter")
        await shows(app, pilot, "› step 2 gcd chain #14\n")
        await pilot.press("escape", "escape")
        assert not isinstance(app.screen, Browser)


async def test_a_group_stays_in_view_when_its_batch_is_sealed() -> None:
    story = Story()
    story.boot()
    story.publish(0)
    app = app_of(story)
    told = app.live.position
    (group,) = story.groups(0, 1)
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        tell(app, *story.events[told:])
        app.draw()
        await pilot.press("enter", "enter")
        await shows(app, pilot, f"› no batch {group.task}\n")
        sealed = ev.BatchReady(**story.at, run=1, step=1, groups=(group,), config_digest="d")
        tell(app, sealed)
        await shows(app, pilot, f"› step 1 {group.task}\n")
        await shows(app, pilot, "in a batch")
        assert page(app).count("in a batch") == 4


async def test_an_open_episode_is_read_again_once_it_has_another_call() -> None:
    story = rolling(0)
    app, told = app_of(story), len(story.events)
    async with app.run_test(size=WIDE) as pilot:
        await pilot.press("enter", *["down"] * 3, "enter", "enter")
        await shows(app, pilot, "still open at the end of the log")
        episode = page(app).splitlines()[0].rpartition("› ")[2].strip()
        before = page(app).count("note: call call")
        story.call(0, episode)
        tell(app, *story.events[told:])
        await shows(app, pilot, f"note: call call{story.calls} at")
        assert page(app).count("note: call call") == before + 1


async def test_an_open_episode_is_aborted_after_a_yes_and_after_nothing_else() -> None:
    operator = Operator()
    app = operated(rolling(2), operator)
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        await pilot.press("enter", *["down"] * 3, "enter", "a")
        for other in ("n", "escape", "enter"):
            assert isinstance(app.screen, Confirm)
            await pilot.press(other, "a")
        assert operator.asked == []
        await pilot.press("y")
        await shows(app, pilot, "is aborted")
        (asked,) = operator.asked
        record = next(each for each in app.live.histories["main"].episodes.values() if f" {each.episode} " in asked)
        assert (asked, record.fate) == (f"abort {record.episode} of {record.client} on main", "open")


async def test_an_episode_that_is_over_cannot_be_aborted() -> None:
    app = operated(rolling(2), Operator())
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        await pilot.press("enter", *["down"] * 16, "enter", "a")
        assert isinstance(app.screen, Browser)


async def test_a_job_is_stopped_after_a_yes_and_a_refusal_is_shown() -> None:
    operator = Operator()
    app = operated(rolling(2), operator)
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        await pilot.press("s", "n", "s", "y")
        await shows(app, pilot, "engine main is stopped")
        assert operator.asked == ["stop main"]
        app.operator = Operator("it is not [b]running")
        await pilot.press("s", "y")
        await shows(app, pilot, "it is not [b]running")


# ---- keys -----------------------------------------------------------------------------------------------------


async def test_pause_holds_the_view_while_events_go_on(story: Story) -> None:
    app = app_of(story)
    async with app.run_test(size=WIDE) as pilot:
        await pilot.press("p")
        held = text(app, TailPanel)
        tell(app, story.events[-1])
        app.draw()
        assert text(app, TailPanel) == held
        assert "held" in text(app, Banner)
        assert "1 behind" in text(app, KeyBar)
        await pilot.press("p")
        assert "live" in text(app, Banner)
        assert text(app, TailPanel) != held


async def test_arrows_go_through_time_and_end_comes_back(story: Story) -> None:
    app = app_of(story)
    newest = len(story.events)
    async with app.run_test(size=WIDE) as pilot:
        await pilot.press("left", "left")
        assert f"event {newest - 2:,}" in text(app, Banner)
        await pilot.press("right")
        assert f"event {newest - 1:,}" in text(app, Banner)
        await pilot.press("home", "right", "right", "right")
        assert "BOOTING" in text(app, PhaseBar)
        assert "waiting for a trainer" in text(app, PhaseBar)
        await pilot.press("end")
        assert f"event {newest:,}" in text(app, Banner)
        assert "live" in text(app, Banner)


async def test_f_goes_through_the_kinds_of_events(story: Story) -> None:
    app = app_of(story)
    async with app.run_test(size=WIDE) as pilot:
        await pilot.press("f")
        assert "filter: engine" in text(app, KeyBar)
        assert "claimed" not in text(app, TailPanel)
        assert "rolling on version 6" in text(app, TailPanel)
        await pilot.press(*"fffffff")
        assert "filter: all" in text(app, KeyBar)


async def test_e_shows_the_next_engine() -> None:
    one, two = Story(engine="one"), Story(engine="two")
    one.boot()
    two.boot()
    app = Overwatch("demo", ToldWatch(one.events + two.events), clock=lambda: one.now_ns)
    async with app.run_test(size=WIDE) as pilot:
        assert "engine one 1 of 2" in text(app, Banner)
        await pilot.press("e")
        assert "engine two 2 of 2" in text(app, Banner)
        await pilot.press("e")
        assert "engine one 1 of 2" in text(app, Banner)


async def test_help_opens_and_closes_and_q_quits(story: Story) -> None:
    app = app_of(story)
    async with app.run_test(size=WIDE) as pilot:
        await pilot.press("question_mark")
        assert isinstance(app.screen, Help)
        await pilot.press("escape")
        assert not isinstance(app.screen, Help)
        await pilot.press("q")
    assert app.return_code == 0
    assert not app.is_running


# ---- drawing --------------------------------------------------------------------------------------------------


async def drawn(app: Overwatch, pilot: Pilot[None], wanted: str) -> None:
    """Wait until the banner contains `wanted`."""
    async with asyncio.timeout(PATIENCE_S):
        while wanted not in text(app, Banner):
            await pilot.pause(0.02)


class Counting(Overwatch):
    """Remembers the positions at which it was drawn."""

    def __init__(self, story: Story) -> None:
        super().__init__("demo", ToldWatch(), clock=lambda: story.now_ns)
        self.pictures: list[int] = []

    def draw(self) -> None:
        super().draw()
        self.pictures.append(self.live.position)


async def test_a_burst_of_events_is_drawn_together(story: Story) -> None:
    app = Counting(story)
    async with app.run_test(size=WIDE) as pilot:
        tell(app, *story.events)
        await drawn(app, pilot, f"event {len(story.events):,}")
        assert app.pictures == [0, len(story.events)]


async def test_catching_up_shows_how_far_it_is(story: Story) -> None:
    app = app_of(story)
    async with app.run_test(size=WIDE) as pilot:
        app.log_watch.is_ready, app.log_watch.end = False, 2 * len(story.events)
        app.draw()
        await drawn(app, pilot, f"catching up ━━━━━───── of {2 * len(story.events):,}")


async def test_a_log_that_is_not_read_yet_cannot_be_held() -> None:
    watch = ToldWatch()
    watch.record = None
    app = Overwatch("demo", watch)
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        await pilot.press("left")
        await shows(app, pilot, "the log is not read yet")
        assert "held" not in text(app, Banner)


async def test_while_the_bus_is_away_the_reason_is_shown(story: Story) -> None:
    app = app_of(story)
    async with app.run_test(size=WIDE) as pilot:
        app.log_watch.error = "the bus is away"
        app.draw()
        await drawn(app, pilot, "reconnecting")
        assert "the bus is away" in text(app, KeyBar)


async def test_how_gateways_read_the_model_is_shown_and_that_they_disagree() -> None:
    story = rolling(1)
    for template in ("3fa91c2e", "77d0ab12"):
        found = ev.ConversationFormat(template=template, tool_calls="hermes", reasoning="<think>")
        story.tell(ev.ModelRead(**story.at, run=1, gateway=f"gateway of {template}", format=found))
    app = app_of(story)
    async with app.run_test(size=WIDE) as pilot:
        await pilot.pause()
        assert "template 3fa91c2e, tool calls: hermes, reasoning: <think>" in text(app, PhaseBar)
        assert app.screen.query_one(Notice).display
        assert "in 2 different ways: gateway of 3fa91c2e has" in text(app, Notice)


async def test_calls_that_lack_a_part_of_their_conversation_are_warned_of() -> None:
    story = rolling(1)
    noted = ev.NotedCall("main-1-1", CallRef(1, "call", b"d" * 16), 5, 3, 0, 0, incomplete=True)
    story.tell(ev.CallsNoted(**story.at, run=1, calls=(noted,)))
    app = app_of(story)
    async with app.run_test(size=WIDE) as pilot:
        await pilot.pause()
        assert "! 1 call answered, each without a part of its conversation" in text(app, Notice)


async def test_quarantined_replicas_are_named_with_their_reasons() -> None:
    story = rolling(1)
    app = app_of(story)
    async with app.run_test(size=WIDE) as pilot:
        assert "✗" not in text(app, ReplicasPanel)
        quarantined = ev.ReplicaQuarantined(
            **story.at, run=1, version=0, replica="replica-a", reason="no weights at /v0\x1b[2J"
        )
        tell(app, quarantined)
        async with asyncio.timeout(PATIENCE_S):
            while "✗ replica-a" not in text(app, ReplicasPanel):
                await pilot.pause(0.02)
        assert app.screen.query_one(Notice).display
        assert text(app, Notice) == "! replica-a is quarantined: it cannot load version 0: no weights at /v0 [2J"


async def test_a_replica_is_shown_with_how_far_it_is_from_its_trainer() -> None:
    story = rolling(1)
    app = app_of(story)
    async with app.run_test(size=WIDE) as pilot:
        check = ev.CanaryCheck(difference=2e-6, limit=1e-4)
        tell(app, ev.WeightsLoaded(**story.at, run=1, version=1, replica="replica-a", canary=check))
        async with asyncio.timeout(PATIENCE_S):
            while "2e-06" not in text(app, ReplicasPanel):
                await pilot.pause(0.02)
        assert "replica-a serves version 1, 2.0e-06 nats from the trainer" in text(app, TailPanel)


async def test_a_suspended_run_says_so_beside_its_phase_and_why_in_full() -> None:
    story = rolling(1)
    story.tell(ev.EngineSuspended(**story.at, run=1, reason="CUDA out of memory"))
    app = app_of(story)
    async with app.run_test(size=WIDE) as pilot:
        await pilot.pause()
        assert "ROLLING, SUSPENDED" in text(app, PhaseBar)
        assert app.screen.query_one(Notice).display
        assert (
            text(app, Notice) == "✗ CUDA out of memory (once the cause is gone, `bombus resume` lets the run continue)"
        )


@pytest.mark.parametrize("size", [(40, 10), (20, 5), (10, 2), (300, 90)])
async def test_any_terminal_size_works(story: Story, size: tuple[int, int]) -> None:
    app = app_of(story)
    async with app.run_test(size=size) as pilot:
        await pilot.press("left", "f")
        app.export_screenshot()


async def test_nothing_on_the_log_controls_the_terminal(story: Story) -> None:
    """Names of metrics, tasks and clients come from whoever trains and plays."""
    hostile = "\x1b[2J\x9b31m\u202e\nforged"
    app = app_of(story)
    done = next(event for event in reversed(story.events) if isinstance(event, ev.StepCompleted))
    claimed = next(event for event in reversed(story.events) if isinstance(event, ev.EpisodeClaimed))
    tell(
        app,
        msgspec.structs.replace(done, step=done.step + 1, metrics={hostile: 1.0}),
        msgspec.structs.replace(claimed, episodes=(hostile,), client=hostile, task_hint=hostile),
    )
    app.log_watch.error = hostile
    async with app.run_test(size=WIDE):
        app.draw()
        for panel in app.screen_stack[0].query(Panel):
            assert all(line.isprintable() for line in panel.render().plain.split("\n")), panel
            assert not any(line.startswith("forged") for line in panel.render().plain.split("\n")), panel
