"""Operates a running server from outside, over HTTP or by signals; makes the reference tables."""
