"""The swarm API: the routes of AgentJet's contract, and additional routes for our own SDK."""
