"""Where the data folder is."""

from vllm_semantic_sched.sim.data_folder import data_root


def test_data_root_follows_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("SEMSCHED_DATA", str(tmp_path))
    assert data_root() == tmp_path
    monkeypatch.setenv("SEMSCHED_DATA", str(tmp_path / "absent"))
    assert data_root() is None
