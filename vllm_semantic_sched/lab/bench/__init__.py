"""Load tests on the real engine: workload, client, metrics, comparison of schedulers."""
