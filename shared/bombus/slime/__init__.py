"""slime's hook files, run against a hive: the modules that they import, their options, and the loop that calls them."""
