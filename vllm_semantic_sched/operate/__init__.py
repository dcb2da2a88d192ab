"""Operates a running server from outside, over HTTP or by signals."""
