"""Adapters between the client and engines that people run, each importable where its engine is installed."""
