"""An engine profile for tests of preemption with KV swap."""

# Copies cheap enough to be the plan of least cost even for a hundred tokens.
CHEAP_COPIES = """
hardware: any
model: small
source: made up
alpha1: 0.0
alpha2: 1.0e-4
beta_load: 1.0e-6
beta_save: 1.0e-6
gamma1: 0.0
gamma2: 3.0e-3
"""
