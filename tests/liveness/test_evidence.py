"""What the kernel told, as it is passed on."""

from lmlive.liveness.evidence import Evidence, Exit


def test_what_is_not_told_is_none() -> None:
    assert Exit(None, None) == (None, None, None)


def test_evidence_is_named_as_in_the_status() -> None:
    assert [str(evidence) for evidence in Evidence] == ["process", "none"]
