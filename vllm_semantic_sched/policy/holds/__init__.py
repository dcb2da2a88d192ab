"""Less urgent decoding requests that sit out steps while a protected one runs."""
