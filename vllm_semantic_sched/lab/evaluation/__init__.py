"""Measures predictors on labelled texts and explains single predictions."""
