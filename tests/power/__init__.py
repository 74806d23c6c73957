"""Power cuts: what was acknowledged is there after each of them (`bombus up --durability power`)."""
