"""What all doors of a gateway share."""

from dataclasses import dataclass, field

from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus_gateway.heartbeats import Heartbeats
from bombus_gateway.keys import Keys
from bombus_gateway.settings import GatewaySettings


@dataclass
class Gateway:
    """Made once, in `service.running`. `ready` turns true when the log as it was at the start is folded (R18)."""

    settings: GatewaySettings
    bus: Bus
    follower: Follower
    keys: Keys
    heartbeats: Heartbeats = field(init=False)
    ready: bool = False

    def __post_init__(self) -> None:
        self.heartbeats = Heartbeats(self.bus)
