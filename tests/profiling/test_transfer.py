# SPDX-License-Identifier: Apache-2.0
"""vpkl-transfer as a user runs it: results, waived rows, refusals, time limit."""
import json
import math
import os
import pathlib
import pty
import shutil
import subprocess
import tempfile
import time
import unittest

TRANSFER = os.environ["VPKL_TRANSFER"]
CUDA = os.environ["VPKL_CUDA"] == "1"
SMALL = ["--batch", "2", "--length", "40", "--vocabulary", "640", "--chunk-width", "8", "--rows",
         "6", "--repetitions", "4", "--warmup", "1"]
DEVICE_ENGINES = ["pageable", "staged", "pinned_rows", "pinned_2d", "mapped"]
HOST_ENGINES = ["pack_fresh", "pack_reused"]


def transfer(*arguments, timeout=120):
    return subprocess.run([TRANSFER, *map(str, arguments)], capture_output=True, text=True,
                          timeout=timeout)


def strict(line):
    def refuse(text):
        raise ValueError(f"{text} is no JSON")
    return json.loads(line, parse_constant=refuse)


class Case(unittest.TestCase):
    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="vpkl-test-"))
        self.addCleanup(shutil.rmtree, self.directory)

    def run_ok(self, *arguments):
        path = self.directory / "deep" / "t.jsonl"
        done = transfer(*arguments, "--output-jsonl", path)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done, [strict(line) for line in path.read_text().splitlines()]

    def refused(self, *arguments, says, status=2):
        start = time.monotonic()
        done = transfer(*arguments)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        self.assertLess(time.monotonic() - start, 10)
        for text in [says] if isinstance(says, str) else says:
            self.assertIn(text, done.stderr)


class Results(Case):
    def test_every_case_has_one_record(self):
        done, records = self.run_ok(*SMALL, "--type", "bf16,fp32", "--vocabulary", "640,641",
                                    "--chunk-width", "8,16")
        self.assertTrue(all(r["schema"] == "vpkl-transfer/1" for r in records))
        self.assertEqual(records[0]["type"], "host")
        transfers = [r for r in records if r["type"] == "transfer"]
        keys = [r["key"] for r in transfers]
        self.assertEqual(len(keys), len(set(keys)))
        # 2 vocabularies, 2 types, 2 directions, 2 chunk widths and the scattered rows, 7 engines.
        self.assertEqual(len(keys), 2 * 2 * 2 * 3 * 7)
        for r in transfers:
            if r["engine"] in DEVICE_ENGINES and not CUDA:
                continue
            self.assertEqual(r["status"], "ok", r)
            self.check_measured(r)
        unaligned = {r["vocabulary"] for r in transfers if not r["rows_aligned_to_128_bytes"]}
        self.assertEqual(unaligned, {641})
        self.assertIn("rows not aligned", done.stdout)
        self.assertEqual(len([r for r in records if r["type"] == "pinning"]), 4)

    def check_measured(self, r):
        us = r["microseconds"]
        self.assertLess(0, us["p10"])
        self.assertLessEqual(us["p10"], us["median"])
        self.assertLessEqual(us["median"], us["p90"])
        self.assertTrue(math.isclose(r["gigabytes_per_second"],
                                     r["bytes"] / us["median"] * 1e-3, rel_tol=1e-6))
        self.assertTrue(math.isclose(r["ratio_to_reference"],
                                     r["reference"]["microseconds"]["median"] / us["median"],
                                     rel_tol=1e-6))
        self.assertEqual(r["wrong_elements"], 0)
        self.assertEqual(r["verified_transfers"], 2 * (4 + 1))
        size = {"bf16": 2, "fp32": 4}[r["element_type"]]
        self.assertEqual(r["bytes"], r["rows"] * r["vocabulary"] * size)
        if r["pattern"] == "chunk":
            self.assertEqual(r["rows"], r["batch"] * r["chunk_width"])

    @unittest.skipIf(CUDA, "a device measures these")
    def test_what_needs_a_device_is_waived_by_name(self):
        done, records = self.run_ok(*SMALL, "--sizes", "--smallest-size", 4096, "--largest-size",
                                    20000, "--all-gpus", "--interference", "--attribution")
        self.assertIsNone(records[0]["device"])
        waived = [r for r in records if r["status"] == "waived"]
        self.assertTrue(all("needs a CUDA device" in r["reason"] for r in waived))
        self.assertTrue(all("microseconds" not in r for r in waived))
        for kind in ("transfer", "attribution", "interference"):
            engines = [r["key"].split("/")[2] for r in waived if r["type"] == kind]
            self.assertEqual(sorted(engines), sorted(DEVICE_ENGINES * 4), kind)
        self.assertEqual({r["type"] for r in waived},
                         {"transfer", "attribution", "interference", "pinning", "size",
                          "all_gpus"})
        for engine in DEVICE_ENGINES:
            self.assertRegex(done.stdout, rf"(?m)^{engine} +waived: needs a CUDA device")
        for engine in HOST_ENGINES:
            self.assertRegex(done.stdout, rf"(?m)^{engine} +\d")

    def test_sizes(self):
        _, records = self.run_ok("--engine", "none", "--sizes", "--smallest-size", 1000,
                                 "--largest-size", 20001)
        host = [r for r in records if r["type"] == "size" and r["direction"] == "h2h"]
        self.assertEqual([(r["bytes"], r["memory"]) for r in host],
                         [(b, m) for b in (1000, 4000, 16000, 20001)
                          for m in ("host_fresh", "host_touched")])
        self.assertTrue(all(r["status"] == "ok" and r["wrong_bytes"] == 0 for r in host))
        self.assertEqual([r for r in records if r["type"] == "transfer"], [])

    def test_results_are_appended(self):
        path = self.directory / "twice.jsonl"
        for _ in range(2):
            self.assertEqual(transfer(*SMALL, "--output-jsonl", path).returncode, 0)
        kinds = [strict(line)["type"] for line in path.read_text().splitlines()]
        self.assertEqual(kinds.count("host"), 2)

    def test_time_limit_waives_the_rest(self):
        _, records = self.run_ok(*SMALL, "--engine", "pack_reused", "--time-limit", "1e-9")
        transfers = [r for r in records if r["type"] == "transfer"]
        self.assertEqual(len(transfers), 4)
        for r in transfers:
            self.assertEqual(r["status"], "waived")
            self.assertIn("--time-limit", r["reason"])

    def test_memory_that_cannot_be_had(self):
        path = self.directory / "huge.jsonl"
        done = transfer("--batch", 1, "--length", 1 << 20, "--vocabulary", 1 << 24,
                        "--chunk-width", 1, "--rows", 1, "--engine", "pack_reused",
                        "--output-jsonl", path)
        self.assertEqual(done.returncode, 1, done.stderr)
        records = [strict(line) for line in path.read_text().splitlines()]
        failed = [r for r in records if r["status"] == "failed"]
        self.assertEqual({r["type"] for r in failed if r["type"] == "transfer"}, {"transfer"})
        self.assertTrue(all("bytes requested" in r["reason"] for r in failed))
        self.assertIn("measurements failed", done.stderr)

    def test_numbers_do_not_depend_on_the_locale(self):
        environment = {**os.environ, "LC_ALL": "de_DE.UTF-8"}
        path = self.directory / "locale.jsonl"
        done = subprocess.run([TRANSFER, *SMALL, "--output-jsonl", str(path)], env=environment,
                              capture_output=True, timeout=120)
        self.assertEqual(done.returncode, 0)
        self.assertTrue(all(strict(line) for line in path.read_text().splitlines()))

    def test_progress_on_a_terminal_only(self):
        done = transfer(*SMALL)
        self.assertNotIn("\r", done.stdout + done.stderr)
        ours, theirs = pty.openpty()
        child = subprocess.Popen([TRANSFER, *SMALL], stdout=subprocess.DEVNULL, stderr=theirs)
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:
                break
            if not part:
                break
            shown += part
        os.close(ours)
        self.assertEqual(child.wait(timeout=60), 0)
        self.assertIn(b"h2d/chunk/pack_fresh", shown)


