import json

from lockstep.cluster.report import (
    Finding,
    Report,
    failure,
    merged,
    named,
    ok,
    warning,
)


def test_findings_that_are_ok_on_all_ranks_are_merged():
    assert merged([[ok("disk", "5 GiB")], [ok("disk", "6 GiB")]]) == [ok("disk", "5 GiB")]


def test_a_failure_names_its_ranks():
    bad = failure("disk", "full", "free room")
    (finding,) = merged([[ok("disk", "5 GiB")], [bad], [bad]])
    assert finding.as_text(4) == "failure  disk  ranks 1-2: full; fix: free room"


def test_a_failure_on_all_ranks_names_none():
    bad = failure("disk", "full", "free room")
    assert merged([[bad], [bad]]) == [bad]


def test_the_worst_finding_decides_the_exit_status():
    report = Report(2, [ok("a", "x"), warning("b", "y", "z")])
    assert (report.status, report.exit_status) == ("warning", 0)
    report.findings.append(failure("c", "y", "z"))
    assert (report.status, report.exit_status) == ("failure", 1)


def test_a_finding_is_one_line_and_survives_json():
    finding = Finding("disk", "failure", "full", "free room", (1, 3))
    report = Report(4, [finding], {"speed": [{"rank": 0, "GFLOP/s": 1.5}]})
    lines = report.as_text().splitlines()
    assert lines[-2] == "failure  disk  ranks 1, 3: full; fix: free room"
    (values,) = json.loads(report.as_json())["findings"]
    assert Finding.from_json(values) == finding


def test_ranks_are_written_as_spans():
    assert [named(ranks) for ranks in ([4], [2, 0, 1], [7, 1, 2])] == [
        "rank 4",
        "ranks 0-2",
        "ranks 1-2, 7",
    ]


def test_the_summary_uses_plurals():
    findings = [ok("a", "x"), ok("b", "x"), warning("c", "y", "z"), failure("d", "y", "z")]
    assert Report(1, findings).as_text().splitlines()[-1].startswith("1 rank, 2 ok, 1 warning, 1 f")
    findings += [warning("e", "y", "z"), failure("f", "y", "z")]
    last = Report(2, findings).as_text().splitlines()[-1]
    assert last.startswith("2 ranks, 2 ok, 2 warnings, 2 failures, ")
