"""Data that decisions use: jobs, capacity, predictions."""
