"""Answers that were written down: whole ones are found again, damaged ones are asked once more."""

from lapcli.evaluation.harness.journal import Journal


def test_a_damaged_line_is_as_if_it_had_not_been_written(tmp_path):
    journal = Journal(tmp_path)
    for number in range(4):
        journal.add(f"key {number}", {"passed": True, "tokens": [number, 25]})
    journal.close()
    file = tmp_path / "process-0.jsonl"
    lines = file.read_text().splitlines()
    lines[1] = lines[1].replace("25", "26")
    lines[2] = lines[2].replace("key 2", "key 7")
    file.write_text("\n".join(lines) + "\n")
    found = Journal(tmp_path).read()
    assert found == {f"key {number}": {"passed": True, "tokens": [number, 25]} for number in (0, 3)}
