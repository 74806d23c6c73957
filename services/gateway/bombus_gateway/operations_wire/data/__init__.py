"""The inputs and outputs of losses: forward and forward_backward in both dialects."""
