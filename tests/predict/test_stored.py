import json
import shutil

from vllm_semantic_sched.predict import SHIPPED_WEIGHTS, stored_buckets
from vllm_semantic_sched.predict.instant import InstantReader


def test_shipped_buckets_are_read_without_torch() -> None:
    assert stored_buckets(None) == InstantReader.load().length_buckets


def test_incomplete_or_damaged_folder_has_no_buckets(tmp_path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(SHIPPED_WEIGHTS, folder)
    assert stored_buckets(str(folder)) is not None
    config = folder / "config.json"
    settings = json.loads(config.read_text())
    for damaged in ("{", json.dumps({**settings, "length_bucket_means": None}), "{}"):
        config.write_text(damaged)
        assert stored_buckets(str(folder)) is None
    config.write_text(json.dumps(settings))
    (folder / "tokenizer.json").unlink()
    assert stored_buckets(str(folder)) is None
    assert stored_buckets("somebody/a-model-of-the-hub") is None
