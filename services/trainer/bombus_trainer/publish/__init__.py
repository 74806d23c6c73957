"""What a step leaves behind: checkpoints, and weights for the replicas."""
