import sys

from vllm_semantic_sched.cli import main

sys.exit(main())
