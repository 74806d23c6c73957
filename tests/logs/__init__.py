"""Real logs of every released version, which must always fold. `record.py` records that of the next one."""
