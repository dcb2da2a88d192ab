"""Trains predictors: example texts, the training loop, calibration. `texts/` holds the wordings."""
