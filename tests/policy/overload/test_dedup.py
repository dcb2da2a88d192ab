"""Keys for deduplication."""

import pytest

from vllm_semantic_sched.policy.overload.dedup import BadKey, read_key


def test_key_is_read() -> None:
    assert read_key({"dedup_key": "page 7"}) == "page 7"
    for nothing in (None, {}, {"urgency": 1}, {"dedup_key": None}, "dedup_key"):
        assert read_key(nothing) is None


@pytest.mark.parametrize("key", ["", "x" * 129, 7, ["a"], {"a": 1}, True])
def test_unusable_key_raises(key) -> None:
    with pytest.raises(BadKey, match="dedup_key"):
        read_key({"dedup_key": key})
