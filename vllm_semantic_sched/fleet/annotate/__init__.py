"""Level and expected length of a request for gateways that choose among servers."""
