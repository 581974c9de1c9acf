# SPDX-License-Identifier: Apache-2.0
"""vpkl-replay as a user runs it: results, refusals and receipts."""
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
import unittest

REPLAY = os.environ["VPKL_REPLAY"]
FIXTURE_APP = os.environ["VPKL_FIXTURE_APP"]
FIXTURE = str(pathlib.Path(os.environ["VPKL_FIXTURES"]) / "smollm2-135m.h5")
MPIEXEC = os.environ["VPKL_MPIEXEC"].split()
MPIEXEC_FLAGS = os.environ["VPKL_MPIEXEC_FLAGS"].split()
SHORT = ["--warmup-updates", "1", "--measure-updates", "2", "--repetitions", "2"]


def replay(*arguments, ranks=1, timeout=120):
    command = [REPLAY, *map(str, arguments)]
    if ranks > 1:
        command = [*MPIEXEC, str(ranks), *MPIEXEC_FLAGS, *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


class Case(unittest.TestCase):
    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="vpkl-test-"))
        self.addCleanup(shutil.rmtree, self.directory)

    def run_ok(self, *arguments, **keywords):
        done = replay(*arguments, **keywords)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def refused(self, *arguments, says, ranks=1, limit=10.0):
        """Non-zero within ten seconds, with a message that names the fault."""
        start = time.monotonic()
        done = replay(*arguments, ranks=ranks, timeout=60)
        seconds = time.monotonic() - start
        self.assertNotEqual(done.returncode, 0, done.stdout)
        self.assertLess(seconds, limit)
        for text in [says] if isinstance(says, str) else says:
            self.assertIn(text, done.stderr)
        return done.stderr

    def records(self, path):
        return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


