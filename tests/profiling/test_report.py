# SPDX-License-Identifier: Apache-2.0
"""vpkl-report against results written by hand, whose figures are worked out here."""
import base64
import csv
import html.parser
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

REPORT = os.environ["VPKL_REPORT"]
MIB = 1024 * 1024


def transfer(engine, rate, ratio, chunk=256, reference="pinned_contiguous", **more):
    size = 4 * chunk * 1000 * 2
    time = size / rate / 1e3
    return {"schema": "vpkl-transfer/1", "type": "transfer", "status": "ok", "engine": engine,
            "direction": "h2d", "pattern": "chunk", "element_type": "bf16", "batch": 4,
            "length": 2112, "vocabulary": 1000, "chunk_width": chunk, "rows": 4 * chunk,
            "bytes": size, "gigabytes_per_second": rate, "ratio_to_reference": ratio,
            "microseconds": {"median": time, "p10": time * 0.9, "p90": time * 1.2},
            "reference": {"name": reference, "gigabytes_per_second": rate / ratio,
                          "microseconds": {"median": time * ratio, "p10": 1, "p90": 2}}, **more}


def of_transfer(kind, **members):
    return {"schema": "vpkl-transfer/1", "type": kind, "status": "ok", **members}


def point(batch, isl, chunk, rate, spread=0.0, route="vocab_parallel", engine="automatic",
          plan="rows", version="0.1.0", **more):
    parameters = {
        "batch": batch, "isl": isl, "chunk_width": chunk, "route": route, "engine": engine,
        "plan": plan, "logits_type": "bf16", "warmup_updates": 4, "measure_updates": 12,
        "repetitions": 2, "ranks": 1, "launcher": [], "replay_flags": [], "environment": {},
        "fixture": {"samples": 4, "sequence_length": isl + 64, "prompt_length": isl,
                    "max_response": 64, "vocabulary_size": 75968, "hidden_student": 896,
                    "hidden_teacher": 1536, "type": "bf16", "seed": 1}}
    return {"schema": "vpkl-sweep/1", "kind": "sweep", "measurement": "replay_step",
            "key": json.dumps([parameters, version]), "parameters": parameters,
            "programs": {"replay": {"version": version, "sha256": version},
                         "fixture": {"sha256": "f"}},
            "machine": {"cpu": "C", "usable_cpus": 2, "gpus": []}, "wall_seconds": 1.0,
            "status": "ok", "failure": None, "reason": None, "exit_code": 0, "signal": None,
            "tokens_per_second": rate, "tokens_per_second_min": rate - spread,
            "tokens_per_second_max": rate + spread, "update_median_seconds": 0.25,
            "update_p10_seconds": 0.2, "update_p90_seconds": 0.3,
            "peak_bytes": batch * isl * MIB, "cache_bytes": batch * isl * MIB // 2,
            "fetched_bytes": 3_000_000, **more}


SWEEP = [
    # ISL 64: the best is batch 4, chunk width 128.
    point(1, 64, 128, 200), point(1, 64, 256, 150), point(4, 64, 128, 800, 10),
    point(4, 64, 256, 788, 5),
    # ISL 1024: the best has plan chunks; 256 at plan rows is its default.
    point(1, 1024, 256, 90), point(4, 1024, 128, 300), point(4, 1024, 256, 320, 4),
    point(4, 1024, 256, 400, plan="chunks"), point(4, 1024, 256, 80, engine="pageable"),
    point(4, 1024, 512, 0, status="failed", failure="out_of_memory", reason="42 bytes <requested>",
          exit_code=1)]
HOST = of_transfer("host", host={"cpu": "C", "usable_cpus": 2}, device={
    "name": "NVIDIA G", "driver": "1.2"}, pinned_memory_is_remote=True)
TIMING = {"microseconds": {"median": 10.0, "p10": 9.0, "p90": 12.0}, "gigabytes_per_second": 3.0}
WAIVED = {"status": "waived", "reason": "needs a device"}
TRANSFERS = [
    HOST, transfer("pinned_2d", 50.0, 1.0), transfer("pageable", 2.0, 0.04),
    transfer("pinned_2d", 48.0, 0.96, chunk=64), transfer("pageable", 1.5, 0.03, chunk=64),
    transfer("pack_fresh", 4.0, 0.5, reference="memcpy"),
    {k: v for k, v in transfer("mapped", 1.0, 1.0, **WAIVED).items()
     if k not in ("microseconds", "gigabytes_per_second", "reference", "ratio_to_reference")},
    of_transfer("attribution", key="k", activities=[
        {"what": "pageable to device", "count": 4, "bytes": 99, "device_microseconds": 5.5,
         "synchronous": True, "in_range": True}], remedies=["keep the rows", "pinned"]),
    of_transfer("attribution", key="other", **WAIVED),
    of_transfer("interference", key="k", slowdown=1.25, kernel_slowdown=1.5, **TIMING),
    of_transfer("pinning", bytes=2_000_000, pin_seconds=0.5, unpin_seconds=0.25,
                pays_after_chunk_fetches=7),
    of_transfer("size", memory="pinned", direction="h2d", bytes=4096, allocate_microseconds=33.0,
                pays_after_uses=None, **TIMING),
    of_transfer("size", memory="pinned", direction="h2d", bytes=16384, allocate_microseconds=34.0,
                pays_after_uses=2, **TIMING),
    of_transfer("all_gpus", devices=[{"device": 0, "alone_gigabytes_per_second": 55.0,
                                      "together_gigabytes_per_second": 54.0}],
                total_gigabytes_per_second=54.0, sum_of_alone_gigabytes_per_second=55.0)]
