"""The conversations of episodes: what a request extends, by what was sampled before."""
