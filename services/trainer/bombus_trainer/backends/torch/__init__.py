"""The embedded backend: transformers' models on packed tries, on one device."""
