"""Episodes: the two forms of an id, its name on the log and what its claim returns with a secret; keys and rewards."""

KEY_PREFIX = "sk-bombus-"  # an episode's key begins with it
SECRET_MARK = "."  # between the name and the secret; neither contains it
REWARD_MAX = 1e9  # in size: squares of gradients stay far within float32
METADATA_BYTES_MAX = 64 << 10  # of the metadata and the metrics of an episode together


def without_secret(claimed_id: str) -> str:
    """Return the name of an episode on the log, for an id with or without the secret of its claim."""
    return claimed_id.partition(SECRET_MARK)[0]
