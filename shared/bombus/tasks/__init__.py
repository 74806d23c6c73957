"""Tasks that are ready to be played, by name, such as `reasoning_gym:leg_counting`, and their environments."""
