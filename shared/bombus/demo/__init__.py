"""`bombus demo`: a client like any other, with a display. Nothing in here is known to the hive."""
