"""Urgency-first scheduling for vLLM.

vllm serve MODEL --scheduler-cls vllm_semantic_sched.SemanticScheduler
"""

from typing import TYPE_CHECKING, Any

from vllm_semantic_sched.policy.overload.refusal import Refusal, refusal_of

if TYPE_CHECKING:
    from vllm_semantic_sched.engine.http.middleware import Middleware
    from vllm_semantic_sched.engine.scheduler import SemanticScheduler

__version__ = "0.2.0"
__all__ = ["Middleware", "Refusal", "SemanticScheduler", "__version__", "refusal_of"]


def __getattr__(name: str) -> Any:
    # Late, so that the policy core and the command line work without vLLM.
    if name not in ("Middleware", "SemanticScheduler"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_semantic_sched.engine.version import check_installed_vllm

    check_installed_vllm()
    if name == "SemanticScheduler":
        from vllm_semantic_sched.engine.scheduler import SemanticScheduler

        return SemanticScheduler
    from vllm_semantic_sched.engine.http.middleware import Middleware

    return Middleware
