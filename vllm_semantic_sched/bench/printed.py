"""Numbers as the paper prints them (arXiv 2506.12204), in seconds per output token."""

from __future__ import annotations

# Rows urgency 0 to 4, then all; columns full batching, then immediate processing, each at
# predictor latencies 0.001, 0.01, 0.1, 1.0 s.
TABLE_1 = (
    (0.07, 0.09, 0.18, 0.35, 0.01, 0.08, 0.16, 0.37),
    (0.13, 0.35, 0.68, 1.37, 0.01, 0.34, 0.68, 1.42),
    (0.21, 0.63, 1.25, 2.51, 0.02, 0.62, 1.24, 2.55),
    (0.29, 0.89, 1.75, 3.51, 0.04, 0.91, 1.83, 3.72),
    (0.37, 1.15, 2.29, 4.57, 0.15, 1.15, 2.33, 4.70),
    (0.21, 0.61, 1.23, 2.46, 0.04, 0.61, 1.25, 2.56),
)
# The same with columns by batch size 4, 16, 32, 64.
TABLE_2 = (
    (0.07, 0.07, 0.08, 0.08, 0.06, 0.07, 0.07, 0.07),
    (0.33, 0.34, 0.35, 0.35, 0.33, 0.33, 0.34, 0.33),
    (0.60, 0.61, 0.62, 0.62, 0.60, 0.60, 0.60, 0.60),
    (0.87, 0.88, 0.90, 0.91, 0.87, 0.87, 0.88, 0.87),
    (1.13, 1.14, 1.17, 1.17, 1.13, 1.14, 1.14, 1.14),
    (0.58, 0.59, 0.60, 0.60, 0.58, 0.58, 0.59, 0.58),
)
# At error rates 0.1 and 0.9, by row name; what the text of section 4.1 says of the figures.
FIGURE_2A = {"0": (0.02, 0.07), "1": (0.03, 0.22), "all": (0.13, 0.12)}
FIGURE_2B = {
    "0": (0.01, 0.01),
    "1": (0.03, 0.04),
    "2": (0.08, 0.11),
    "3": (0.18, 0.21),
    "4": (0.30, 0.33),
}
# Urgency 0 at 100 concurrent requests: how many times as long as under semantic scheduling.
FIGURE_2C = {"HPJF": 1.7, "SJF": 6.1, "FCFS": 8.7, "semantic": 0.08}
FIGURE_2D_AT_MOST = 9.1
# (profile, gap): urgency 0 under semantic scheduling, s per token; speed-up at most.
FIGURE_4 = {
    ("a100-qwen1.5-7b", 0.1): (0.18, 6.5),
    ("a100-qwen1.5-7b", 1.0): (0.16, 6.6),
    ("a5000-qwen1.5-4b", 0.1): (0.37, 6.8),
    ("a5000-qwen1.5-4b", 1.0): (0.32, 7.0),
}
# (profile, gap): urgency 0 under semantic scheduling at most, s per token; speed-up over FCFS at
# most. Section 4.2 for the first two rows (0.32 there is the least), appendix A.2 for the others,
# where the first line says A100 again and can only mean the A5000.
FIGURES_3_AND_5 = {
    ("a100-qwen1.5-4b", 0.1): (15.52, 19.2),
    ("a100-qwen1.5-4b", 1.0): (None, 167.3),
    ("a5000-qwen1.5-4b", 0.1): (9.47, 49.7),
    ("a5000-qwen1.5-4b", 1.0): (6.51, 166.7),
    ("a100-qwen1.5-7b", 0.1): (12.87, 23.5),
    ("a100-qwen1.5-7b", 1.0): (10.32, 208.4),
    ("a5000-qwen1.5-7b", 0.1): (23.80, 13.4),
    ("a5000-qwen1.5-7b", 1.0): (22.47, 270.2),
}
# "Priority Scheduler vs FIFO Under Mixed Traffic": p99 TTFT in s of premium, standard and
# background; shares of kept promises of premium and standard; tokens per second; preemptions per
# minute.
MIXED_LOAD = {
    "FIFO": (2.1, 2.1, 2.1, 0.72, 0.72, 4200, 0.0),
    "priority": (0.28, 0.65, 8.2, 0.981, 0.913, 4100, 0.0),
    "+ preemption": (0.195, 0.52, 12.5, 0.996, 0.958, 3950, 12.4),
    "+ SLO": (0.185, 0.48, 18.0, 0.999, 0.972, 3900, 8.7),
}
