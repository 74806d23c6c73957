"""The training data of an ended episode: its calls as token sequences, and the advantages computed from its rewards."""
