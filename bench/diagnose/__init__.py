"""How often `bombus diagnose` finds a fault, and how often it raises a false alarm."""
