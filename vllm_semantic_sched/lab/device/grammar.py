"""Structured outputs on the emulated device: it obeys the masks of vLLM's grammars."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.structured_output.backend_types import StructuredOutputBackend
from vllm.v1.structured_output.request import get_structured_output_key

from vllm_semantic_sched.lab.device.answers import Answer


def allowed_tokens(mask: Any, vocabulary: int) -> Sequence[int]:
    """The tokens of one row of a bit mask of 32-bit integers."""
    if (mask == -1).all():
        return range(vocabulary)
    bits = np.unpackbits(np.asarray(mask).view(np.uint8), bitorder="little")
    tokens: list[int] = np.flatnonzero(bits[:vocabulary]).tolist()
    return tokens


def constrained_tokens(
    answer: Answer, params: SamplingParams, backend: StructuredOutputBackend
) -> list[int]:
    """The answer under a grammar of its own, which begins after the reasoning."""
    assert params.structured_outputs is not None
    kind, text = get_structured_output_key(params.structured_outputs)
    grammar = backend.compile_grammar(kind, text, stop_token_ids=params.all_stop_token_ids)
    mask = backend.allocate_token_bitmask(1)
    tokens = answer.tokens(answer.reasoning)
    while not grammar.is_terminated() and len(tokens) < (params.max_tokens or 0):
        grammar.fill_bitmask(mask, 0)
        allowed = allowed_tokens(mask[0].numpy(), answer.vocabulary)
        tokens.append(answer.token(len(tokens), allowed))
        grammar.accept_tokens("", tokens[-1:])
    return tokens
