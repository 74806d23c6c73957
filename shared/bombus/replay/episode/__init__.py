"""`bombus replay episode`: one episode in readable form, as text or HTML."""
