"""Labeled texts: tables are read back as written, levels by number or by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.lab.evaluation.examples import (
    Example,
    read_examples,
    write_examples,
)

printable = st.text(st.characters(codec="utf-8", exclude_characters="\r\x00"), min_size=1)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return tmp_path_factory.mktemp("tables") / "examples.csv"


@given(
    st.lists(
        st.builds(
            Example,
            printable.filter(str.strip),
            st.integers(0, 4),
            st.none() | st.integers(1, 5000),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_written_examples_read_back_the_same(table, examples):
    write_examples(examples, table)
    assert read_examples(table) == examples


def test_tables_of_spreadsheets(tmp_path):
    path = tmp_path / "messages.csv"
    path.write_bytes("\ufefftext,level,output_tokens\nhello,3.0,\nthere,,12.0\n".encode())
    assert read_examples(path) == [Example("hello", 3), Example("there", None, 12)]


def test_a_domain_reads_names_and_numbers_its_own_way(tmp_path):
    class Domain:
        def level_of(self, label):
            if label not in ("high", "1"):
                raise ValueError(f"{label!r} is not a level; valid: high, 1")
            return 0

    path = tmp_path / "messages.csv"
    path.write_text("text,level\nhello,high\nthere,1.0\n")
    assert [one.level for one in read_examples(path, Domain())] == [0, 0]
    path.write_text("text,level\nhello,2\n")
    with pytest.raises(ValueError, match=r"line 2, column level: '2' is not a level; valid: high"):
        read_examples(path, Domain())