class Results(Case):
    def results(self, ranks, *more):
        path = self.directory / "out" / f"replay{ranks}.jsonl"
        table = self.run_ok("--fixture", FIXTURE, "--batch-size", 2,
                            "--gradient-accumulation-steps", 2, "--normalization",
                            "global_divisor", "--output-jsonl", path, *SHORT, *more, ranks=ranks)
        return table, self.records(path), path

    def check(self, records, ranks, tokens=80):
        summary = records[-1]
        self.assertEqual(summary["type"], "summary")
        self.assertEqual([r["route"] for r in summary["routes"]],
                         ["dense", "gathered", "vocab_parallel"])
        self.assertLess(summary["comparison"]["first_update_relative_difference"], 1e-6)
        self.assertLess(summary["comparison"]["relative_difference_from_pytorch"], 1e-5)
        updates = [r for r in records if r["type"] == "update"]
        self.assertEqual(len(updates), 3 * 2 * 3)
        self.assertTrue(all(u["response_tokens"] == tokens for u in updates))
        for route in summary["routes"]:
            self.assertTrue(route["masters_changed"])
            self.assertTrue(route["teacher_unchanged"])
            self.assertTrue(route["repetitions_bitwise_equal"])
            self.assertEqual((route["applied_updates"], route["skipped_updates"]), (4, 0))
            self.assertLess(route["loss_after"], route["loss_before"])
            self.assertEqual(len(route["ranks"]), ranks)
        return {r["route"]: r["ranks"] for r in summary["routes"]}

    def test_routes_agree_with_each_other_and_with_pytorch(self):
        for ranks in (1, 2, 3):
            with self.subTest(ranks=ranks):
                table, records, path = self.results(ranks)
                by_route = self.check(records, ranks)
                self.assertIn("vocab_parallel", table)
                # 2 + 2 micro-batches of evaluation and 3 updates of 2, one call each.
                calls = 2 + 2 + 3 * 2
                for route, all_gathers in (("dense", 0), ("gathered", 2), ("vocab_parallel", 1)):
                    for rank in by_route[route]:
                        self.assertEqual(rank["operator_calls"], calls)
                        self.assertEqual(rank["collectives"], all_gathers * calls if ranks > 1 else 0)
                # A shard's cache is a part of the whole vocabulary's.
                largest = max(rank["cache_bytes"] for rank in by_route["vocab_parallel"])
                self.assertLess(largest, by_route["gathered"][0]["cache_bytes"] / ranks * 1.1)
                self.assertIn("agree", self.run_ok("--verify", "--output-jsonl", path))

    def test_statistics_of_the_teacher(self):
        """Only forward KL over several ranks uses them: the same gradient, one more message."""
        runs = {}
        for flags in ([], ["--teacher-statistics"]):
            _, records, path = self.results(2, *flags)
            self.check(records, 2)
            receipt = json.loads(pathlib.Path(f"{path}.rank0.receipt.json").read_text())
            path.unlink()
            runs[bool(flags)] = records[-1]["routes"], receipt["fp32_master_sha256"]
        self.assertEqual(runs[False][1], runs[True][1])
        calls = 2 + 2 + 3 * 2
        for without, with_ in zip(runs[False][0], runs[True][0]):
            more = calls if without["route"] == "vocab_parallel" else 0
            for a, b in zip(without["ranks"], with_["ranks"]):
                self.assertEqual(b["collectives"], a["collectives"] + more)
            self.assertAlmostEqual(with_["loss_after"], without["loss_after"], delta=1e-6)

    def test_data_parallel_replicas_take_other_samples(self):
        path = self.directory / "dp.jsonl"
        common = ["--fixture", FIXTURE, "--normalization", "global_divisor", *SHORT]
        self.run_ok(*common, "--batch-size", 1, "--gradient-accumulation-steps", 2,
                    "--data-parallel", 2, "--output-jsonl", path, ranks=4)
        alone = self.directory / "alone.jsonl"
        self.run_ok(*common, "--batch-size", 4, "--output-jsonl", alone)
        self.check(self.records(path), 4)
        a, b = self.records(path)[-1]["routes"], self.records(alone)[-1]["routes"]
        for left, right in zip(a, b):
            self.assertAlmostEqual(left["loss_after"], right["loss_after"], delta=1e-6)
        # Replicas of one shard end with the same masters.
        receipts = [json.loads((self.directory / f"dp.jsonl.rank{r}.receipt.json").read_text())
                    for r in range(4)]
        for r in (0, 1):
            self.assertEqual(receipts[r]["fp32_master_sha256"],
                             receipts[r + 2]["fp32_master_sha256"])

    def test_plans_widths_and_cache_modes_give_the_same_masters(self):
        masters = set()
        for i, flags in enumerate((["--plan", "rows"], ["--plan", "chunks", "--chunk-width", 7],
                                   ["--plan", "chunks", "--chunk-width", 64],
                                   ["--plan", "rows", "--cache-mode", "response",
                                    "--chunk-width", 3])):
            path = self.directory / f"{i}.jsonl"
            self.run_ok("--fixture", FIXTURE, "--implementation", "vocab_parallel",
                        "--batch-size", 4, "--output-jsonl", path, *SHORT, *flags, ranks=2)
            receipt = json.loads((self.directory / f"{i}.jsonl.rank1.receipt.json").read_text())
            masters.add(receipt["fp32_master_sha256"]["vocab_parallel"])
        self.assertEqual(len(masters), 1)

    def test_every_divergence_and_type(self):
        for divergence in ("forward_kl", "reverse_kl", "jsd"):
            for temperature in (1, 2):
                for logits in ("fp32", "bf16"):
                    with self.subTest(divergence=divergence, t=temperature, logits=logits):
                        path = self.directory / f"{divergence}{temperature}{logits}.jsonl"
                        self.run_ok("--fixture", FIXTURE, "--divergence", divergence,
                                    "--temperature", temperature, "--logits-type", logits,
                                    "--warmup-updates", 0, "--measure-updates", 1,
                                    "--repetitions", 1, "--batch-size", 4,
                                    "--output-jsonl", path, ranks=2)
                        comparison = self.records(path)[-1]["comparison"]
                        # Rounding to bf16 may fall on the other side for another summation order.
                        limit = 1e-5 if logits == "fp32" else 1e-4
                        self.assertLess(comparison["relative_difference_from_pytorch"], limit)

    def test_non_finite_gradients_skip_the_update_on_all_ranks(self):
        path = self.directory / "skip.jsonl"
        # fp16 gradients overflow at this scale.
        self.run_ok("--fixture", FIXTURE, "--logits-type", "fp16", "--loss-scale", "1e9",
                    "--output-jsonl", path, *SHORT, ranks=2)
        for route in self.records(path)[-1]["routes"]:
            self.assertEqual((route["applied_updates"], route["skipped_updates"]), (0, 4))
            self.assertFalse(route["masters_changed"])

    def test_results_are_appended(self):
        path = self.directory / "twice.jsonl"
        for _ in range(2):
            self.run_ok("--fixture", FIXTURE, "--implementation", "dense", "--output-jsonl", path,
                        *SHORT)
        self.assertEqual([r["type"] for r in self.records(path)].count("summary"), 2)
        self.run_ok("--verify", "--output-jsonl", path)

    def test_no_progress_when_piped(self):
        done = replay("--fixture", FIXTURE, "--implementation", "dense", *SHORT)
        self.assertNotIn("\r", done.stdout + done.stderr)


