"""Overload control: admission, promises, shedding, refusals."""
