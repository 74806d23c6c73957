"""A whole hive in virtual time from one seed: the real core and fold, and small models of everything around them.

`python -m tests.sim --seeds 1000` tries many seeds, `--seed K` replays one. In the manner of TigerBeetle's VOPR and
FoundationDB's simulation.
"""
