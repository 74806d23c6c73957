"""`bombus replay episode`: one episode as a person reads it, as text or HTML."""
