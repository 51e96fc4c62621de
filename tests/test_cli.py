"""python -m cuflash: info, support, explain, and what happens to wrong arguments."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cuflash
from cuflash import backends, cli, host, support


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cuflash", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environment)


def output(capsys, *arguments: str) -> str:
    assert cli.main(list(arguments)) == 0
    return capsys.readouterr().out


def test_info_as_json_tells_versions_machine_and_backends():
    done = run("info", "--json")
    assert done.returncode == 0 and done.stderr == ""
    info = json.loads(done.stdout)
    assert info["cuflash"] == cuflash.__version__
    assert info["packages"]["numpy"] == np.__version__
    assert info["packages"]["numba"] == importlib.metadata.version("numba")
    assert info["threads"] >= 1 and info["cpu"]
    assert list(info["backends"]) == list(backends.REGISTRY)
    for state in info["backends"].values():
        assert state["kernels"] if state["usable"] else state["reason"]
    assert info["backends"]["cpu"]["usable"]


def test_info_as_text_names_everything_of_the_json(capsys):
    info, text = json.loads(output(capsys, "info", "--json")), output(capsys, "info")
    for value in (info["cuflash"], info["python"], info["cpu"], info["cache"], *info["packages"].values(), *info["backends"]):
        assert value in text
    for state in info["backends"].values():
        assert state.get("reason", "usable") in text


def test_cache_directory_follows_the_environment(tmp_path, monkeypatch):
    assert json.loads(run("info", "--json", CUFLASH_CACHE_DIR=str(tmp_path / "kernels")).stdout)["cache"] == str(
        tmp_path / "kernels"
    )
    monkeypatch.delenv("CUFLASH_CACHE_DIR", raising=False)
    assert host.cache_directory().name == "cuflash" and host.cache_directory().is_absolute()
    monkeypatch.setenv("CUFLASH_CACHE_DIR", "~/kernels")
    assert host.cache_directory() == Path.home() / "kernels"


def test_info_loads_no_gpu_library_and_no_framework():
    tell = "print(*{m.partition('.')[0] for m in sys.modules}, file=sys.stderr)"
    code = f"import sys; from cuflash import cli; cli.main(['info']); {tell}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert not set(done.stderr.split()) & {"cupy", "cuda", "torch", "jax", "mpi4py", "triton"}


def test_a_missing_package_is_named_with_the_command_that_brings_it(monkeypatch, capsys):
    find_spec = cli.importlib.util.find_spec
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == "numba" else find_spec(name))
    state = json.loads(output(capsys, "info", "--json"))["backends"]["cpu"]
    assert state == {"usable": False, "reason": "not installed: numba", "mend": cli.NEEDS["cpu"][1]}
    text = output(capsys, "info")
    assert "not installed: numba" in text and "pip install numba" in text


def test_a_backend_that_does_not_load_is_reported(monkeypatch, capsys):
    def broken(name):
        raise ImportError("libllvm is missing")

    monkeypatch.setattr(backends, "load", broken)
    assert "cpu         not usable: does not load: libllvm is missing" in output(capsys, "info")


def test_support_prints_the_table(capsys):
    assert output(capsys, "support").strip() == support.table()


def test_explain_prints_the_memory_of_both_forms(capsys):
    text = output(capsys, "explain", "--batch", "1", "--seqlen", "2048", "--heads", "32", "--dim", "128")
    assert text.strip() == str(cuflash.explain(batch=1, seqlen=2048, heads=32, dim=128))
    assert "16 MiB" in text and "512 MiB" in text


def test_explain_passes_each_option_on(capsys):
    arguments = "--batch 2 --seqlen 64 --seqlen-k 96 --heads 4 --heads-kv 2 --dim 32 --dtype bfloat16 --causal".split()
    expected = cuflash.explain(batch=2, seqlen=64, seqlen_k=96, heads=4, heads_kv=2, dim=32, dtype="bfloat16", causal=True)
    assert output(capsys, "explain", *arguments).strip() == str(expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "command"),
        (["infos"], "infos"),
        (["explain", "--heads", "4", "--dim", "64"], "--seqlen"),
        (["explain", "--seqlen", "0", "--heads", "4", "--dim", "64"], "at least 1"),
        (["explain", "--seqlen", "many", "--heads", "4", "--dim", "64"], "many"),
        (["explain", "--seqlen", "8", "--heads", "4", "--dim", "64", "--dtype", "int8"], "int8"),
        (["explain", "--seqlen", "8", "--heads", "7", "--heads-kv", "2", "--dim", "64"], "7"),
    ],
)
def test_wrong_arguments_are_told_and_exit_with_2(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out.strip() == f"cuflash {cuflash.__version__}"


def test_a_reader_that_stops_early_is_no_error():
    command = f'"{sys.executable}" -m cuflash support | head -n 1; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("| option |")
