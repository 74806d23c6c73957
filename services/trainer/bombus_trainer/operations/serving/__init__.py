"""A run of training operations, served: what waits is executed in a fair order, and survives the trainer."""
