"""The web page: what a hive does and how its runs learn, live and at every earlier position of the log."""
