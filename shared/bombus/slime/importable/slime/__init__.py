"""The names that slime's hook files import, where slime itself is not installed."""
