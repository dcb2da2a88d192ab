"""A logits processor that ends every answer at the length that the benchmark chose for it, for both
of vLLM's model runners.

Only the benchmark's servers load it (`vllm serve --logits-processors`), all schedulers alike. The
length travels in `vllm_xargs`, under a key that neither `policy/` nor `engine/` reads: a scheduler
learns no more about it than about the length of a real answer.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from vllm_semantic_sched.lab.bench.workload import ANSWER_FIELD

try:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SecondInterface
except ImportError:  # a vLLM whose second runner takes no processors of others

    class SecondInterface:  # type: ignore[no-redef]
        """Stands in for the interface, which nothing calls then."""

        pass


class _Answer(NamedTuple):
    length: int
    end_token: int
    forbidden: tuple[int, ...]
    written: Sequence[int]  # vLLM's own list of the output tokens, which grows with every step


class AnswerLength(LogitsProcessor, SecondInterface):  # type: ignore[misc]
    """For requests with `vllm_xargs: {bench_answer: [length, end token]}`: forbids the end tokens
    up to the last position of `length` and makes the end token certain there. All other logits
    stay. Counts output tokens, so that a request that is computed again ends where it should.

    vLLM chooses a model runner and checks that this class has that runner's interface. What it
    makes of it has that interface alone."""

    def __new__(cls, vllm_config: VllmConfig, *given: Any) -> Any:  # noqa: D102 - a constructor
        # The first runner gives a device and whether memory is pinned, the second its state.
        if len(given) == 2:
            return OfFirstRunner(*given)
        return OfSecondRunner(*given)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError unless the field is absent or `[length, end token]`."""
        given = (sampling_params.extra_args or {}).get(ANSWER_FIELD)
        if given is None:
            return
        valid = isinstance(given, list) and len(given) == 2
        if not valid or not all(type(value) is int for value in given) or given[0] < 1:
            raise ValueError(f"{ANSWER_FIELD} must be [length, end token], got {given!r}")


class OfFirstRunner(LogitsProcessor):
    """Follows the rows of the batch, which move, on the host."""

    def __init__(self, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._answers: dict[int, _Answer] = {}  # by row of the batch
        self._ending: set[int] = set()
        self._forbidden = self._forced = self._places([])

    def is_argmax_invariant(self) -> bool:
        """False: it decides whether the end token is sampled."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch, and find the rows that sample their last token in this step."""
        changed = process_dict_updates(self._answers, batch_update, _new_answer)
        answers = self._answers.items()
        ending = {row for row, answer in answers if len(answer.written) + 1 >= answer.length}
        if not changed and ending == self._ending:
            return
        self._ending = ending
        self._forced = self._places((row, self._answers[row].end_token) for row in ending)
        self._forbidden = self._places(
            (row, token)
            for row, answer in answers
            if row not in ending
            for token in answer.forbidden
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Change the end tokens' logits in place; `logits` is [rows, vocabulary]."""
        if self._answers:
            logits[self._forbidden] = -torch.inf
            logits[self._forced] = torch.finfo(logits.dtype).max
        return logits

    def _places(self, places: Iterable[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        rows, tokens = torch.tensor(list(places), dtype=torch.int64).reshape(-1, 2).unbind(1)
        return rows.to(self._device), tokens.to(self._device)


class OfSecondRunner(SecondInterface):
    """Keeps length and end tokens by slot on the device, and counts from the positions there: the
    host is a step ahead and knows no tokens yet. With speculative decoding a request has several
    rows, each with a position of its own."""

    def __init__(self, states: Any) -> None:
        self._states = states
        # The length (0: none), the end token, all tokens that end an answer; the last repeats.
        self._host = torch.zeros((states.max_num_reqs, 2), dtype=torch.int64)
        self._by_slot = self._host.to(states.device)
        self._changed = False

    def add_request(self, slot: int, params: SamplingParams) -> bool:
        """Overwrite what the slot's last request had; False: none of its logits change."""
        answer = _new_answer(params, None, [])
        row = [0] if answer is None else [answer.length, answer.end_token, *answer.forbidden]
        missing = len(row) - self._host.shape[1]
        if missing > 0:
            more = self._host[:, -1:].expand(-1, missing)
            self._host = torch.cat([self._host, more], dim=1)
        row += row[-1:] * -missing
        self._host[slot] = torch.tensor(row)
        self._changed = True
        return answer is not None

    def apply_staged_writes(self) -> None:
        """Bring new requests to the device, before the step that computes them."""
        if self._changed:
            self._by_slot = self._host.to(self._states.device, copy=True)
            self._changed = False

    def apply(self, logits: torch.Tensor, context: Any) -> torch.Tensor:
        """Change the end tokens' logits in place; `logits` is [rows, vocabulary]."""
        slots = context.expanded_idx_mapping.long()
        length = self._by_slot[slots, :1]
        ends = self._by_slot[slots, 1:]
        prompt = self._states.prompt_len.gpu[slots].long()
        number = (context.pos.long() + 2 - prompt)[:, None]  # of the token to sample, from 1
        wanted = length > 0
        before = logits.gather(1, ends)
        logits.scatter_(1, ends, torch.where(wanted, -torch.inf, before))
        now = torch.where(wanted & (number >= length), torch.finfo(logits.dtype).max, -torch.inf)
        own = ends[:, :1]
        return logits.scatter_(1, own, torch.maximum(logits.gather(1, own), now))


def _new_answer(
    params: SamplingParams, _prompt: list[int] | None, written: list[int]
) -> _Answer | None:
    given = (params.extra_args or {}).get(ANSWER_FIELD)
    if given is None:
        return None
    length, end_token = given
    return _Answer(length, end_token, tuple({*params.all_stop_token_ids, end_token}), written)
