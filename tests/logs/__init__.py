"""Real logs of every released shape, which must fold for ever. How the next version records its own: `record.py`."""
