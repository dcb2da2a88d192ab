"""`python -m vllm_semantic_sched.cli`, where the command `semsched` is not on the path."""

import sys

from vllm_semantic_sched.cli import main

sys.exit(main())
