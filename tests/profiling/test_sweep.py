# SPDX-License-Identifier: Apache-2.0
"""vpkl-sweep: resuming, failed points and refusals with stand-ins for the programs it runs, and one
sweep with the real ones."""
import json
import os
import pathlib
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest

SWEEP = os.environ["VPKL_SWEEP"]
REPLAY = os.environ["VPKL_REPLAY"]
FIXTURE_APP = os.environ["VPKL_FIXTURE_APP"]
MPIEXEC = os.environ["VPKL_MPIEXEC"]
MPIEXEC_FLAGS = os.environ["VPKL_MPIEXEC_FLAGS"]

# Answers as vpkl-replay does. $FAKE/behaviour.json says what happens at which batch size, $FAKE/runs
# has a line for each run.
FAKE_REPLAY = """\
    import json, os, pathlib, signal, sys, time
    fake = pathlib.Path(os.environ["FAKE"])
    if "--version" in sys.argv:
        print((fake / "version").read_text())
        sys.exit(0)
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    batch = int(flags["--batch-size"])
    with open(fake / "runs", "a") as file:
        file.write(json.dumps({**flags, "pid": os.getpid()}) + "\\n")
    what = json.loads((fake / "behaviour.json").read_text()).get(str(batch), "ok")
    if what == "memory":
        print("vpkl-replay: TeacherCache::store: out of memory: requested 99 bytes\\n---\\n",
              file=sys.stderr)
        sys.exit(1)
    if what == "error":
        sys.exit("vpkl-replay: something else\\n*****\\n")
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "terminated":
        os.kill(os.getpid(), signal.SIGTERM)
    if what == "slow":
        time.sleep(60)
    route = {"route": flags["--implementation"], "tokens_per_second_mean": 10.0 * batch,
             "tokens_per_second_min": 9.0 * batch, "tokens_per_second_max": 11.0 * batch,
             "skipped_updates": 1 if what == "skips" else 0, "masters_changed": True,
             "teacher_unchanged": what != "teacher", "loss_before": None,
             "loss_before_reason": "NaN", "loss_after": 1.5,
             "ranks": [{k: 100 * r for k in ("peak_bytes", "cache_bytes", "fetches",
                        "fetched_bytes", "collectives", "operator_calls", "kernels")}
                       for r in (1, 2)]}
    space = "OpenMP" if what == "cpu" else "Cuda"
    with open(flags["--output-jsonl"], "w") as file:
        # Three updates of warm-up, then 1, 2, ..., 11 ms.
        for i in range(14):
            file.write(json.dumps({"type": "update", "measured": i >= 3, "response_tokens": 5,
                                   "seconds": (i - 2) / 1000 if i >= 3 else 9.0}) + "\\n")
        file.write("NaN\\n" if what == "nan" else "")
        file.write(json.dumps({"type": "summary", "ranks": int(os.environ.get("FAKE_RANKS", 1)),
                               "routes": [route], "environment": {"execution_space": space}}) + "\\n")
"""
FAKE_FIXTURE = """\
    import os, pathlib, sys
    flags = dict(zip(sys.argv[2::2], sys.argv[3::2]))
    with open(pathlib.Path(os.environ["FAKE"]) / "fixtures", "a") as file:
        file.write(flags["--prompt-length"] + "\\n")
    if flags["--prompt-length"] == "13":
        sys.exit("vpkl-fixture: no such prompt")
    pathlib.Path(flags["--output"]).write_text("fixture")
"""


def script(path, text):
    path.write_text(f"#!{sys.executable}\n" + textwrap.dedent(text))
    path.chmod(0o755)


