"""Reads a server's event log: when each request ran, and how long it waited."""
