"""More than one engine."""
