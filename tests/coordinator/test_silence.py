"""Clients that show that they live: their silence frees their episodes, whatever the agents of these do."""

import pytest

from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import AbortReason, Method
from bombus.hive.state import Phase
from bombus_coordinator.core import Core
from tests.coordinator.core_in_memory import ENGINE, CoreHarness, without_ticks

LIMIT_S = 15


@pytest.fixture
def harness() -> CoreHarness:
    harness = CoreHarness()
    harness.boot(batch_size=1, num_repeat=2)
    return harness


def hold(harness: CoreHarness, client: str, count: int = 1, *, touches: bool = True) -> tuple[str, ...]:
    """Claim episodes at a gateway that hears clients, and confirm that the answer has arrived."""
    harness.send(inbox.Touch(id=harness.id()))
    claim = f"claim-{harness.id()}"
    episodes = harness.claim(client, count, claim=claim, touches=touches)
    harness.send(inbox.Touch(id=harness.id(), engine=ENGINE, confirmed=(claim,)))
    return episodes


def pass_time(harness: CoreHarness, seconds: int, *living: str) -> dict[str, AbortReason]:
    """Let seconds pass in which a gateway reports these clients, and return which episodes were aborted, and why."""
    return pass_in_silence(harness, seconds, inbox.Touch(id="beat", clients=living))


def pass_in_silence(harness: CoreHarness, seconds: int, touch: inbox.Touch | None = None) -> dict[str, AbortReason]:
    """Let seconds pass in which no gateway is heard from, but for this touch."""
    aborted: dict[str, AbortReason] = {}
    for _ in range(seconds):
        if touch is not None:
            harness.send(touch, after_s=0.5)
        for event in harness.tick(after_s=0.5 if touch is not None else 1.0):
            if isinstance(event, ev.EpisodeAborted):
                aborted |= dict.fromkeys(event.episodes, event.reason)
    return aborted


def test_the_silence_of_a_client_that_touches_frees_its_episodes_and_the_batch_goes_on(harness: CoreHarness) -> None:
    dead = hold(harness, "dead", 4)
    hold(harness, "alive")
    pass_time(harness, 1, "dead", "alive")
    harness.play("t1", client="alive")
    harness.play("t1", client="alive")
    assert harness.phase() == Phase.ROLLING_POST
    assert pass_time(harness, LIMIT_S - 1, "alive") == {}
    harness.call(dead[0])  # its agents may go on, but nobody reports their rewards any more
    assert pass_time(harness, 1, "alive") == dict.fromkeys(dead, AbortReason.SILENT)
    assert harness.phase() == Phase.ROLLING_POST, "the living client is still waited for"
    event = next(event for event in harness.log if isinstance(event, ev.EpisodeAborted))
    assert event.detail == "nothing was heard from client dead for 15 s"
    assert list(harness.core.live.client_seen) == ["dead", "alive"]
    pass_time(harness, 1, "alive", "dead", "nobody")
    assert list(harness.core.live.client_seen) == ["alive"], "who holds no episode is not remembered"


def test_a_client_that_returns_in_time_keeps_its_episodes_and_one_that_returns_late_is_told_why(
    harness: CoreHarness,
) -> None:
    (episode,) = hold(harness, "c1")
    for _ in range(3):
        pass_time(harness, 1, "c1")
        assert pass_time(harness, LIMIT_S - 1) == {}
    pass_time(harness, 1, "c1")
    assert pass_time(harness, LIMIT_S) == {episode: AbortReason.SILENT}
    answer = harness.end(episode)
    assert isinstance(answer, inbox.Refusal)
    assert "nothing was heard from its client for 15 s" in answer.why


def test_a_client_that_never_touches_has_its_idle_limit(harness: CoreHarness) -> None:
    (episode,) = hold(harness, "agentjet", touches=False)
    assert pass_time(harness, 239, "agentjet") == {}
    assert pass_time(harness, 1, "agentjet") == {episode: AbortReason.IDLE}


def test_an_episode_of_a_client_that_lives_has_its_idle_limit_too(harness: CoreHarness) -> None:
    (episode,) = hold(harness, "c1")
    assert pass_time(harness, 239, "c1") == {}
    assert pass_time(harness, 1, "c1") == {episode: AbortReason.IDLE}


def test_the_limit_is_that_of_the_job() -> None:
    harness = CoreHarness()
    harness.boot(client_silence_s=60.0)
    (episode,) = hold(harness, "c1")
    assert pass_time(harness, 59) == {}
    assert pass_time(harness, 1) == {episode: AbortReason.SILENT}


@pytest.mark.parametrize("last_calls", [None, inbox.Touch(id="calls", engine=ENGINE)])
def test_no_silence_counts_while_no_gateway_hears_clients(harness: CoreHarness, last_calls: inbox.Touch | None) -> None:
    (episode,) = hold(harness, "c1")
    pass_time(harness, 10, "c1")
    assert pass_in_silence(harness, 60, last_calls) == {}
    assert pass_time(harness, LIMIT_S) == {}, "it counts again from when one is heard from"
    assert pass_time(harness, 1) == {episode: AbortReason.SILENT}


def test_a_gateway_that_is_away_for_a_moment_is_no_silence_of_a_client_that_may_be_silent_for_as_short() -> None:
    harness = CoreHarness()
    harness.boot(client_silence_s=3.0)
    (episode,) = hold(harness, "c1")
    pass_time(harness, 5, "c1")
    assert pass_in_silence(harness, 4) == {}
    assert pass_time(harness, 3) == {}
    assert pass_time(harness, 1) == {episode: AbortReason.SILENT}


def test_another_leader_knows_which_clients_touch_and_counts_their_silence_anew(harness: CoreHarness) -> None:
    (episode,) = hold(harness, "c1")
    pass_time(harness, 10, "c1")
    pass_time(harness, LIMIT_S - 1)
    harness.core = without_ticks(Core(harness.core.hive))
    harness.core.open_epoch("another")
    harness.send(inbox.Touch(id="beat", clients=("c1",)), after_s=1)
    assert pass_time(harness, LIMIT_S - 1) == {}
    assert pass_time(harness, 1) == {episode: AbortReason.SILENT}


def test_nobody_waits_for_the_agreement_of_a_client_that_is_silent() -> None:
    harness = CoreHarness()
    harness.boot(Method.ALL_CLIENTS_AGREE)
    for client in ("dead", "alive"):
        harness.play("t1", client=client)
    hold(harness, "dead")
    harness.request(inbox.AgreeSync(id=harness.id(), engine=ENGINE, client="alive"))
    pass_time(harness, LIMIT_S - 1, "alive")
    assert harness.engine.batch is None
    pass_time(harness, 1, "alive")
    assert harness.engine.batch is not None
