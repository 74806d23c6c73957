"""The two forms of an episode's id: its name on the log, and the id that its claim returns, which has a secret too."""

SECRET_MARK = "."  # between the name and the secret; neither contains it


def without_secret(claimed_id: str) -> str:
    """Return the name of an episode on the log, for an id with or without the secret of its claim."""
    return claimed_id.partition(SECRET_MARK)[0]
