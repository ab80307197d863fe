"""The benchmarks' own arithmetic and plumbing: a wrong ratio would make every figure of the project a lie."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from harness import fio, measure, peer, report  # noqa: E402


def test_a_ratio_above_one_means_ours_is_better_whichever_way_the_unit_runs() -> None:
    assert report.ratio(20.0, 10.0, "GiB/s") == 2.0
    assert report.ratio(10.0, 20.0, "ms") == 2.0
    assert {unit for unit, higher in report.HIGHER_IS_BETTER.items() if higher} == {
        "GiB/s",
        "% stored",
        "% counted",
        "keys/s",
        "% of tokens",
        "% of mean",
        "requests",
    }


def test_a_slow_spell_that_hits_a_whole_round_does_not_move_the_ratio() -> None:
    ours, limit = [1.0, 1.0, 10.0, 10.0, 10.0], [2.0, 2.0, 20.0, 20.0, 20.0]
    assert report.paired_ratio(ours, limit, "ms") == 2.0


def test_a_round_that_the_other_side_failed_leaves_the_ratio_of_the_medians() -> None:
    assert report.paired_ratio([1.0, 2.0, 3.0], [4.0, 6.0], "ms") == 2.5


def test_nothing_is_a_multiple_of_zero() -> None:
    row = report.row_of("b", "r", "% stored", [100.0], peer=[0.0], must=report.Must(at_least=100.0))
    assert (row.peer, row.ratio_peer, row.reached) == (0.0, None, True)


def test_a_row_says_whether_every_part_of_its_promise_held() -> None:
    must = report.Must(ratio_limit=0.9, at_most=1.0)

    def reached(ours: float, limit: float) -> bool | None:
        return report.row_of("b", "r", "ms", [ours], limit=[limit], must=must).reached

    assert reached(1.0, 0.95) is True
    assert reached(1.1, 1.1) is False
    assert reached(1.0, 0.8) is False


def test_a_promise_against_a_missing_side_is_not_judged() -> None:
    row = report.row_of("b", "r", "ms", [1.0], must=report.Must(ratio_peer=1.0))
    assert row.peer is None
    assert row.ratio_peer is None
    assert row.reached is None


def test_a_json_line_has_the_fields_that_readers_of_the_report_expect() -> None:
    row = json.loads(report.to_json(report.row_of("b", "r", "ms", [1.23456], limit=[2.0], note="why", load=0.5)))
    assert row == {
        "bench": "b", "row": "r", "ours": 1.235, "unit": "ms", "limit": 2.0, "ratio_limit": 1.62, "peer": None,
        "ratio_peer": None, "load": 0.5, "must": "", "reached": None, "note": "why",
    }  # fmt: skip


def test_sides_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []

    def side(name: str) -> dict[str, float]:
        order.append(name)
        return {"work": float(len(order))}

    samples = measure.interleave({"ours": lambda: side("ours"), "limit": lambda: side("limit")}, 2)
    assert order == ["ours", "limit", "limit", "ours", "ours", "limit"]
    assert samples == {"ours": {"work": [4.0, 5.0]}, "limit": {"work": [3.0, 6.0]}}


def test_wrong_bytes_end_the_benchmark() -> None:
    sent = measure.random_bytes(64, seed=1)
    got = sent.copy()
    measure.check_equal(got, sent, "load")
    got[63] ^= 1
    with pytest.raises(measure.WrongBytes, match="load"):
        measure.check_equal(got, sent, "load")


FIO_REPORT = {"jobs": [{"error": 0, "write": {"io_bytes": 1 << 20, "bw_bytes": 1 << 21}}]}


def test_fio_reports_are_read_as_seconds_for_all_the_bytes() -> None:
    noise = "note: something\n"
    assert fio.parse(noise + json.dumps(FIO_REPORT), "write", 1 << 20) == 0.5


@pytest.mark.parametrize("output", [json.dumps(FIO_REPORT), "", '{"jobs": []}', json.dumps(FIO_REPORT)[:-4]])
def test_a_fio_run_that_did_less_than_asked_is_an_error(output: str) -> None:
    with pytest.raises(fio.FioFailed):
        fio.parse(output, "write", 1 << 21)


def test_without_a_peer_the_rows_come_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(peer.PEER_VENV_VARIABLE, str(tmp_path / "nothing"))
    options = measure.Options(rounds=1, quick=True, directory=tmp_path, peer=peer.find_peer())
    paired = measure.paired(options, {"ours": lambda: {"work": 1.0}}, "keys")
    row = paired.row("b", "r", "ms", "work", float)
    assert row.peer is None
    assert "peer-setup" in row.note


def test_a_peer_that_cannot_start_is_left_out_with_its_own_words_and_its_process_ends(tmp_path: Path) -> None:
    with peer.Peer(Path(sys.executable)) as here:
        options = measure.Options(rounds=1, quick=True, directory=tmp_path, peer=here)
        paired = measure.paired(options, {"ours": lambda: {"work": 1.0}}, "lookup", nonsense=1)
        process = here._process
    assert "peer" not in paired.samples
    assert "nonsense" in paired.missing
    assert process is not None
    assert process.returncode == 0


def test_list_names_every_benchmark() -> None:
    listed = subprocess.run([sys.executable, BENCHMARKS / "run.py", "--list"], capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    found = {line.split()[0] for line in listed.stdout.splitlines()}
    assert found == {path.stem.removeprefix("bench_").replace("_", "-") for path in BENCHMARKS.glob("bench_*.py")}


def test_an_unknown_name_is_an_error_that_names_those_there_are() -> None:
    refused = subprocess.run([sys.executable, BENCHMARKS / "run.py", "kyes"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "kyes" in refused.stderr
    assert "keys" in refused.stderr


def test_replayed_policies_find_no_more_than_there_is_and_tell_a_scan_from_a_session() -> None:
    import bench_policies as bench

    from lmcache_core.policies.lru import LRU
    from lmcache_core.policies.s3fifo import S3FIFO

    trace = list(bench.sessions(600, scans=bench.SCANS))
    assert trace == list(bench.sessions(600, scans=bench.SCANS))
    repeated = sum(map(len, trace)) - len({key for prompt in trace for key in prompt})
    assert bench.hit_chunks(trace, None, 0) == repeated
    assert bench.hit_chunks(trace, LRU(), 1 << 30) == repeated
    assert bench.hit_chunks(trace, LRU(), 512) < bench.hit_chunks(trace, S3FIFO(), 512) < repeated


def test_the_script_for_the_day_with_an_accelerator_works_without_one(tmp_path: Path) -> None:
    script = [sys.executable, str(BENCHMARKS / "on_device.py"), "cpu", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = tmp_path.glob("device-cpu-*-quick.json")
    found = json.loads(path.read_text())
    assert found["versions"]["lmcache-core"]
    outcomes = {law["law"]: law["outcome"] for law in found["laws"]["laws"]}
    of_paths = {"every_path_copies_the_same_bytes", "a_path_that_there_is_not_is_refused"}
    assert {name for name, outcome in outcomes.items() if outcome != "passed"} == of_paths
    assert {figure["path"] for figure in found["paths"]["figures"]} == {"direct"}
    assert {"gather, cpu", "longest wait for the GIL, scatter, cpu"} <= {row["row"] for row in found["benchmark"]}
    assert set(found["missed"]) <= {row["row"] for row in found["benchmark"]}
