"""Text to urgency level and output-length bucket: model, service beside the engine, training.

See docs/predictor.md. Only the modules here import torch and transformers.
"""
