"""Commands for users of Atropos."""
