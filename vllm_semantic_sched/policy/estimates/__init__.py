"""What is expected of a request: urgency, output length, engine time."""
