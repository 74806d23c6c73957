"""slime's hook files, run against a hive: what they import, their options, and the loop that calls them."""
