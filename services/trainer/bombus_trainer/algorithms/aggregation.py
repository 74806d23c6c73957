"""What one trained token of each episode counts in the loss of an update. Episodes without any take no place."""


def episode_weights(tokens_of_episode: dict[str, int]) -> dict[str, float]:
    """What one token of each episode counts: 1 / (episodes x its trained tokens).

    Every episode has the same place in the loss, however many turns or branches it took; the branches of an episode
    share that place. Where each episode is one sequence this is verl's seq-mean-token-mean.
    """
    episodes = sum(1 for tokens in tokens_of_episode.values() if tokens)
    return {name: 1.0 / (episodes * tokens) for name, tokens in tokens_of_episode.items() if tokens}


def token_weights(tokens_of_episode: dict[str, int]) -> dict[str, float]:
    """What one token counts when all tokens count alike: 1 / (all trained tokens). Long episodes weigh more.

    DAPO (Yu et al. 2025, arXiv:2503.14476), section 3.3; verl's token-mean.
    """
    total = sum(tokens_of_episode.values())
    return {name: 1.0 / total for name, tokens in tokens_of_episode.items() if tokens}


def constant_weights(tokens_of_episode: dict[str, int], length: int) -> dict[str, float]:
    """What one token counts when episodes are divided by a fixed `length` in tokens: 1 / (episodes x length).

    Dr. GRPO (Liu et al. 2025, arXiv:2503.20783): no longer answer is preferred for being long when it is wrong.
    verl's seq-mean-token-sum-norm.
    """
    episodes = sum(1 for tokens in tokens_of_episode.values() if tokens)
    return {name: 1.0 / (episodes * length) for name, tokens in tokens_of_episode.items() if tokens}
