"""The seam to vLLM: the only package that imports it."""
