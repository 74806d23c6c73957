"""Which phase of an engine may follow which."""

from bombus.hive.state import Phase

TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.OFFLINE: frozenset({Phase.BOOTING}),
    Phase.BOOTING: frozenset({Phase.ROLLING, Phase.OFFLINE}),
    Phase.ROLLING: frozenset({Phase.ROLLING_POST, Phase.OFFLINE}),
    Phase.ROLLING_POST: frozenset({Phase.WEIGHT_SYNCING, Phase.OFFLINE}),
    Phase.WEIGHT_SYNCING: frozenset({Phase.ROLLING, Phase.OFFLINE}),
}
