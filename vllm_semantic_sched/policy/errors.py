"""What the policy core raises."""


class PolicyError(ValueError):
    """A policy or profile that cannot be used. The message names the field and what is valid."""


class IllegalTransition(RuntimeError):
    """A job was moved between two states that the state machine does not connect."""
