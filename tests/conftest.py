"""Makes `jobs`, beside this file, importable from the test modules."""
