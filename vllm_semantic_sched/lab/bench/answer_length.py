"""A logits processor that ends every answer at the length that the benchmark chose for it.

Only the benchmark's servers load it (`vllm serve --logits-processors`), all schedulers alike. The
length travels in `vllm_xargs`, under a key that neither `policy/` nor `engine/` reads: a scheduler
learns no more about it than about the length of a real answer.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from vllm_semantic_sched.lab.bench.workload import ANSWER_FIELD


class _Answer(NamedTuple):
    length: int
    end_token: int
    forbidden: tuple[int, ...]
    written: Sequence[int]  # vLLM's own list of the output tokens, which grows with every step


class AnswerLength(LogitsProcessor):
    """For requests with `vllm_xargs: {bench_answer: [length, end token]}`: forbids the end tokens
    up to the last position of `length` and makes the end token certain there. All other logits
    stay. Counts output tokens, so that a request that is computed again ends where it should."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._answers: dict[int, _Answer] = {}  # by row of the batch
        self._ending: set[int] = set()
        self._forbidden = self._forced = self._places([])

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError unless the field is absent or `[length, end token]`."""
        given = (sampling_params.extra_args or {}).get(ANSWER_FIELD)
        if given is None:
            return
        valid = isinstance(given, list) and len(given) == 2
        if not valid or not all(type(value) is int for value in given) or given[0] < 1:
            raise ValueError(f"{ANSWER_FIELD} must be [length, end token], got {given!r}")

    def is_argmax_invariant(self) -> bool:
        return False  # it decides whether the end token is sampled

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


def _new_answer(
    params: SamplingParams, _prompt: list[int] | None, written: list[int]
) -> _Answer | None:
    given = (params.extra_args or {}).get(ANSWER_FIELD)
    if given is None:
        return None
    length, end_token = given
    return _Answer(length, end_token, tuple({*params.all_stop_token_ids, end_token}), written)
