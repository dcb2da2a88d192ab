"""What happens once, before the first request."""