REPLAY = [{"type": "update", "route": "dense", "seconds": 1.0},
          {"type": "summary", "ranks": 2, "configuration": {
              "fixture": "/a/b/f.h5", "batch_size": 2, "chunk_width": 256, "plan": "rows",
              "transfer_engine": "automatic"}, "routes": [{
                  "route": "dense", "tokens_per_second_mean": 12.5, "tokens_per_second_min": 12.0,
                  "tokens_per_second_max": 13.0, "loss_before": 2.0, "loss_after": None,
                  "loss_after_reason": "NaN", "ranks": [
                      {"peak_bytes": 3 * MIB, "cache_bytes": MIB},
                      {"peak_bytes": 2 * MIB, "cache_bytes": 5 * MIB}]}]}]


class Page(html.parser.HTMLParser):
    """Checks that tags are closed in order; keeps images and the text."""

    VOID = {"meta", "img", "br", "link"}

    def __init__(self, text):
        super().__init__()
        self.open, self.images, self.text, self.unbalanced = [], [], "", []
        self.feed(text)
        self.unbalanced += self.open

    def handle_starttag(self, tag, attributes):
        if tag == "img":
            self.images.append(dict(attributes))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data):
        self.text += data


class Case(unittest.TestCase):
    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="vpkl-test-"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.out = self.directory / "report"

    def write(self, records, name="r.jsonl"):
        path = self.directory / name
        path.write_text("".join(json.dumps(r) + "\n" for r in records))
        return path

    def report(self, *arguments, status=0, **keywords):
        done = subprocess.run([sys.executable, REPORT, *map(str, arguments)], capture_output=True,
                              text=True, timeout=60, **keywords)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done

    def csv(self, name):
        with open(self.out / f"{name}.csv", encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def tables(self, records):
        self.report(self.write(records), "--output-dir", self.out, "--no-plots")


class Numbers(Case):
    def test_recommended_setting(self):
        self.tables(SWEEP)
        rows = self.csv("recommended")
        self.assertEqual([(r["ISL"], r["batch"], r["chunk width"], r["plan"], r["tokens/s"])
                          for r in rows],
                         [("64", "4", "128", "rows", "800"), ("1024", "4", "256", "chunks", "400")])
        # 4 · 64 and 4 · 1024 MiB, the cache half of it.
        self.assertEqual([(float(r["peak MiB a rank"]), float(r["cache MiB a rank"]))
                          for r in rows], [(256, 128), (4096, 2048)])
        self.assertEqual((rows[0]["min"], rows[0]["max"]), ("790", "810"))

    def test_how_far_each_default_is(self):
        self.tables(SWEEP)
        found = {(r["ISL"], r["parameter"]): (r["of the best"], r[""])
                 for r in self.csv("defaults")}
        for key, share, remark in (
                (("64", "batch"), 200 / 800, ""),
                # 788 + 5 reaches 800 - 10.
                (("64", "chunk width"), 788 / 800, "spreads overlap"),
                (("64", "plan"), 1, ""), (("64", "all of them"), 150 / 800, ""),
                (("1024", "chunk width"), 1, ""), (("1024", "engine"), 1, ""),
                (("1024", "plan"), 320 / 400, ""), (("1024", "all of them"), 90 / 400, "")):
            with self.subTest(key=key):
                self.assertAlmostEqual(float(found[key][0]), share)
                self.assertEqual(found[key][1], remark)
        self.assertEqual(found["1024", "batch"], ("", "not measured"))

    def test_points_and_failures(self):
        self.tables(SWEEP)
        rows = self.csv("sweep")
        self.assertEqual(len(rows), 9)
        self.assertEqual([float(rows[0][c]) for c in ("update ms", "p10 ms", "p90 ms",
                                                      "fetched MB")], [250, 200, 300, 3])
        failed, = self.csv("failed")
        self.assertEqual([failed[c] for c in ("ISL", "chunk width", "what", "exit status", "signal",
                                              "reason")],
                         ["1024", "512", "out_of_memory", "1", "", "42 bytes <requested>"])

    def test_transfers(self):
        self.tables(TRANSFERS)
        rows = self.csv("transfers")
        # 4 · 256 · 1000 columns of 2 bytes are 2.048 MB: 40.96 µs at 50 GB/s.
        self.assertAlmostEqual(float(rows[0]["MB"]), 2.048)
        self.assertAlmostEqual(float(rows[0]["median µs"]), 40.96)
        for row, limit in zip(rows, (50, 50, 50, 50, 8)):
            self.assertAlmostEqual(float(row["limit GB/s"]), limit)
        self.assertEqual((rows[5]["GB/s"], rows[5]["remark"]), ("", "waived: needs a device"))
        self.assertIn("NVIDIA G, driver 1.2; C, 2 CPUs; pinned memory on another NUMA node",
                      (self.out / "report.md").read_text())

    def test_what_else_transfer_measures(self):
        self.tables(TRANSFERS)
        first, second = self.csv("attribution")
        self.assertEqual([first[c] for c in ("what the device did", "count", "bytes", "device µs",
                                             "synchronous", "remedy")],
                         ["pageable to device", "4", "99", "5.5", "yes", "keep the rows pinned"])
        self.assertEqual(second["remedy"], "waived: needs a device")
        row, = self.csv("interference")
        self.assertEqual([row[c] for c in ("median µs", "GB/s", "times alone",
                                           "kernel, times alone")], ["10.0", "3.0", "1.25", "1.5"])
        row, = self.csv("pinning")
        self.assertEqual(list(row.values()), ["2.0", "0.5", "0.25", "7", ""])
        self.assertEqual([(r["allocation µs"], r["pays after uses"]) for r in self.csv("sizes")],
                         [("33.0", ""), ("34.0", "2")])
        self.assertEqual([list(r.values()) for r in self.csv("gpus")],
                         [["GPU 0", "55.0", "54.0", ""], ["total", "55.0", "54.0", ""]])

    def test_hosts_are_not_mixed(self):
        self.tables([HOST, transfer("mapped", 50.0, 1.0), HOST, transfer("mapped", 40.0, 1.0)])
        self.assertEqual([self.csv(f"transfers-{i}")[0]["GB/s"] for i in (1, 2)], ["50.0", "40.0"])

    def test_replay(self):
        self.tables(REPLAY)
        row, = self.csv("replay")
        self.assertEqual([row[c] for c in ("fixture", "ranks", "route", "tokens/s", "loss after")],
                         ["f.h5", "2", "dense", "12.5", ""])
        self.assertEqual((float(row["peak MiB a rank"]), float(row["cache MiB a rank"])), (3, 5))

    def test_setups_are_not_mixed(self):
        self.tables([point(1, 64, 256, 100), point(1, 64, 256, 900, version="0.2.0")])
        self.assertEqual([self.csv(f"recommended-{i}")[0]["tokens/s"] for i in (1, 2)],
                         ["100", "900"])

    def test_the_last_of_two_results_of_a_point_counts(self):
        self.tables([point(1, 64, 256, 0, status="failed", failure="error", reason="x"),
                     point(1, 64, 256, 100)])
        self.assertEqual(self.csv("recommended")[0]["tokens/s"], "100")
        self.assertFalse((self.out / "failed.csv").exists())


class Output(Case):
    def test_page_plots_and_markdown(self):
        done = self.report(self.write(TRANSFERS + SWEEP + REPLAY), "--output-dir", self.out,
                           "--title", "A <b> & c")
        page = (self.out / "report.html").read_text(encoding="utf-8")
        parsed = Page(page)
        self.assertEqual(parsed.unbalanced, [])
        self.assertIn("A <b> & c", parsed.text)
        self.assertIn("42 bytes <requested>", parsed.text)
        self.assertEqual(len(parsed.images), 7)
        for image in parsed.images:
            self.assertGreater(len(image["alt"]), 40)
            head, _, data = image["src"].partition(",")
            self.assertEqual(head, "data:image/svg+xml;base64")
            xml.etree.ElementTree.fromstring(base64.b64decode(data))
        # Self-contained: nothing is loaded from elsewhere.
        self.assertEqual(re.findall(r'(?:src|href)=(?!"data:)|url\(|@import', page), [])
        self.assertIn("@media print", page)
        for name in ("bandwidth-h2d-chunk-pinned_contiguous", "bandwidth-h2d-chunk-memcpy",
                     "bandwidth-chunk", "sizes", "throughput", "alternatives", "memory"):
            self.assertEqual((self.out / f"{name}.png").read_bytes()[:4], b"\x89PNG")
            xml.etree.ElementTree.parse(self.out / f"{name}.svg")
        alts = " ".join(image["alt"] for image in parsed.images)
        for text in ("pinned_2d 50.00, pageable 2.00, limit 50.00", "pack_fresh 4.00, limit 8.00",
                     "plan chunks 400.0, engine pageable 80.0",
                     "ISL 64: 800.0 tokens/s at batch 4, chunk width 128", "4.000 GiB at batch 4"):
            self.assertIn(text, alts)
        markdown = (self.out / "report.md").read_text(encoding="utf-8")
        self.assertIn("| 64 | 4 | 128 | vocab_parallel | automatic | rows | 800.0 |", markdown)
        self.assertIn("(throughput.svg)", markdown)
        self.assertIn("Recommended setting", done.stdout)
        self.assertIn("98.5 %", done.stdout)

    def test_same_input_same_page(self):
        path = self.write(SWEEP[:4])
        for name in ("a", "b"):
            self.report(path, "--output-dir", self.directory / name, "--quiet")
        self.assertEqual((self.directory / "a" / "report.html").read_bytes(),
                         (self.directory / "b" / "report.html").read_bytes())

    def test_benchmarks(self):
        path = self.directory / "b.json"
        path.write_text(json.dumps({"context": {}, "benchmarks": [
            {"name": "x/1", "run_type": "iteration", "real_time": 2.5, "time_unit": "us",
             "iterations": 7}, {"name": "x/1_mean", "run_type": "aggregate"}]}, indent=1))
        self.report(path, "--output-dir", self.out)
        self.assertEqual(self.csv("benchmarks"), [{"benchmark": "x/1", "time": "2.5", "unit": "us",
                                                   "iterations": "7", "error": ""}])

    def test_tables_need_neither_a_folder_nor_matplotlib(self):
        # A module of that name that cannot be imported.
        (self.directory / "matplotlib.py").write_text("raise ImportError('not here')\n")
        environment = {**os.environ, "PYTHONPATH": str(self.directory)}
        path = self.write(SWEEP)
        self.assertIn("800.0", self.report(path, env=environment).stdout)
        self.report(path, "--output-dir", self.out, "--no-plots", env=environment)
        self.assertNotIn("<img", (self.out / "report.html").read_text())
        self.assertIn("python3-matplotlib", self.report(path, "--output-dir", self.out, status=1,
                                                        env=environment).stderr)


class Input(Case):
    def test_unknown_kinds_are_named(self):
        done = self.report(self.write([{"kind": "wonder"}, {"a": 1}, {"type": "transfer"},
                                       point(1, 64, 256, 5, schema="vpkl-sweep/9"), *SWEEP]),
                           "--output-dir", self.out, "--no-plots")
        for name in ("'wonder'", "'None'", "'transfer'", "'sweep'"):
            self.assertIn(f"left out 1 records of unknown kind {name}", done.stderr)
        self.assertIn("wonder", (self.out / "report.html").read_text())

    def test_cut_last_line(self):
        path = self.write(SWEEP)
        path.write_text(path.read_text()[:-200])
        done = self.report(path)
        self.assertIn("cut", done.stderr)
        self.assertIn("800.0", done.stdout)

    def test_only_failures(self):
        done = self.report(self.write(SWEEP[-1:]), "--output-dir", self.out)
        self.assertIn("42 bytes", done.stdout)
        self.assertTrue((self.out / "report.html").exists())

    def test_refusals(self):
        good = self.write(SWEEP)
        for text, says in (("{}\nx\n{}\n", "line 2"), ("[1]\n", "line 1"), ('{"a": NaN}\n', "NaN"),
                           ("", "nothing to report"), ('{"type": "update"}\n', "nothing to report"),
                           (json.dumps({k: v for k, v in SWEEP[0].items() if k != "peak_bytes"})
                            + "\n", "'peak_bytes'"),
                           (json.dumps(of_transfer("transfer")) + "\n", "'engine'")):
            with self.subTest(text=text):
                bad = self.directory / "bad.jsonl"
                bad.write_text(text)
                self.assertIn(says, self.report(bad, status=1).stderr)
        (self.directory / "bytes").write_bytes(b"\xff\n")
        for arguments, says, status in (
                ([self.directory / "bytes"], "UTF-8", 1), ([self.directory / "none"], "none", 1),
                ([self.directory], "cannot be read", 1),
                ([good, "--no-plots", "--output-dir", good / "x"], "cannot be written", 1),
                ([], "FILE", 2), ([good, "--quiet"], "--quiet", 2),
                ([good, "--no-such-flag"], "--no-such-flag", 2)):
            with self.subTest(arguments=arguments):
                self.assertIn(says, self.report(*arguments, status=status).stderr)

    def test_help(self):
        text = self.report("--help").stdout
        self.assertIn("Example", text)
        self.assertIn("default", text)


if __name__ == "__main__":
    unittest.main()
