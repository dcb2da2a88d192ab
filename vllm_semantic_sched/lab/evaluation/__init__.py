"""Measures predictors on labeled texts and explains single predictions."""
