"""What interrupted a run, and which of its nodes were slow."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

from manynodes.base.reading import parse_form
from manynodes.checkpointing import incidents
from manynodes.checkpointing.owner import Record, text, this_process
from manynodes.reporting.tables import incident_table, write_table

OWNER = Record("0" * 16, "Slurm job 7", "n1", this_process())


def test_a_checkout_that_changed_meanwhile_is_noted(tmp_path: Path) -> None:
    incidents.note_checkout(tmp_path, "a", "a")
    assert incidents.read(tmp_path) == []
    incidents.note_checkout(tmp_path, "a", "b")
    (found,) = incidents.read(tmp_path)
    assert found.text == "the checkout changed from commit a to b meanwhile"


def test_incidents_are_read_in_order_and_each_is_one_line(tmp_path) -> None:
    incidents.add(tmp_path, incidents.INTERRUPTION, "rank 1 on n2\nwas ended \x1b[31m" + "x" * 1000)
    incidents.add(tmp_path, incidents.SLOW, "n2 is slow")
    first, second = incidents.read(tmp_path)
    assert first.text.startswith("rank 1 on n2 was ended")
    assert first.text.isprintable()
    assert len(first.text) <= incidents.LONGEST
    assert (second.kind, second.text) == (incidents.SLOW, "n2 is slow")
    for line in (tmp_path / incidents.FILE).read_bytes().splitlines():
        parse_form(line, "incident")


def test_lines_that_are_no_incidents_are_left_out(tmp_path) -> None:
    incidents.add(tmp_path, incidents.SLOW, "n2 is slow")
    # A writer that was killed leaves half a line.
    with (tmp_path / incidents.FILE).open("a") as file:
        file.write('[]\n{"time": "yesterday", "kind": "slow", "text": ""}\n{"time": "2026-')
    assert [each.text for each in incidents.read(tmp_path)] == ["n2 is slow"]
    (tmp_path / incidents.FILE).unlink()
    (tmp_path / incidents.FILE).mkdir()
    assert incidents.read(tmp_path) == []
    incidents.add(tmp_path, incidents.SLOW, "cannot be written, which harms nobody")
    incidents.add(tmp_path / "nothing", incidents.SLOW, "no folder")
    assert not (tmp_path / "nothing").exists()


def test_an_owner_that_ended_without_a_word_is_noted_once(tmp_path) -> None:
    lost = time.time_ns() - 60 * 10**9
    incidents.note_lost(tmp_path, replace(OWNER, released=True), lost)
    assert incidents.read(tmp_path) == []
    incidents.note_lost(tmp_path, OWNER, lost)
    incidents.note_lost(tmp_path, OWNER, lost)
    (found,) = incidents.read(tmp_path)
    assert found.text.startswith("Slurm job 7 on n1 was not heard of after 20")
    incidents.forget(tmp_path)
    assert incidents.read(tmp_path) == []
    # `launch` has told why it ended.
    incidents.add(tmp_path, incidents.INTERRUPTION, "rank 1 was ended by SIGKILL")
    incidents.note_lost(tmp_path, OWNER, lost)
    assert len(incidents.read(tmp_path)) == 1


def test_an_owner_whose_launch_was_killed_is_noted(tmp_path) -> None:
    """Its ranks have saved and released the run."""
    lost = time.time_ns() - 60 * 10**9
    (tmp_path / "epoch=0003_step=000000.safetensors").touch()
    incidents.note_lost(tmp_path, replace(OWNER, released=True), lost)
    (found,) = incidents.read(tmp_path)
    assert found.text.startswith("Slurm job 7 on n1 ended in order at 20")
    incidents.forget(tmp_path)
    (tmp_path / "finished").touch()
    incidents.note_lost(tmp_path, replace(OWNER, released=True), lost)
    assert incidents.read(tmp_path) == []


def test_a_requeued_job_notes_that_its_first_attempt_was_lost(tmp_path) -> None:
    (tmp_path / "owner.json").write_text(text(OWNER))
    os.utime(tmp_path / "owner.json", (1, 1))
    incidents.begin(tmp_path, OWNER.name, print)
    (found,) = incidents.read(tmp_path)
    assert found.text == "Slurm job 7 on n1 was not heard of after 1970-01-01T00:00:01+00:00"
    incidents.begin(tmp_path, OWNER.name, print)
    assert len(incidents.read(tmp_path)) == 1


def test_a_torn_line_swallows_nothing_and_a_pipe_keeps_nobody(tmp_path) -> None:
    (tmp_path / incidents.FILE).write_text('{"time": "2026-')
    incidents.add(tmp_path, incidents.SLOW, "after it")
    assert [each.text for each in incidents.read(tmp_path)] == ["after it"]
    (tmp_path / incidents.FILE).unlink()
    os.mkfifo(tmp_path / incidents.FILE)
    incidents.add(tmp_path, incidents.SLOW, "nobody reads it")
    assert incidents.read(tmp_path) == []


def test_what_cannot_be_written_or_changes_a_terminal_is_escaped(tmp_path) -> None:
    line = '{"time": "2026-11-23T13:58:21+00:00", "kind": "slow", "text": "a\\ud800\\u202eb\\nc"}'
    (tmp_path / incidents.FILE).write_text(line + "\n")
    (found,) = incidents.read(tmp_path)
    assert found.text == "a\\ud800\\u202eb c"
    table = incident_table("run", {"incidents": [json.loads(line)]})
    assert list(table["text"]) == [found.text]
    write_table(table, tmp_path / "incidents.csv")
