"""Makes `jobs`, beside this file, importable from the test modules; sets hypothesis up."""

from hypothesis import settings

# A busy machine must not fail a test by its slowness, and the same code gets the same verdict
# each time. scripts/test.sh --hypothesis-profile random looks for new examples.
settings.register_profile("same-examples", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.load_profile("same-examples")
