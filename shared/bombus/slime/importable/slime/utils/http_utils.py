"""Names of `slime.utils.http_utils`."""

from bombus.slime.http import get as get
from bombus.slime.http import init_http_client as init_http_client
from bombus.slime.http import post as post
