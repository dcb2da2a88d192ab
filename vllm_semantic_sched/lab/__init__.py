"""Figures, models and pages: nothing that serves imports this."""
