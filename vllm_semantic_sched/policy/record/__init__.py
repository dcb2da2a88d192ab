"""What happened to requests: states, waits, seats. Listens only; nothing is decided here."""
