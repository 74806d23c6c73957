"""The swarm API: the routes of AgentJet's contract, and further routes for our own SDK."""
