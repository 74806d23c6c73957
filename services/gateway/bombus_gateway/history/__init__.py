"""The conversations of episodes: matches each request with the sampled conversation that it extends."""
