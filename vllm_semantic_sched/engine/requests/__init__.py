"""From the arrival of a request to its end."""
