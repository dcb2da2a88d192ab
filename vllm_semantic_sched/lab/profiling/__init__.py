"""Measures on a live engine what work costs, and fits an engine profile to the times."""
