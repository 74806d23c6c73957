"""How long tests wait for what will surely come."""

# Ends the wait of a test that fails. The machines that run the tests may stand still for several seconds.
PATIENCE_S = 60.0
