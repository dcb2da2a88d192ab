"""KV of preempted requests: what is saved to the host, loaded again, or recomputed."""
