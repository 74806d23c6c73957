"""The feature level of a log: which releases can take part in its hive."""

from bombus.errors import NewerLevel

# Raised by a release that writes events, messages or fields which the release before it must not ignore. Such things
# are written only if the hive's level allows it, so that both releases can run side by side, and the newer one can be
# rolled back, until an operator raises the hive's level.
LEVEL = 1


def check_level(level: int) -> None:
    """Raise `NewerLevel` if this release must not take part in a hive of that feature level."""
    if level > LEVEL:
        raise NewerLevel(
            f"this hive's log is at feature level {level}, and this release of bombus understands it up to level "
            f"{LEVEL}: upgrade bombus here, or restore a backup from before the level was raised"
        )
