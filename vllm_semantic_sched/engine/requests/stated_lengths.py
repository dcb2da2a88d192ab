"""What a request's sampling parameters say about the length of its answer."""

from __future__ import annotations

import re
from typing import Any

from vllm_semantic_sched.policy.facts.job import FREE_LENGTH, StatedLength

# Longer lists of choices are not read: it would delay the request.
_MOST_CHOICES = 1024
_MOST_CHARACTERS = 16_384

_LITERAL = r'"(?:[^"\\]|\\.)*"'
# The grammar that vLLM's frontend makes of a list of choices (`choice_as_grammar`).
_CHOICES = re.compile(rf"root ::= {_LITERAL}(?: \| {_LITERAL})*\s*")
_ONE_CHOICE = re.compile(_LITERAL)


def stated_length(sampling_params: Any) -> StatedLength:
    """Bounds on the output tokens, from vLLM's `SamplingParams`.

    - `min_tokens` is a lower bound. `ignore_eos` without stop strings, stop tokens, repetition
      detection or a grammar makes `max_tokens` the exact length.
    - A list of choices (`structured_outputs.choice`, or the grammar made of it) is an upper bound:
      the bytes of the longest choice and one token that ends it. Other grammars are not read.

    vLLM splits a request with `n` into `n` requests before, so each has the length of one answer.
    """
    if sampling_params is None:
        return FREE_LENGTH
    shortest = sampling_params.min_tokens or 0
    structured = sampling_params.structured_outputs
    if structured is not None:
        longest = _longest_choice(structured)
        return StatedLength(min(shortest, longest) if longest else shortest, longest)
    limit = sampling_params.max_tokens
    endless = (
        sampling_params.ignore_eos
        and not sampling_params.stop
        and not sampling_params.stop_token_ids
        and getattr(sampling_params, "repetition_detection", None) is None
    )
    if endless and limit is not None:
        return StatedLength(limit, limit)
    return StatedLength(shortest) if shortest else FREE_LENGTH


def _longest_choice(structured: Any) -> int | None:
    """Most output tokens of an answer from a list of choices; None for any other grammar."""
    choices, grammar = structured.choice, structured.grammar
    if choices:
        short = len(choices) <= _MOST_CHOICES
        return max(map(_most_tokens, choices)) + 1 if short else None
    short = isinstance(grammar, str) and len(grammar) <= _MOST_CHARACTERS
    if short and _CHOICES.fullmatch(grammar) is not None:
        # The quotes that are counted leave room for the token that ends the answer.
        return max(_most_tokens(found.group()) for found in _ONE_CHOICE.finditer(grammar))
    return None


def _most_tokens(text: str) -> int:
    # A token has at least one byte, and a character at most four.
    return len(text) if text.isascii() else 4 * len(text)