class Refusals(Case):
    def test_flags(self):
        for flag, value, expected in (
                ("--batch", "0", "1"), ("--length", "x", "--length"), ("--vocabulary", "0", "1"),
                ("--chunk-width", "-1", "1"), ("--chunk-width", "2113", "2112"),
                ("--type", "fp8", "fp32, bf16 or fp16"), ("--engine", "dma", "pinned_2d"),
                ("--engine", "none", "--sizes"), ("--direction", "up", "h2d or d2h"),
                ("--pattern", "all", "chunk or rows"), ("--rows", "0", "1"),
                ("--rows", "8449", "--batch 4 x --length 2112"), ("--repetitions", "0", "1"),
                ("--warmup", "-1", "0"), ("--smallest-size", "0", "1"),
                ("--smallest-size", "1073741825", "--largest-size 1073741824"),
                ("--size-repetitions", "0", "1"), ("--numa-node", "1000", "-1 or a node"),
                ("--numa-node", "-2", "-1"), ("--time-limit", "0", "above 0"),
                ("--time-limit", "nan", "above 0"), ("--time-limit", "inf", "above 0"),
                ("--vocabulary", "1000000000000", "2^44")):
            with self.subTest(flag=flag, value=value):
                self.refused(f"{flag}={value}", says=[flag, value, expected])
        self.refused("--no-such-flag", says="--no-such-flag")

    def test_output_is_checked_first(self):
        self.refused(*SMALL, "--output-jsonl", "/proc/none/t.jsonl", says="/proc/none", status=1)
        other = self.directory / "other.jsonl"
        other.write_text("not json\n")
        self.refused("--output-jsonl", other, says="other.jsonl", status=1)
        self.assertEqual(other.read_text(), "not json\n")

    def test_full_device(self):
        self.refused(*SMALL, "--output-jsonl", "/dev/full", says="/dev/full", status=1)

    def test_help(self):
        done = transfer("--help")
        self.assertEqual(done.returncode, 0)
        for text in ("Example", "--numa-node", "=[75968]", "pinned_2d"):
            self.assertIn(text, done.stdout)


if __name__ == "__main__":
    unittest.main()
