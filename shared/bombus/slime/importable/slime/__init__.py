"""Stand-ins for the names that slime's hook files import, for use where slime itself is not installed."""
