"""Data that decisions use: jobs, tiers, capacity, profiles, predictions."""
