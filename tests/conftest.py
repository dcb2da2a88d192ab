"""Makes `jobs`, beside this file, importable from the test modules."""

from hypothesis import settings

# A busy machine must not fail a test by its slowness.
settings.register_profile("any-speed", deadline=None)
settings.load_profile("any-speed")
