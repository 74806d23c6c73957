"""External inference servers: clients register them and sync a model's weights to them."""
