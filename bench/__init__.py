"""What things cost. `python -m bench` runs all of it; each part also runs alone. Never part of the tests."""
