"""The page of an episode: its calls as a person reads them, with every sampled token, and its replay in time."""

from markupsafe import Markup
from starlette.responses import Response

from bombus.hive.episodes import without_secret
from bombus.insight.web.pages import Visit, page
from bombus.replay.episode.html import body
from bombus.replay.episode.story import read_story
from bombus.replay.episode.style import EPISODE
from bombus.replay.episode.tree import read_transcript
from bombus.replay.source import NotOnLog


async def show(visit: Visit) -> Response:
    name = without_secret(visit.request.path_params["episode"])
    claimed_at = visit.record.claimed_at(name)
    before = await visit.watch.at(min(max(visit.record.first, claimed_at - 1), visit.position))
    start = before.copy()  # reading changes it
    try:
        story = await read_story(visit.source, name, (start.hive, start.position), visit.position)
    except NotOnLog:
        # The reader saw only the events from `start` on, and would say that the earlier ones were compacted.
        raise NotOnLog(f"{visit.source.title} has no episode {name} at event {visit.position}") from None
    transcript = await read_transcript(visit.source, story)
    ended_s = max((turn.began_s + turn.seconds for turn in transcript.turns), default=0.0)
    text = Markup(body(transcript))  # which has escaped all that is from the log
    calls = len(transcript.turns)
    return visit.html("episode.html", story=story, style=Markup(EPISODE), body=text, calls=calls, ended_s=ended_s)


ROUTES = (page("/episode/{episode}", show),)
