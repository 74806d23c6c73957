"""The routes of Tinker's REST client that training does not need: checkpoint downloads and lifetimes, session searches.

They read sessions, models and checkpoints from the folded log.
"""
