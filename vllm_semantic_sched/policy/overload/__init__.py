"""Overload control: admission, SLOs, shedding, refusals."""
