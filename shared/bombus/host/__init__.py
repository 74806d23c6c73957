"""A hive on one machine: what `bombus up` runs, what `bombus install` installs, and what `bombus doctor` checks."""
