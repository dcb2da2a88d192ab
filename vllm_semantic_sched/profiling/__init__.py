"""Measures on a live engine what its work costs, and fits the coefficients of a profile."""
