"""docs/SETTINGS.md has every environment variable that spccl reads, with its default and what is allowed."""

import re
from pathlib import Path

import pytest

import spccl
from spccl import _ext, _torch_settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/SETTINGS.md").read_text()
# name -> (default, allowed) of the tables that have these columns.
ROWS = {
    name: (default.strip(), allowed.strip())
    for name, default, allowed in re.findall(r"^\| `(SPCCL_\w+)` \|([^|\n]*)\|([^|\n]*)\|.*\|.*\|$", PAGE, re.M)
}
LIBRARY = [name for kind, name, _, _ in _ext.info() if kind in ("setting", "debug")]


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in ROWS:
        monkeypatch.delenv(name, raising=False)


def test_info_and_page_list_the_same_variables():
    entries = {entry.name: entry.value for entry in spccl.info() if entry.kind in ("setting", "debug")}
    assert len(entries) >= 21 and entries == {name: default for name, (default, _) in ROWS.items()}
    public = [entry.name for entry in spccl.info() if entry.kind == "setting"]
    assert len(public) <= 20 and not any(name.startswith("SPCCL_DEBUG_") for name in public)


def test_old_names_of_the_route(monkeypatch):
    """What SPCCL_CUDA_ENGINE and SPCCL_CUDA_FALLBACK and the options of those names said is one of the routes."""
    assert ROWS["SPCCL_CUDA_ROUTE"][1] == ", ".join(_torch_settings.ROUTES)
    in_force = _torch_settings.route_in_force
    assert [in_force(route) for route in ("auto", "spccl+stage", "nccl")] == ["auto", "spccl+stage", "nccl"]
    monkeypatch.setenv("SPCCL_CUDA_FALLBACK", "stage")
    assert [in_force(route) for route in ("auto", "one-host", "nccl")] == ["auto+stage", "one-host+stage", "stage"]
    monkeypatch.setenv("SPCCL_CUDA_ENGINE", "0")
    assert in_force("spccl") == "stage"
    assert next(entry.value for entry in spccl.info() if entry.name == "SPCCL_CUDA_ROUTE") == "stage"
    monkeypatch.setenv("SPCCL_CUDA_FALLBACK", "nccl")
    assert in_force("auto+stage") == "nccl"
    monkeypatch.setenv("SPCCL_CUDA_ENGINE", "1")
    assert [in_force(route) for route in ("stage", "spccl+stage")] == ["auto", "spccl"]
    monkeypatch.setenv("SPCCL_CUDA_ROUTE", "one-host")
    assert in_force("nccl") == "one-host"
    monkeypatch.setenv("SPCCL_CUDA_ENGINE", "?")
    with pytest.raises(ValueError, match="SPCCL_CUDA_ENGINE='\\?', wanted one of 0, 1"):
        in_force("auto")


def test_the_library_knows_the_variables_that_python_reads():
    """Otherwise it warns that SPCCL_ORDER, say, is misspelt (sp_env_warn_names)."""
    known = (ROOT / "csrc/core/base/env.c").read_text()
    settings = (*_torch_settings.ALL, _torch_settings.OLD_ENGINE, _torch_settings.OLD_FALLBACK)
    missing = [setting.name for setting in settings if f'"{setting.name}"' not in known]
    assert not missing, f"not in read_elsewhere of env.c: {missing}"


def test_every_variable_that_is_read_is_on_the_page():
    read = set()
    for folder, pattern in (
        ("csrc", r"(?:getenv|ENV\{|DEFINED ENV\{)[( ]*\"?(\w+)"),
        ("python", r"environ(?:\.get\(|\[)\s*\"(\w+)"),
        ("python", r"Setting\(\s*\"(\w+)"),
        ("bench", r"\$\{(SPCCL_\w+)"),
    ):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".c", ".h", ".cpp", ".hpp", ".cu", ".cmake", ".py", ".sh"):
                read |= set(re.findall(pattern, file.read_text()))
    read = {name for name in read if name.isupper()}  # getenv(vars[id].name) and comments name no variable
    assert {"CXX", "RANK", "SPCCL_COMMIT", "SPCCL_CUDA_ARCHS", "SPCCL_ORDER"} <= read
    missing = [name for name in sorted(read | set(LIBRARY)) if f"`{name}`" not in PAGE]
    assert not missing, f"not in docs/SETTINGS.md: {missing}"


RANGE = re.compile(r"(?:0, or )?(\w+) to (\w+)")
# An address or a list of names is checked where it is used.
CHECKED = [n for n in LIBRARY if RANGE.fullmatch(ROWS[n][1]) or ("," in ROWS[n][1] and n != "SPCCL_TRANSPORTS")]


@pytest.mark.parametrize("name", CHECKED)
def test_what_is_allowed(name, monkeypatch):
    """The range or the choices of the page are those of the library's error."""
    monkeypatch.setenv(name, "?")
    allowed = ROWS[name][1]
    whole = RANGE.fullmatch(allowed)
    with pytest.raises(spccl.SettingError) as failure:
        spccl.get_unique_id()
    text = str(failure.value)
    if whole is None:
        assert f"wanted one of {allowed} (" in text
    else:
        low = "0" if allowed.startswith("0, or") else whole[1]
        assert f"from {number(low)} to {number(whole[2])} (" in text


def number(text: str) -> int:
    return int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0)


def test_bad_value_of_a_torch_setting(monkeypatch):
    monkeypatch.setenv("SPCCL_ORDER", "?")
    with pytest.raises(ValueError, match="SPCCL_ORDER='\\?', wanted one of device, group"):
        _torch_settings.OPTIONS["order"].given()
    monkeypatch.setenv("SPCCL_ORDER", "")
    assert _torch_settings.OPTIONS["order"].given() is None
    for setting in _torch_settings.OPTIONS.values():
        assert ROWS[setting.name][1] == ", ".join(setting.choices) and setting.default in setting.choices
