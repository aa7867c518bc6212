"""A state folder that was damaged is refused with what is wrong; none is silently begun anew."""

from __future__ import annotations

import os
import shutil
import sqlite3

import pytest
from raising import raises_code
from serving import Numbers, Raw, run, served, serving

from treetune.errors import ResumeError, StorageError, TreetuneError, UsageError
from treetune.serve.store import Store, pack_commits
from treetune.system.access import load_signing_key

KILLED, STOPPED = "killed", "stopped"


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """The folder of a server that was killed, and of one that has stopped; each gave out three tasks."""
    folder = tmp_path_factory.mktemp("states")

    async def live():
        async with serving(Numbers(), state=folder / STOPPED, lease=600.0) as server:
            with Raw(server.address) as raw:
                for number in range(3):
                    await raw.ask(b"%d" % number, "sample", lease=600.0 if number == 2 else 0)
            shutil.copytree(folder / STOPPED, folder / KILLED)

    run(live())
    return folder


def start(folder, **options):
    async def draw():
        async with served(Numbers(), state=folder, **options) as client:
            return (await client.sample()).idx

    return run(draw())


@pytest.mark.parametrize("kind", [KILLED, STOPPED])
def test_a_folder_that_is_sound_goes_on(states, tmp_path, kind):
    shutil.copytree(states / kind, tmp_path / "state")
    assert start(tmp_path / "state") == 3


def change(sql, *values):
    def damage(folder):
        db = sqlite3.connect(folder / "server.sqlite")
        db.execute(sql, values)
        db.commit()
        db.close()

    return damage


def rewrite(name, data):
    def damage(folder):
        path = folder / name
        path.write_bytes(data(path.read_bytes()) if callable(data) else data)

    return damage


def remove(*names):
    def damage(folder):
        for name in names:
            (folder / name).unlink()

    return damage


def make_folder(name):
    def damage(folder):
        remove(name)(folder)
        (folder / name).mkdir()

    return damage


def foreign(folder):
    remove("server.sqlite")(folder)
    change("CREATE TABLE songs (name TEXT)")(folder)


def only_empty(folder):
    remove("commits")(folder)
    rewrite("server.sqlite", b"")(folder)


def change_key(value):
    return change(f"UPDATE facts SET value = {value} WHERE name = 'key'")


def scramble(data):
    return data[:100] + bytes(255 - byte for byte in data[100:])


