"""Ready-made tasks by name, such as `reasoning_gym:leg_counting`, and their environments."""
