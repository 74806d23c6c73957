"""Random histories of simulated harnesses, in three dialects, through real gateways: nothing sampled is lost."""
