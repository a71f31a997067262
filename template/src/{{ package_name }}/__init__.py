"""Distributed training that runs the same on one GPU and on many machines."""
