"""What running jobs use, told now and then instead of at every token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.facts.profile import EngineProfile

# Tokens between two visits. A running job comes up once in so many steps, so that 256 of them cost
# four visits a step.
AHEAD = 64


@dataclass(slots=True)
class _Stint:
    charged: int  # tokens, prompt and output, that have been charged
    prefill: int  # tokens to compute before the first output token
    generated: int  # output tokens at the start


class Meter:
    """Follows jobs while they have a seat.

    A job is visited before it can have outgrown what was told about it: KV told is never less
    than KV held, by up to `AHEAD` tokens more. Engine time is charged once it was used.

    Args:
        charge: told engine seconds that a job used; negative for a prefill that was charged on
            admission and did not come about.
        hold: told the tokens of KV that a job holds at most until its next visit.

    Attributes:
        tokens_per_step: output tokens of one job in a step at most (more than 1 with speculative
            decoding).
        profile: as given; may be changed.
    """

    def __init__(
        self,
        profile: EngineProfile,
        charge: Callable[[Job, float], None],
        hold: Callable[[Job, int], None],
    ) -> None:
        self.profile = profile
        self.tokens_per_step = 1
        self._charge = charge
        self._hold = hold
        self._step = 0
        self._stints: dict[Job, _Stint] = {}
        self._due: AddressableHeap[Job] = AddressableHeap()

    def __len__(self) -> int:
        """Jobs with a seat that are followed."""
        return len(self._stints)

    def admission_seconds(self, job: Job) -> float:
        """Engine time to get a job ready to decode: load and prefill."""
        return self.profile.load(job.swapped) + self.profile.prefill(job.swapped, job.tokens)

    def start(self, job: Job) -> None:
        """A job got a seat; its admission has been charged."""
        self._stints[job] = _Stint(job.tokens, job.tokens, job.generated)
        self._tell(job)

    def stop(self, job: Job) -> None:
        """A job left its seat; its `generated` and `computed` are up to date."""
        stint = self._stints.get(job)
        if stint is None:
            return
        seconds = self._decode_seconds(job, stint)
        if job.generated == stint.generated and job.computed < stint.prefill:
            seconds -= self.profile.prefill(job.computed, stint.prefill)
        del self._stints[job]
        self._due.discard(job)
        self._charge(job, seconds)

    def step(self, observe: Callable[[Job], None]) -> None:
        """One engine step has passed.

        Args:
            observe: updates a job's `generated`.
        """
        self._step += 1
        while (job := self._due.peek()) is not None and self._due.key(job) <= self._step:
            observe(job)
            self._tell(job)

    def _tell(self, job: Job) -> None:
        stint = self._stints[job]
        self._charge(job, self._decode_seconds(job, stint))
        stint.charged = job.tokens
        self._hold(job, job.tokens + AHEAD)
        self._due.push(job, self._step + max(1, AHEAD // self.tokens_per_step))

    def _decode_seconds(self, job: Job, stint: _Stint) -> float:
        # A decode step's fixed time is shared by those that run in it.
        price = self.profile.gamma1 * job.tokens + self.profile.gamma2 / len(self._stints)
        return (job.tokens - stint.charged) * price
