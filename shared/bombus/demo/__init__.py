"""`bombus demo`: a client like any other, with a display. The hive knows nothing about it."""
