"""Reads the event log of a server: who ran when, and who waited how long."""
