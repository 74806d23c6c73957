"""What Tinker's REST client asks of checkpoints and sessions, beside training: downloads, lifetimes, searches.

It knows sessions, models and checkpoints from the folded log.
"""
