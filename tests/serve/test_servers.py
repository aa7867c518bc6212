"""Running servers register in a folder or at a URL, and `treetune list --register` shows them with their health."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_code
from serve_process import serve
from serving import until

from treetune.cli import app
from treetune.errors import StorageError, UsageError
from treetune.serve import register as directory
from treetune.serve.errors import Denied
from treetune.serve.register import (
    FolderRegister,
    RegisteredServer,
    RegisterServer,
    ServerEntry,
    check_health,
    open_register,
    read_entry,
    stay_registered,
)
from treetune.system.access import Access


def entry(id="one", **fields):
    return ServerEntry(
        id=id, **{"name": "arithmetic", "url": "http://127.0.0.1:1", "host": socket.gethostname(), **fields}
    )


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def listed(place, token=None):
    """What `treetune list --register` finds."""

    async def look():
        seen = await open_register(str(place), token).entries()
        return list(zip(seen, await check_health(seen, 30.0), strict=True))

    return run(look())


def wait_for(condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it never came about")


def is_registered(folder):
    return lambda: bool(list(folder.glob("*.json")))


@contextlib.contextmanager
def register_process(*arguments, **environment):
    process = subprocess.Popen(
        [sys.executable, "-m", "treetune", "register", *arguments, "--json"],
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
    )
    try:
        lines = b""
        while not lines.endswith(b"}\n"):
            line = process.stdout.readline()
            assert line
            lines += line
        yield json.loads(lines)["url"]
    finally:
        process.terminate()
        assert process.wait(10) == 0


# As a user sees it


def test_servers_in_a_folder_are_listed_with_their_health(tmp_path, treetune):
    folder = tmp_path / "servers"
    with (
        serve(tmp_path, "arithmetic", "--http", ":0", "--register", folder, TREETUNE_TOKEN="very-secret") as first,
        serve(tmp_path, "reverse-text", "--zmq", "tcp://127.0.0.1:0", TREETUNE_SERVERS=str(folder)) as second,
    ):
        wait_for(lambda: len(list(folder.glob("*.json"))) == 2)
        assert not [file for file in folder.iterdir() if "very-secret" in file.read_text()]
        request = urllib.request.Request(
            first.report["http"] + "/api/episode/start", b"{}", {"Authorization": "Bearer very-secret"}
        )
        urllib.request.urlopen(request, timeout=30).close()
        printed = treetune("list", "--register", folder, "--json", "--timeout", "30").json
        shown = treetune("list", "--servers", TREETUNE_SERVERS=str(folder))
        arithmetic, reverse = printed["servers"]
        assert arithmetic["name"] == "arithmetic"
        assert arithmetic["url"] == first.report["http"]
        assert (arithmetic["health"], arithmetic["episodes"], arithmetic["needs_token"]) == ("ok", 1, True)
        assert arithmetic["num_tasks"] is None
        assert (reverse["health"], reverse["zmq"], reverse["num_tasks"]) == ("ok", second.address, 8)
        assert first.report["http"] in shown.out
        assert "endless" in shown.out
        second.stop()
        assert [seen.entry.name for seen, _ in listed(folder)] == ["arithmetic"]


def test_a_killed_server_is_shown_as_such_and_forgotten_after_long(tmp_path, treetune):
    folder = tmp_path / "servers"
    with serve(tmp_path, "arithmetic", "--port", "0", "--register", folder) as server:
        wait_for(is_registered(folder))
        server.process.kill()
        server.process.wait()

    (file,) = folder.glob("*.json")
    for seconds, expected in ((0, ["no answer"]), (60, ["gone"]), (4000, [])):
        os.utime(file, (time.time() - seconds,) * 2)
        assert [found.state for _, found in listed(folder)] == expected
    assert not list(folder.iterdir())
    assert "no servers" in treetune("list", "--register", folder).out


def test_servers_at_a_url_are_listed(tmp_path, treetune):
    token = {"TREETUNE_REGISTER_TOKEN": "for-the-register"}
    with register_process("--http", ":0", **token) as url:
        with serve(
            tmp_path, "arithmetic", "--port", "0", "--register", url, "--advertise", "http://127.0.0.1:1", **token
        ):
            wait_for(lambda: listed(url, "for-the-register"))
            (one,) = treetune("list", "--register", url, "--json", "--timeout", "5", **token).json["servers"]
            assert one["url"] == "http://127.0.0.1:1"
            assert one["health"] == "no answer"
            refused = treetune("list", "--register", url)
            assert refused.code == 3
            assert "TREETUNE_REGISTER_TOKEN" in refused.err
        with serve(tmp_path, "arithmetic", "--port", "0", "--register", url, "--drain", "0", **token) as server:
            wait_for(lambda: len(listed(url, "for-the-register")) == 2)
            server.stop()
            ((left, _),) = listed(url, "for-the-register")
            assert left.entry.url == "http://127.0.0.1:1"  # the first was killed, the second took its leave


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["list", "--servers"], "no register given"),
        (["list", "--register", "no/such/folder"], "no folder"),
        (["list", "--register", "ftp://example.org"], "not a register"),
        (["list", "--register", "file:///etc"], "not a register"),
        (["list", "--register", f"http://{'a' * 80}.example"], "not an address"),
        (["list", "--register", "http://user:password@127.0.0.1:1"], "may not contain a password"),
        (["list", "--register", "http://127.0.0.1:1/?token=secret"], "may not contain a password"),
        (["serve", "arithmetic", "--port", "0", "--register", "gopher://x"], "not a register"),
        (
            ["serve", "arithmetic", "--port", "0", "--register", "x", "--advertise", "http://me:pw@x"],
            "is not an address",
        ),
        (["serve", "arithmetic", "--port", "0", "--advertise", "http://x:1"], "--register"),
        (["register", "--http", "0.0.0.0:0"], "no token"),
        (["register", "--http", "nonsense"], "not an address"),
    ],
)
def test_wrong_usage_is_told(arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("warnings.showwarning", None)  # put back afterwards
    assert app.run(arguments) == 2
    assert told in capsys.readouterr().err


def test_a_register_that_cannot_be_used_is_told(treetune, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot write to file" in treetune("serve", "arithmetic", "--port", "0", "--register", "file").err
    done = treetune("list", "--register", "http://127.0.0.1:1")
    assert done.code == 3
    assert "127.0.0.1:1" in done.err


def test_a_server_serves_though_its_register_is_away(tmp_path):
    with serve(tmp_path, "arithmetic", "--port", "0", "--register", "http://127.0.0.1:1") as server:
        with urllib.request.urlopen(server.report["http"] + "/api/health", timeout=30) as reply:
            assert reply.status == 200
        told = server.stop(signal.SIGINT)
    assert "not registered, will retry" in told
    assert server.process.returncode == 0


# What may be in a register


def test_what_is_no_entry_is_passed_over(tmp_path):
    register = FolderRegister(tmp_path)
    run(register.announce(entry()))
    (tmp_path / "garbage.json").write_bytes(b"\xff{")
    (tmp_path / "list.json").write_text("[" * 5000)
    (tmp_path / "large.json").write_text(json.dumps({"id": "large", "name": "x" * 100_000}))
    (tmp_path / "other.json").write_text(json.dumps({"id": "one", "name": "under another name"}))
    (tmp_path / "scheme.json").write_text(json.dumps({"id": "scheme", "name": "x", "url": "file:///etc/passwd"}))
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "one.json")
    os.mkfifo(tmp_path / "pipe.json")
    assert [seen.entry for seen in run(register.entries())] == [entry()]
    assert (tmp_path / "notes.txt").exists()


def test_files_of_others_stay_in_the_folder_however_old_they_are(tmp_path):
    """Who names the wrong folder loses nothing."""
    run(FolderRegister(tmp_path).announce(entry("left-behind")))
    for name in ("package.json", ".film.part", "other.json", ".treetune-register-abc"):
        (tmp_path / name).write_text(json.dumps({"id": "one", "name": "mine"}))
    for file in tmp_path.iterdir():
        os.utime(file, (time.time() - 10_000,) * 2)
    assert listed(tmp_path) == []
    assert sorted(file.name for file in tmp_path.iterdir()) == [".film.part", "other.json", "package.json"]


def test_a_wrong_clock_makes_no_server_older_than_it_is(tmp_path, monkeypatch):
    run(FolderRegister(tmp_path).announce(entry()))
    os.utime(tmp_path / "one.json", (time.time() - 60,) * 2)
    for skew in (100_000, -100_000):
        with monkeypatch.context() as wrong:
            wrong.setattr(directory, "time", SimpleNamespace(time=lambda skew=skew: time.time() + skew))
            (seen,) = run(FolderRegister(tmp_path).entries())
        assert 30 < seen.age < 600
    assert [file.name for file in tmp_path.iterdir()] == ["one.json"]


def test_an_announcement_under_way_does_not_outlive_the_server(tmp_path, monkeypatch):
    """The folder is on a slow disk: the entry is written while the server ends."""
    begun, go_on, write = threading.Event(), threading.Event(), FolderRegister._write

    def slowly(self, entry):
        begun.set()
        go_on.wait(30)
        write(self, entry)

    monkeypatch.setattr(FolderRegister, "_write", slowly)

    async def play():
        async with stay_registered(FolderRegister(tmp_path), entry()):
            await asyncio.to_thread(begun.wait)
            asyncio.get_running_loop().call_later(0.2, go_on.set)

    run(play())
    assert not list(tmp_path.iterdir())


@given(st.binary(max_size=200) | st.text().map(str.encode))
def test_no_bytes_break_the_reader(content):
    assert read_entry(content) is None


@pytest.mark.parametrize("id", ["../up", "a/b", "", ".hidden", "a\n", "x" * 200])
def test_an_id_is_never_a_path(id):
    assert read_entry(json.dumps({"id": id, "name": "x"}).encode()) is None


def test_a_name_cannot_steer_the_terminal(tmp_path, treetune):
    run(FolderRegister(tmp_path / "servers").announce(entry(name="\x1b[31mred\x1b]0;title\x07", url=None)))
    shown = treetune("list", "--register", "servers")
    assert "\x1b" not in shown.out
    assert "red" in shown.out


def test_an_address_stays_whole_in_a_narrow_terminal(tmp_path, treetune):
    fields = {"name": "guess-a-number", "url": "http://127.0.0.1:65000", "num_tasks": 1000, "needs_token": True}
    run(FolderRegister(tmp_path / "servers").announce(entry(**fields)))
    assert fields["url"] in treetune("list", "--register", "servers", COLUMNS="70").out


def test_states_of_servers(tmp_path):
    async def ask():
        async def answer(reader, writer):
            path = (await reader.readline()).split()[1].decode()
            while await reader.readline() not in (b"\r\n", b""):
                pass
            if path.startswith("/hang"):
                await asyncio.sleep(60)
            body = {"/good": b'{"episodes": 3}', "/page": b"<html>"}.get(path.rpartition("/api")[0], b"{}")
            status = b"503 x" if path.startswith("/stopping") else b"200 OK"
            status = b"302 x\r\nLocation: /good/api/health" if path.startswith("/moved") else status
            writer.write(
                b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (status, len(body), body)
            )
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        seen = [RegisteredServer(entry(url=f"{url}/{path}"), age) for path in PATHS for age in (1, 100)]
        odd = (entry(host="another-machine"), entry(url="http://[::1"), entry(url=None))
        seen += [RegisteredServer(one, 1) for one in odd]
        found = await check_health(seen, timeout=1.0)
        server.close()
        return [(one.state, one.episodes) for one in found]

    PATHS = ["good", "stopping", "page", "moved", "hang"]
    *states, elsewhere, wrong, nowhere = run(ask())
    assert states[:4] == [("ok", 3), ("ok", 3), ("stopping", None), ("stopping", None)]
    assert states[4:] == [("no answer", None), ("gone", None)] * 3
    assert elsewhere == ("elsewhere", None)
    assert wrong == nowhere == ("no answer", None)


# The register over HTTP


def test_a_register_that_was_restarted_knows_the_servers_again(monkeypatch):
    monkeypatch.setattr(directory, "ANNOUNCE_SECONDS", 0.05)

    async def play():
        server = RegisterServer(":0", Access())
        await server.start()
        register = open_register(server.url)
        async with stay_registered(register, entry()):
            await until(lambda: bool(server.known))
            await server.stop()
            again = RegisterServer(server.url, Access())
            await again.start()
            await until(lambda: bool(again.known))
            assert [seen.entry for seen in await register.entries()] == [entry()]
        assert await register.entries() == []
        await again.stop()

    run(play())


def test_a_folder_that_was_emptied_knows_them_again(monkeypatch, tmp_path):
    monkeypatch.setattr(directory, "ANNOUNCE_SECONDS", 0.05)

    async def play():
        async with stay_registered(FolderRegister(tmp_path), entry()):
            await until(lambda: (tmp_path / "one.json").exists())
            (tmp_path / "one.json").unlink()
            await until(lambda: (tmp_path / "one.json").exists())
        assert not list(tmp_path.iterdir())

    run(play())


def test_the_register_takes_nothing_without_its_token_and_nothing_large(monkeypatch):
    async def play():
        server = RegisterServer(":0", Access(token="abc"))
        await server.start()
        good = open_register(server.url, "abc")
        with pytest.raises(Denied):
            await open_register(server.url, "wrong").announce(entry())
        with pytest.raises(Denied):
            await open_register(server.url).entries()
        with raises_code("failed", "422"):
            await good.ask("POST", "/api/servers", dict, {"id": "x"})
        with raises_code("failed", "413"):
            await good.ask("POST", "/api/servers", dict, {"id": "x", "name": "y" * 100_000})
        with raises_code("failed", "404"):
            await good.ask("GET", "/../../etc/passwd", dict)
        monkeypatch.setattr("treetune.serve.register.MOST_ENTRIES", 2)
        for id in ("a", "b", "a"):
            await good.announce(entry(id))
        with raises_code("failed", "429"):
            await good.announce(entry("c"))
        assert len(await good.entries()) == 2
        await server.stop()

    run(play())


def test_a_page_from_elsewhere_cannot_read_the_register():
    with register_process("--http", ":0") as url:
        request = urllib.request.Request(f"{url}/api/servers", headers={"Origin": "http://evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request, timeout=10)


def test_an_answer_that_is_no_register_is_told(tmp_path, treetune):
    with serve(tmp_path, "arithmetic", "--port", "0") as server:
        done = treetune("list", "--register", server.report["http"])
    assert done.code == 3
    assert "404" in done.err


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        open_register(str(tmp_path / "file" / "below"))
    with pytest.raises(UsageError):
        open_register("http://")
