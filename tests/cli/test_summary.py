import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlive.cli.health import complaints
from lmlive.cli.summary import duration, size, summarize, text
from tests.cli.fake_router import HEALTHY, with_changes

documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=50),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
)


def test_a_summary_shows_what_the_server_knows() -> None:
    rest = "reserved chunks 0, held back chunks 0, evictions 0, refusals 0"
    lines = summarize(HEALTHY).splitlines()
    table = [line.split() for line in lines[6:8]]
    assert lines[:6] + lines[8:] == [
        "lmlive 0.1.0   serving, pid 7, epoch 00000000000000ab, up 8 min",
        "liveness   reaps after 2 min of silence, 60 min before the first ping; watched 8 min",
        "           scans every 30 s, last 12 s ago; tracks 1",
        "reaped     exit 1, silence 0, never pinged 0, target 0",
        "removed    unregistered 2, superseded 0",
        "instances",
        "releases   pending 0, done 3, by exit 0, stuck 0",
        f"pool       512 MiB of 2 GiB, chunks 8, leased chunks 1, {rest}",
        "lanes      normal    threads 1, busy 0, queued 0",
        "wire       frames 9, bad frames 1, replies 9, dropped replies 0, handshake failures 0",
        "errors     InvalidPayload 1",
    ]
    assert table[0] == [
        *("INSTANCE", "GEN", "MODEL", "RANK", "PID", "STATE", "HELD", "PROVEN", "EVIDENCE", "MODE", "DEVICE"),
        *("SILENT", "AGE", "MAPPED", "RUNNING", "PINGS"),
    ]
    row = "77 3 llama 0 - active no yes process server_driven host 1.25 s 2.0 h 3 MiB 0 41"
    assert " ".join(table[1]) == row


def test_a_server_that_reaps_nobody_says_so() -> None:
    assert "silence reaps nobody" in summarize(with_changes(liveness={"reap_timeout_seconds": 0.0}))


def test_before_the_first_scan_there_is_none() -> None:
    status = with_changes(liveness={"last_scan_age_seconds": None}, server={"uptime_seconds": 3.0})
    assert "scans every 30 s, none yet" in summarize(status)
    assert complaints(status) == []
    assert complaints(with_changes(liveness={"last_scan_age_seconds": None}))


@given(section=st.sampled_from(list(HEALTHY)), value=documents)
def test_any_document_can_be_shown_and_judged(section: str, value: object) -> None:
    statuses: list[dict[str, object]] = [
        {**HEALTHY, section: value},
        {section: {"state": value, "stuck": value}},
        {section: [value]},
    ]
    for status in statuses:
        summarize(status)
        complaints(status)


@given(st.text())
def test_a_name_cannot_drive_the_terminal(name: str) -> None:
    assert text(name).isprintable()
    assert len(text(name)) <= 40


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "-"), (0.0, "0 s"), (9.876, "9.88 s"), (119.4, "119 s"), (600, "10 min"), (7200, "2.0 h")],
)
def test_durations(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("nbytes", "shown"), [(None, "-"), (0, "0 B"), (1536, "1.5 KiB"), (2**31, "2 GiB"), (2**42, "4 TiB")]
)
def test_sizes(nbytes: float | None, shown: str) -> None:
    assert size(nbytes) == shown