def gone(pid, within=5.0):
    """Ended, or a zombie that nobody has waited for."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


class Case(unittest.TestCase):
    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="vpkl-test-"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.output = self.directory / "out" / "sweep.jsonl"
        self.environment = {**os.environ, "FAKE": str(self.directory)}
        script(self.directory / "replay", FAKE_REPLAY)
        script(self.directory / "fixture", FAKE_FIXTURE)
        (self.directory / "version").write_text("0.1.0")
        self.behave({})

    def behave(self, behaviour):
        (self.directory / "behaviour.json").write_text(json.dumps(behaviour))

    def command(self, *flags, output=None):
        return [sys.executable, SWEEP, "--replay", str(self.directory / "replay"),
                "--fixture-app", str(self.directory / "fixture"), "--isl", "8,16",
                "--batch", "1,2", "--chunk-width", "4", "--output", str(output or self.output),
                *map(str, flags)]

    def sweep(self, *flags, status=0, **keywords):
        done = subprocess.run(self.command(*flags, **keywords), capture_output=True, text=True,
                              timeout=60, env=self.environment)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done

    def lines_of(self, name):
        path = self.directory / name
        return path.read_text().splitlines() if path.exists() else []

    def runs(self):
        return [json.loads(line) for line in self.lines_of("runs")]

    def records(self):
        def refuse(text):
            raise ValueError(text)
        text = self.output.read_text()
        self.assertTrue(text.endswith("\n"))
        return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]

    def by_batch(self):
        return {r["parameters"]["batch"]: r for r in self.records()}


class Points(Case):
    def test_grid_and_figures(self):
        done = self.sweep()
        self.assertIn("4 points, 0 were there, 4 run, 0 failed", done.stdout)
        self.assertNotIn("\r", done.stdout + done.stderr)
        self.assertEqual([(r["parameters"]["batch"], r["parameters"]["isl"])
                          for r in self.records()], [(1, 8), (1, 16), (2, 8), (2, 16)])
        self.assertEqual(self.lines_of("fixtures"), ["8", "16"])
        record = self.records()[2]
        self.assertEqual((record["kind"], record["schema"], record["status"]),
                         ("sweep", "vpkl-sweep/1", "ok"))
        self.assertEqual((record["tokens_per_second"], record["tokens_per_second_min"],
                          record["tokens_per_second_max"]), (20.0, 18.0, 22.0))
        # 1 to 11 ms: the sixth is the median, the second and tenth are p10 and p90.
        self.assertEqual((record["update_median_seconds"], record["update_p10_seconds"],
                          record["update_p90_seconds"]), (0.006, 0.002, 0.010))
        self.assertEqual((record["response_tokens"], record["peak_bytes"]), (55, 200))
        self.assertEqual((record["loss_before"], record["loss_before_reason"]), (None, "NaN"))
        flags = self.runs()[2]
        self.assertEqual([flags[f] for f in ("--batch-size", "--chunk-width", "--implementation",
                                             "--transfer-engine", "--plan")],
                         ["2", "4", "vocab_parallel", "automatic", "rows"])

    def test_also_adds_one_point_a_value(self):
        self.sweep("--chunk-width", "4,256,512", "--also", "engine=automatic,mapped", "--also",
                   "plan=chunks", "--also", "route=dense")
        added = [r["parameters"] for r in self.records()[12:]]
        self.assertEqual([(p["batch"], p["isl"], p["chunk_width"]) for p in added], [(2, 16, 256)] * 3)
        self.assertEqual([(p["engine"], p["plan"], p["route"]) for p in added],
                         [("mapped", "rows", "vocab_parallel"),
                          ("automatic", "chunks", "vocab_parallel"), ("automatic", "rows", "dense")])

    def test_failed_points_are_recorded_and_the_sweep_goes_on(self):
        self.behave({"1": "memory", "2": "killed", "3": "slow", "4": "error", "5": "nan",
                     "6": "skips", "7": "teacher"})
        done = self.sweep("--batch", "1,2,3,4,5,6,7,8", "--isl", 8, "--time-out", 1)
        self.assertIn("8 points, 0 were there, 8 run, 7 failed", done.stdout)
        records = self.by_batch()
        told = {batch: (r["failure"], r["exit_code"], r["signal"]) for batch, r in records.items()}
        self.assertEqual(told, {1: ("out_of_memory", 1, None), 2: ("signal", -9, "SIGKILL"),
                                3: ("time_out", None, None), 4: ("error", 1, None),
                                5: ("results", 0, None), 6: ("verification", 0, None),
                                7: ("verification", 0, None), 8: (None, 0, None)})
        for batch, text in ((1, "requested 99 bytes"), (2, "SIGKILL"), (3, "no end after 1 s"),
                            (4, "vpkl-replay: something else"), (5, "line 15"),
                            (6, "1 updates were skipped"), (7, "the teacher changed")):
            self.assertIn(text, records[batch]["reason"])
        self.assertTrue(all(gone(run["pid"]) for run in self.runs()))
        # Failed points are finished until they are asked for.
        self.behave({})
        self.assertIn("8 were there", self.sweep("--batch", "1,2,3,4,5,6,7,8", "--isl", 8,
                                                 "--time-out", 1).stdout)
        # More time may help the one that had too little.
        self.assertIn("7 were there, 1 run, 6 failed", self.sweep(
            "--batch", "1,2,3,4,5,6,7,8", "--isl", 8, "--time-out", 50).stdout)
        self.assertIn("2 were there, 6 run, 0 failed", self.sweep(
            "--batch", "1,2,3,4,5,6,7,8", "--isl", 8, "--retry-failed").stdout)

    def test_nothing_but_failures_is_a_failure(self):
        self.behave({"1": "error", "2": "memory"})
        for there in (0, 4):
            done = self.sweep(status=1)
            self.assertIn(f"{there} were there", done.stdout)
            self.assertIn("no point has a result", done.stderr)

    def test_engines_are_waived_without_a_device(self):
        self.behave({"2": "cpu"})
        done = self.sweep("--isl", 8, "--also", "engine=pageable")
        self.assertIn("1 waived", done.stdout)
        record = self.records()[-1]
        self.assertEqual(record["status"], "waived")
        self.assertIn("OpenMP", record["reason"])
        self.assertNotIn("tokens_per_second", record)

    def test_launcher(self):
        script(self.directory / "launch", """\
            import os, sys
            os.environ["FAKE_RANKS"] = sys.argv[1]
            os.execv(sys.argv[2], sys.argv[2:])
        """)
        launch = f"{self.directory}/launch {{ranks}}"
        self.sweep("--ranks", 3, "--launcher", launch)
        self.assertEqual({r["status"] for r in self.records()}, {"ok"})
        done = self.sweep("--ranks", 3, "--launcher", f"{self.directory}/launch 2", status=1)
        self.assertIn("ran on 2 ranks, expected 3", done.stderr)


class Resume(Case):
    def test_finished_points_are_not_run_again(self):
        self.sweep()
        self.assertIn("4 were there, 0 run", self.sweep().stdout)
        self.assertIn("4 were there, 2 run", self.sweep("--chunk-width", "4", "--isl", "8,16,32")
                      .stdout)
        self.assertEqual(len(self.runs()), 6)
        listed = self.sweep("--isl", "8,99", "--list").stdout.splitlines()
        self.assertEqual([line.split()[0] for line in listed],
                         ["finished", "to", "finished", "to"])
        self.assertEqual(len(self.runs()), 6)

    def test_killed_half_way_and_cut_in_its_last_line(self):
        self.behave({"2": "slow"})
        process = subprocess.Popen(self.command(), env=self.environment)
        self.addCleanup(process.kill)
        end = time.monotonic() + 30
        while len(self.runs()) < 3 and time.monotonic() < end:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        self.assertEqual(len(self.runs()), 3)
        self.assertTrue(gone(self.runs()[2]["pid"]))
        # The second record is cut, as if the machine had stopped in the middle of the write.
        content = self.output.read_bytes()
        first, second = content.splitlines(keepends=True)
        self.output.write_bytes(first + second[:100])
        self.behave({})
        done = self.sweep()
        self.assertIn("1 were there, 3 run", done.stdout)
        self.assertIn("torn", done.stderr)
        self.assertEqual((self.directory / "out" / "sweep.jsonl.torn").read_bytes(),
                         second[:100] + b"\n")
        self.assertEqual(self.output.read_bytes().splitlines(keepends=True)[0], first)
        self.assertEqual([(r["parameters"]["batch"], r["parameters"]["isl"])
                          for r in self.records()], [(1, 8), (1, 16), (2, 8), (2, 16)])
        self.assertEqual(len(self.runs()), 6)
        self.assertEqual(sorted(path.name for path in self.output.parent.iterdir()),
                         ["sweep.jsonl", "sweep.jsonl.fixtures", "sweep.jsonl.torn"])

    def test_stopped_by_a_signal(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            self.behave({"2": "slow"})
            before = len(self.runs())
            process = subprocess.Popen(self.command("--seed", int(number)), env=self.environment,
                                       stderr=subprocess.PIPE, text=True)
            self.addCleanup(process.kill)
            end = time.monotonic() + 30
            while len(self.runs()) < before + 3 and time.monotonic() < end:
                time.sleep(0.02)
            process.send_signal(number)
            _, message = process.communicate(timeout=20)
            self.assertEqual(process.returncode, 128 + number)
            self.assertIn("resume", message)
            self.assertTrue(gone(self.runs()[-1]["pid"]))
            self.behave({})
            self.assertIn("2 were there, 2 run", self.sweep("--seed", int(number)).stdout)

    def test_a_point_that_was_told_to_stop_has_not_failed(self):
        # A scheduler at its time limit ends the measurement first and the sweep next.
        self.behave({"2": "terminated"})
        self.assertIn("resume", self.sweep(status=128 + signal.SIGTERM).stderr)
        self.behave({})
        self.assertIn("2 were there, 2 run, 0 failed", self.sweep().stdout)

    def test_bad_line_in_the_middle(self):
        self.sweep()
        whole = self.output.read_text().splitlines(keepends=True)
        for bad in ('{"a": NaN}\n', "{\n", "[1]\n", "\n"):
            with self.subTest(bad=bad):
                self.output.write_text("".join([*whole[:1], bad, *whole[1:]]))
                done = self.sweep(status=1)
                self.assertIn("line 2", done.stderr)
                self.assertEqual(self.output.read_text(), "".join([*whole[:1], bad, *whole[1:]]))
        self.assertEqual(len(self.runs()), 4)

    def test_another_flag_version_or_schema_reuses_nothing(self):
        def runs_all(*flags):
            return "0 were there, 1 run" in self.sweep("--isl", 8, "--batch", 1, *flags).stdout

        self.assertTrue(runs_all())
        for flags in (["--seed", 2], ["--response", 5], ["--vocabulary-size", 100],
                      ["--hidden-student", 8], ["--hidden-teacher", 8], ["--type", "fp16"],
                      ["--samples", 3], ["--logits-type", "fp32"], ["--warmup-updates", 1],
                      ["--measure-updates", 5], ["--repetitions", 2], ["--chunk-width", 5],
                      ["--route", "dense"], ["--engine", "mapped"], ["--plan", "chunks"],
                      ["--", "--temperature", "2"]):
            with self.subTest(flags=flags):
                self.assertTrue(runs_all(*flags))
        self.environment["OMP_NUM_THREADS"] = "7"
        self.assertTrue(runs_all())
        (self.directory / "version").write_text("0.2.0")
        self.assertTrue(runs_all())
        # A rebuilt program of the same version.
        with open(self.directory / "replay", "a") as file:
            file.write("# changed\n")
        self.assertTrue(runs_all())
        self.output.write_text(self.output.read_text().replace("vpkl-sweep/1", "vpkl-sweep/0"))
        self.assertTrue(runs_all())
        self.assertFalse(runs_all())

    def test_one_sweep_a_file(self):
        self.behave({"1": "slow"})
        process = subprocess.Popen(self.command(), env=self.environment, stderr=subprocess.DEVNULL)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        end = time.monotonic() + 30
        while not self.runs() and time.monotonic() < end:
            time.sleep(0.02)
        self.assertIn("another sweep", self.sweep(status=1).stderr)


class Refusals(Case):
    def test_flags(self):
        for flags, says in ((["--batch", "0"], "--batch"), (["--batch", "1,x"], "--batch"),
                            (["--batch", "1,1"], "twice"), (["--batch", ""], "--batch"),
                            (["--isl", "-1"], "--isl"), (["--chunk-width", "1.5"], "--chunk-width"),
                            (["--route", "sparse"], "dense, gathered"),
                            (["--engine", "fast"], "pinned_2d"), (["--plan", "columns"], "chunks"),
                            (["--also", "engine"], "AXIS=VALUE"), (["--also", "speed=1"], "AXIS"),
                            (["--also", "engine=fast"], "pinned_2d"),
                            (["--samples", "1"], "--samples is 1"), (["--type", "fp8"], "--type"),
                            (["--seed", "-1"], "--seed"), (["--warmup-updates", "-1"], "--warmup"),
                            (["--measure-updates", "0"], "--measure-updates"),
                            (["--repetitions", "0"], "--repetitions"), (["--ranks", "0"], "--ranks"),
                            (["--time-out", "0"], "--time-out"), (["--time-out", "nan"], "--time-out"),
                            (["--replay", "/no/such"], "/no/such"),
                            (["--fixture-app", "/no/such"], "/no/such"),
                            (["--launcher", "/no/such -n 1"], "/no/such"),
                            (["--no-such-flag"], "--no-such-flag"), (["--rank", "2"], "--rank"),
                            (["--", "--batch-size", "2"], "--batch-size"),
                            (["--", "--plan=rows"], "--plan=rows")):
            with self.subTest(flags=flags):
                self.assertIn(says, self.sweep(*flags, status=2).stderr)
        without = [f for f in self.command() if f not in ("--output", str(self.output))]
        done = subprocess.run(without, capture_output=True, text=True, timeout=20)
        self.assertEqual(done.returncode, 2)
        self.assertIn("--output", done.stderr)
        self.assertEqual(self.runs(), [])
        self.assertFalse(self.output.exists())

    def test_output_is_checked_before_anything_runs(self):
        other = self.directory / "other.txt"
        other.write_text("not json\nhalf")
        for path in ("/dev/full", "/proc/none/x.jsonl", self.directory, other):
            with self.subTest(path=path):
                self.assertIn(str(path), self.sweep(status=1, output=path).stderr)
        self.assertEqual(other.read_text(), "not json\nhalf")
        self.assertEqual(self.runs() + self.lines_of("fixtures"), [])

    def test_no_fixture(self):
        self.assertIn("ISL 13 cannot be made: vpkl-fixture: no such prompt",
                      self.sweep("--isl", 13, status=1).stderr)
        self.assertEqual(self.output.read_text(), "")

    def test_help_shows_defaults_and_an_example(self):
        text = self.sweep("--help").stdout
        for part in ("default: 64,128,256,512", "Example", "Exit status"):
            self.assertIn(part, text)


class Terminal(Case):
    def test_progress_with_time_left(self):
        leader, follower = pty.openpty()
        done = subprocess.run(self.command(), env=self.environment, stderr=follower, timeout=60,
                              stdout=subprocess.DEVNULL)
        os.close(follower)
        text = b""
        try:
            while block := os.read(leader, 65536):
                text += block
        except OSError:
            pass  # The other end is closed.
        os.close(leader)
        self.assertEqual(done.returncode, 0)
        self.assertIn(b"4/4: batch 2, ISL 16, chunk 4", text)
        self.assertIn(b"about 0 min 0", text)


class RealPrograms(Case):
    SMALL = ["--vocabulary-size", 257, "--hidden-student", 16, "--hidden-teacher", 24,
             "--response", 8, "--warmup-updates", 1, "--measure-updates", 2, "--isl", 8, "--batch",
             2]

    def real(self, *flags, status=0):
        return self.sweep("--replay", REPLAY, "--fixture-app", FIXTURE_APP, *self.SMALL, *flags,
                          status=status)

    def test_points(self):
        self.real("--also", "plan=chunks", "--also", "route=dense")
        for record in self.records():
            self.assertEqual(record["status"], "ok", record)
            self.assertGreater(record["tokens_per_second"], 0)
            self.assertGreater(record["peak_bytes"], 0)
        self.assertEqual(len({r["loss_before"] for r in self.records()}), 1)

    def test_ranks_and_a_cache_that_does_not_fit(self):
        launcher = f"{MPIEXEC} {{ranks}} {MPIEXEC_FLAGS}"
        self.real("--ranks", 2, "--launcher", launcher)
        record = self.records()[-1]
        self.assertEqual(record["status"], "ok", record)
        self.assertGreater(record["collectives"], 0)
        self.real("--ranks", 2, "--launcher", launcher, "--", "--cache-budget", 1000, status=1)
        record = self.records()[-1]
        self.assertEqual(record["failure"], "out_of_memory", record)
        self.assertIn("1000", record["reason"])


if __name__ == "__main__":
    unittest.main()
