"""The swarm API: AgentJet's contract, and our own SDK on the same routes."""