def flip(data):
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGES = {
    "an empty database": (STOPPED, rewrite("server.sqlite", b""), "server.sqlite is empty"),
    "an empty database alone": (STOPPED, only_empty, "server.sqlite is empty"),
    "no database": (STOPPED, remove("server.sqlite"), "server.sqlite is missing"),
    "only the log": (KILLED, remove("server.sqlite", "commits"), "server.sqlite is missing"),
    "a folder as the database": (STOPPED, make_folder("server.sqlite"), "server.sqlite is not a file"),
    "garbage": (STOPPED, rewrite("server.sqlite", b"garbage" * 999), "not a database"),
    "cut in half": (STOPPED, rewrite("server.sqlite", lambda data: data[: len(data) // 2]), "malformed|database disk"),
    "cut to a page": (STOPPED, rewrite("server.sqlite", lambda data: data[:4096]), "malformed|database disk"),
    "scrambled pages": (STOPPED, rewrite("server.sqlite", scramble), "malformed|database disk"),
    "no log after a kill": (KILLED, remove("server.sqlite-wal"), "are missing"),
    "an empty log after a kill": (KILLED, rewrite("server.sqlite-wal", b""), "are missing"),
    "a garbled log after a kill": (KILLED, rewrite("server.sqlite-wal", b"x" * 9999), "are missing"),
    "a log cut to a tenth": (KILLED, rewrite("server.sqlite-wal", lambda data: data[: len(data) // 10]), "are missing"),
    "a log cut in half": (KILLED, rewrite("server.sqlite-wal", lambda data: data[: len(data) // 2]), "are missing"),
    "a log with one wrong byte": (KILLED, rewrite("server.sqlite-wal", flip), "are missing"),
    "no count of transactions": (STOPPED, remove("commits"), "the file commits is missing"),
    "a count that is cut short": (STOPPED, rewrite("commits", lambda data: data[:7]), "the file commits is missing"),
    "a count with one wrong byte": (STOPPED, rewrite("commits", flip), "differs from what was written"),
    "an older count": (
        STOPPED,
        rewrite("commits", lambda data: pack_commits(data[:8], 1)),
        "the file commits is older",
    ),
    "another program's": (STOPPED, foreign, "another program"),
    "an older version's": (STOPPED, change("PRAGMA user_version=2"), "another version of treetune"),
    "a later version's": (STOPPED, change("PRAGMA user_version=9"), "another version of treetune"),
    "a lost cursor": (STOPPED, change("DELETE FROM cursors"), "are missing"),
    "another state's count": (STOPPED, rewrite("commits", pack_commits(bytes(8), 9)), "belong to different states"),
    "a folder as the count": (STOPPED, make_folder("commits"), "the file commits is missing"),
    "no key": (STOPPED, change("DELETE FROM facts WHERE name = 'key'"), "the signing key is missing"),
    "another key": (
        STOPPED,
        change_key("zeroblob(32)"),
        "belong to different states",
    ),
    "a key of one byte": (
        STOPPED,
        change_key("x'07'"),
        "has 1 bytes, but needs at least",
    ),
    "a folder as the lock": (STOPPED, make_folder(".lock"), "cannot keep state"),
}


@pytest.mark.parametrize(("kind", "damage", "told"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_state_is_refused_with_what_is_wrong(states, tmp_path, kind, damage, told):
    folder = tmp_path / "state"
    shutil.copytree(states / kind, folder)
    damage(folder)
    with pytest.raises((ResumeError, StorageError, UsageError), match=told) as refused:
        start(folder)
    assert str(folder) in str(refused.value)
    assert refused.value.remedy
    with pytest.raises(TreetuneError):  # nothing was mended in passing
        start(folder)


def test_a_log_whose_latest_record_is_cut_short_is_taken(states, tmp_path):
    """That is all that a kill can do, and the reply to it was not sent."""
    shutil.copytree(states / KILLED, tmp_path / "state")
    log = tmp_path / "state" / "server.sqlite-wal"
    log.write_bytes(log.read_bytes()[:-1])
    assert start(tmp_path / "state") == 2


def test_a_state_without_its_latest_draws_goes_on_where_that_is_accepted(states, tmp_path, caplog):
    shutil.copytree(states / KILLED, tmp_path / "state")
    log = tmp_path / "state" / "server.sqlite-wal"
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])
    assert start(tmp_path / "state", accept_changes=True) == 1
    assert "transactions are missing" in caplog.text
    assert start(tmp_path / "state") == 2  # and from there on it is sound


def test_what_only_the_owner_of_the_machine_may_not_do_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with raises_code("storage", "--state"):
        Store(tmp_path / "file")
    with raises_code("storage", "--state"):
        Store(tmp_path / "file" / "below")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("mode", [0o500, 0o000])
def test_a_folder_that_cannot_be_written_is_told(states, tmp_path, mode):
    shutil.copytree(states / STOPPED, tmp_path / "state")
    for path in [*(tmp_path / "state").iterdir(), tmp_path / "state"]:
        path.chmod(mode)
    with raises_code("storage", "--state"):
        start(tmp_path / "state")


def test_a_read_only_database_is_told(states, tmp_path, monkeypatch):
    """Root is stopped by no mode, so the connection itself is one that only reads."""
    shutil.copytree(states / STOPPED, tmp_path / "state")
    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda path, **options: connect(f"file:{path}?mode=ro", uri=True, **options)
    )
    with raises_code("storage"):
        start(tmp_path / "state")


def test_only_the_owner_reads_what_holds_the_key(states):
    assert (states / STOPPED / "server.sqlite").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("digits", [b"07", b"0" * 30])
def test_a_key_file_with_a_short_key_is_refused(tmp_path, digits):
    (tmp_path / "key").write_bytes(digits)
    with raises_code("usage", len(digits) // 2, "least 16"):
        load_signing_key(tmp_path / "key")
