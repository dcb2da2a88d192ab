"""Estimates for a request: urgency, output length, engine time."""
