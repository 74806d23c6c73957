"""`bombus demo`: an ordinary client with a display. Nothing in the hive is specific to it."""