class Refusals(Case):
    def test_flags(self):
        for flag, value in (("--implementation", "vocabparallel"), ("--mode", "live"),
                            ("--plan", "columns"), ("--chunk-width", "0"), ("--chunk-width", "x"),
                            ("--divergence", "kl"), ("--temperature", "0"),
                            ("--temperature", "nan"), ("--temperature", "-1"),
                            ("--normalization", "mean"), ("--loss-scale", "0"),
                            ("--loss-scale", "inf"), ("--logits-type", "fp8"),
                            ("--cache-mode", "hidden"), ("--cache-mode", "none"),
                            ("--cache-budget", "-1"), ("--data-parallel", "0"),
                            ("--pipeline-parallel", "2"), ("--sequence-parallel", "2"),
                            ("--batch-size", "0"), ("--gradient-accumulation-steps", "0"),
                            ("--warmup-updates", "-1"), ("--measure-updates", "0"),
                            ("--repetitions", "0"), ("--learning-rate", "nan"),
                            ("--weight-decay", "-1")):
            with self.subTest(flag=flag, value=value):
                self.refused("--fixture", FIXTURE, f"{flag}={value}", says=flag)
        self.refused("--fixture", FIXTURE, "--divergence", "jsd", "--beta", "1", says="--beta")
        self.refused("--fixture", FIXTURE, "--no-such-flag", says="--no-such-flag")
        self.refused(says="--fixture")
        self.refused("--verify", says="--output-jsonl")

    @unittest.skipIf(os.environ.get("VPKL_CUDA"), "a device has what the flag needs")
    def test_profile_needs_a_device(self):
        self.refused("--fixture", FIXTURE, "--profile", says=["--profile", "CUDA"])

    def test_online_names_the_trainer(self):
        self.refused("--fixture", FIXTURE, "--mode", "online", says=["--mode", "vpkl-opsd"])

    def test_bad_flags_end_all_ranks_with_one_message(self):
        message = self.refused("--fixture", FIXTURE, "--chunk-width", 0, says="--chunk-width",
                               ranks=3)
        self.assertEqual(message.count("--chunk-width:"), 1)

    def test_label_must_match_the_configuration(self):
        config = self.directory / "gathered.json"
        config.write_text(json.dumps({"route": "gathered", "fixture": FIXTURE}))
        self.refused("--config", config, "--implementation", "dense",
                     says=["--implementation is dense", "gathered"])
        self.refused("--config", config, says=["--implementation is all", "gathered"])
        self.run_ok("--config", config, "--implementation", "gathered", *SHORT, ranks=2)

    def test_configuration_file(self):
        config = self.directory / "c.json"
        config.write_text(json.dumps({"fixture": FIXTURE, "implementation": "dense",
                                      "warmup-updates": 0, "measure-updates": 1,
                                      "repetitions": 1, "temperature": 2.0}))
        self.assertIn("dense", self.run_ok("--config", config))
        for content, says in (("[1]", "JSON object"), ("{", "JSON object"),
                              ('{"chunk-width": [1]}', "chunk-width"),
                              ('{"no-such-key": 1}', "no-such-key"),
                              ('{"chunk-width": 0}', "chunk-width")):
            with self.subTest(content=content):
                config.write_text(content)
                self.refused("--config", config, says=says)
        self.refused("--config", self.directory / "none.json", says="none.json")

    def test_fixture(self):
        self.refused("--fixture", self.directory / "none.h5", says="none.h5", ranks=2)
        damaged = self.directory / "damaged.h5"
        content = pathlib.Path(FIXTURE).read_bytes()
        damaged.write_bytes(content[: len(content) // 2])
        self.refused("--fixture", damaged, says="damaged.h5", ranks=2)
        # One rank's shard of the head is damaged: every rank must end.
        flipped = bytearray(content)
        for at in range(len(content) - 400_000, len(content) - 1000, 5000):
            flipped[at] ^= 0xFF
        damaged.write_bytes(flipped)
        self.refused("--fixture", damaged, says="damaged.h5", ranks=2)

    def test_sizes(self):
        self.refused("--fixture", FIXTURE, "--batch-size", 5, says=["--batch-size is 5", "4"])
        self.refused("--fixture", FIXTURE, "--data-parallel", 2, ranks=3,
                     says=["--data-parallel is 2", "3 ranks"])
        self.refused("--fixture", FIXTURE, "--cache-budget", 1000, ranks=2,
                     says=["teacher cache", "1000"])

    def test_output(self):
        self.refused("--fixture", FIXTURE, "--output-jsonl", "/dev/full", *SHORT,
                     says="/dev/full", limit=60)
        self.refused("--fixture", FIXTURE, "--output-jsonl", "/proc/none/x.jsonl", says="/proc/none",
                     ranks=2)
        other = self.directory / "other.jsonl"
        other.write_text("not json\n")
        self.refused("--fixture", FIXTURE, "--output-jsonl", other, says="other.jsonl")
        self.assertEqual(other.read_text(), "not json\n")

    def test_receipts_notice_changes(self):
        path = self.directory / "r.jsonl"
        self.run_ok("--fixture", FIXTURE, "--implementation", "dense", "--output-jsonl", path, *SHORT)
        with open(path, "a") as file:
            file.write("{}\n")
        self.refused("--verify", "--output-jsonl", path, says=["r.jsonl", "SHA-256"])
        receipt = pathlib.Path(f"{path}.rank0.receipt.json")
        for change in ({"ranks": 0}, {"rank": 1}, {"inputs": []}, {"outputs": []}):
            receipt.write_text(json.dumps({**json.loads(receipt.read_text()), **change}))
            self.refused("--verify", "--output-jsonl", path, says="not the receipt of rank 0")
        os.remove(f"{path}.rank0.receipt.json")
        self.refused("--verify", "--output-jsonl", path, says="receipt")


class Synthetic(Case):
    def test_made_fixture_with_two_hidden_sizes(self):
        fixture = self.directory / "made.h5"
        subprocess.run([FIXTURE_APP, "make", "--samples", "3", "--sequence-length", "40",
                        "--prompt-length", "24", "--max-response", "8", "--vocabulary-size", "257",
                        "--hidden-student", "32", "--hidden-teacher", "48", "--type", "bf16",
                        "--seed", "7", "--output", fixture], check=True, timeout=60,
                       capture_output=True)
        self.assertIn("gathered", self.run_ok("--fixture", fixture, "--batch-size", 2, *SHORT,
                                              ranks=4))


if __name__ == "__main__":
    unittest.main()
