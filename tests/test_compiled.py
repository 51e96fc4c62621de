"""Compiled kernels on disk: what is kept comes back, anything else counts as absent; and the commands that look after them."""

from __future__ import annotations

import logging
import os
import stat
import sys
import types

import pytest

from cuflash import backends, cli, compiled

KEY, CUBIN = "a" * 64, bytes(range(256)) * 9


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A cache directory of the test's own, and no warnings given yet."""
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "_warned", set())
    return tmp_path / "cache"


def test_what_is_kept_comes_back_in_a_private_directory(place):
    assert compiled.load("k.cubin", KEY) is None
    assert compiled.store("k.cubin", KEY, CUBIN)
    assert compiled.load("k.cubin", KEY) == CUBIN
    assert [path.name for path in compiled.directory().iterdir()] == ["k.cubin"]  # no temporary file stays
    for folder in (place, compiled.directory()):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((compiled.directory() / "k.cubin").stat().st_mode) == 0o600


def good() -> bytes:
    return CUBIN + compiled._trailer(KEY, CUBIN)


@pytest.mark.parametrize(
    "content",
    [b"", b"x", CUBIN, good()[:-1], good()[1:], good()[:1000] + b"\xff" + good()[1001:], good() + b"\n", os.urandom(4096)]
    + [CUBIN + compiled._trailer("b" * 64, CUBIN), compiled._trailer(KEY, b"")],
    ids=["empty", "tiny", "no trailer", "cut", "beheaded", "garbled", "longer", "noise", "of another key", "trailer alone"],
)
def test_a_file_that_is_not_exactly_right_counts_as_absent(content, caplog):
    assert good()[1000] != 0xFF
    compiled.store("k.cubin", KEY, CUBIN)
    (compiled.directory() / "k.cubin").write_bytes(content)
    assert compiled.load("k.cubin", KEY) is None
    assert compiled.load("k.cubin", KEY) is None
    assert len(caplog.records) == 1 and "damaged" in caplog.text and "k.cubin" in caplog.text
    assert compiled.store("k.cubin", KEY, CUBIN) and compiled.load("k.cubin", KEY) == CUBIN


def test_a_directory_in_the_place_of_a_file(caplog):
    (compiled.directory() / "k.cubin").mkdir(parents=True)
    assert compiled.load("k.cubin", KEY) is None
    assert not compiled.store("k.cubin", KEY, CUBIN)
    assert len(caplog.records) == 2  # one for reading, one for writing
    assert [path.name for path in compiled.directory().iterdir()] == ["k.cubin"]


def test_one_warning_if_nothing_can_be_kept(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "file" / "cache"))  # below a file: fails for root as well
    with caplog.at_level(logging.WARNING, "cuflash"):
        for name in "ab":
            assert compiled.load(name, KEY) is None
            assert not compiled.store(name, KEY, CUBIN)
    assert len(caplog.records) == 1 and f"cannot keep compiled kernels in {tmp_path / 'file' / 'cache'}" in caplog.text


def test_a_failing_rename_leaves_nothing_behind(monkeypatch):
    def refuse(*_):
        raise PermissionError("no")

    monkeypatch.setattr(os, "replace", refuse)
    assert not compiled.store("k.cubin", KEY, CUBIN)
    assert list(compiled.directory().iterdir()) == []


# ---- python -m cuflash cache, precompile --------------------------------------------------------------------------------


def output(capsys, *arguments: str, status: int = 0) -> str:
    assert cli.main(list(arguments)) == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def test_cache_path(capsys, place):
    assert output(capsys, "cache", "path").strip() == str(place)
    assert not place.exists()  # asking makes nothing


def test_cache_list_and_clear_cover_gpu_and_cpu_kernels_and_touch_nothing_else(capsys, place):
    compiled.store("k.cubin", KEY, CUBIN)
    (place / "cpu" / "backends_1").mkdir(parents=True)
    index, mine, outside = place / "cpu" / "backends_1" / "f.nbi", place / "cpu" / "notes.txt", place / "g.cubin"
    for path in (index, mine, outside):
        path.write_bytes(b"12345")
    size = (compiled.directory() / "k.cubin").stat().st_size
    listed = output(capsys, "cache", "list").splitlines()
    assert len(listed) == 3
    assert listed[0].split()[0] == f"{size:,}" and listed[0].endswith("cuda/k.cubin")
    assert listed[1].split()[0] == "5" and listed[1].endswith("cpu/backends_1/f.nbi")
    assert listed[2].split()[0] == f"{size + 5:,}"

    removed = output(capsys, "cache", "clear")
    assert str(index) in removed and "k.cubin" in removed and "notes" not in removed and "files removed: 2" in removed
    assert not index.parent.exists() and not compiled.directory().exists() and mine.exists() and outside.exists()
    assert "files removed: 0" in output(capsys, "cache", "clear")


def test_clear_follows_no_symbolic_link(place, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "k.cubin").touch()
    (place / "cuda").mkdir(parents=True)
    (place / "cuda" / "link").symlink_to(elsewhere, target_is_directory=True)
    assert list(compiled.clear()) == [] and (elsewhere / "k.cubin").exists()


def test_precompile_says_why_there_is_nothing_to_compile(capsys, monkeypatch):
    monkeypatch.setattr(backends, "load", lambda name: "not today")
    assert "not today" in output(capsys, "precompile", "--arch", "sm_80", status=2)


def test_precompile_refuses_what_is_no_architecture(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["precompile", "--arch", "sm_80,hopper"])
    assert stopped.value.code == 2 and "'hopper'" in capsys.readouterr().err


def test_precompile_without_a_gpu_needs_arch(capsys, monkeypatch):
    def no_gpu():
        raise RuntimeError("no device")

    monkeypatch.setattr(backends, "load", lambda name: types.SimpleNamespace(instances=lambda arch: []))
    fake = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=types.SimpleNamespace(getDeviceCount=no_gpu)))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    assert "--arch" in output(capsys, "precompile", status=2)
