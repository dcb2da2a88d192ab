"""`semsched profile` on a real engine, over a tiny grid."""

from pathlib import Path

import pytest

from vllm_semantic_sched.policy.profile.formula import load_profile

pytestmark = pytest.mark.engine


def test_profile_is_measured_written_and_loaded(model: Path, tmp_path: Path, run_offline) -> None:
    path = tmp_path / "out" / "tiny.yaml"
    options = "--dtype float32 --enforce-eager --gpu-memory-utilization 0.7 --block-size 32"
    options += " --kv-cache-memory-bytes 268435456 --num-gpu-blocks-override 64 --max-num-seqs 4"
    command = ["-m", "vllm_semantic_sched.cli", "profile", "--quiet", "--output", path]
    command += ["--max-tokens", "128", "--max-batch", "2", "--repeats", "1"]
    run_offline(*command, "--", model, *options.split())
    profile = load_profile(path)
    environment = profile.environment
    assert environment is not None and profile.ranges is not None and profile.batch is not None
    assert (environment.block_size, environment.dtype) == (32, "float32")
    assert environment.kv_bytes_per_token == 4 * 2 * 2 * 64 * 4
    assert profile.ranges.prefill_tokens == (16, 127)
    assert profile.ranges.decode_batch == (1, 2)
    assert str(model) not in path.read_text()
    # Wide bounds: another program may be running.
    assert 1e-4 < profile.gamma2 < 0.5
    assert 1e-4 < profile.prefill_alone(128) < 2.0
    assert set(profile.residuals) == {"step", "decode", "load", "save"}
