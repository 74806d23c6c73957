"""How much each episode's trained tokens weigh in an update's loss. Episodes without trained tokens do not count."""


def episode_weights(tokens_of_episode: dict[str, int]) -> dict[str, float]:
    """Weigh each episode's tokens by 1 / (number of episodes x the episode's trained tokens).

    Every episode has the same share of the loss, however many turns or branches it took; its branches split that share.
    If each episode is one sequence, this is verl's seq-mean-token-mean.
    """
    episodes = sum(1 for tokens in tokens_of_episode.values() if tokens)
    return {name: 1.0 / (episodes * tokens) for name, tokens in tokens_of_episode.items() if tokens}


def token_weights(tokens_of_episode: dict[str, int]) -> dict[str, float]:
    """Weigh all tokens equally, by 1 / (all trained tokens), so that long episodes weigh more.

    This is from DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.3), and is verl's token-mean.
    """
    total = sum(tokens_of_episode.values())
    return {name: 1.0 / total for name, tokens in tokens_of_episode.items() if tokens}


def token_sum_weights(tokens_of_episode: dict[str, int]) -> dict[str, float]:
    """Weigh all tokens by 1: verl's token-sum. Before clipping, an update's gradient grows with its token count."""
    return {name: 1.0 for name, tokens in tokens_of_episode.items() if tokens}


def constant_weights(tokens_of_episode: dict[str, int], length: int) -> dict[str, float]:
    """Weigh all tokens by 1 / (number of episodes x a fixed `length` in tokens).

    Dr. GRPO (Liu et al. 2025, arXiv:2503.20783): a wrong answer gains nothing by being longer. This is verl's
    seq-mean-token-sum-norm, or, with a length of 1, its seq-mean-token-sum.
    """
    episodes = sum(1 for tokens in tokens_of_episode.values() if tokens)
    return {name: 1.0 / (episodes * length) for name, tokens in tokens_of_episode.items() if tokens}
