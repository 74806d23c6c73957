"""A hive on one machine: what `bombus up` keeps running, what `bombus install` makes, what `bombus doctor` checks."""
