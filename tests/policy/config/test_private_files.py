"""Files that only their user can read."""

from vllm_semantic_sched.policy.config import private_files


def test_folder_of_somebody_else_is_not_used(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(private_files.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = private_files.own_folder()
    assert folder is not None and folder.parent == tmp_path
    folder.chmod(0o755)
    assert private_files.own_folder() is None
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert private_files.own_folder() is None
