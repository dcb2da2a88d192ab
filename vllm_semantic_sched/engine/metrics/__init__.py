"""Counters, histograms and gauges, from the scheduler to the server's /metrics."""
