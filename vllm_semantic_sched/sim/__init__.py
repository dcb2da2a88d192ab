"""A discrete-event simulator that drives the policy core which also serves."""
