"""The page of an episode: its calls as a person reads them, with every sampled token, and its replay in time."""

from markupsafe import Markup
from starlette.responses import Response

from bombus.hive.episodes import without_secret
from bombus.insight.web.pages import Visit, page
from bombus.replay.episode.html import body
from bombus.replay.episode.style import EPISODE


async def show(visit: Visit) -> Response:
    name = without_secret(visit.request.path_params["episode"])
    transcript = await visit.watch.transcript(name, visit.position)
    ended_s = max((turn.began_s + turn.seconds for turn in transcript.turns), default=0.0)
    text = Markup(body(transcript))  # which has escaped all that is from the log
    story, calls = transcript.story, len(transcript.turns)
    return visit.html("episode.html", story=story, style=Markup(EPISODE), body=text, calls=calls, ended_s=ended_s)


ROUTES = (page("/episode/{episode}", show),)
