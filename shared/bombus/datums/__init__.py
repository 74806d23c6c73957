"""The training data of an ended episode: its calls as token sequences, and advantages from its rewards."""
