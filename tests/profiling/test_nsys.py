# SPDX-License-Identifier: Apache-2.0
"""The scripts of profiling/nsys, with a stand-in for nsys that writes down how it was called."""
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

FOLDER = pathlib.Path(os.environ["VPKL_NSYS"])
NSYS = '#!/bin/sh\nfor a in nsys "$@"; do echo "$a" >> "$CALLS"; done\n'
LAUNCH = '#!/bin/sh\necho "launched $1 $2" >> "$CALLS"\nshift 2\nexec "$@"\n'


class Case(unittest.TestCase):
    def setUp(self):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="vpkl-test-"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.calls = self.directory / "calls"
        self.environment = {**os.environ, "CALLS": str(self.calls),
                            "PATH": f"{self.directory}:/usr/bin:/bin"}
        for name, text in (("nsys", NSYS), ("launch", LAUNCH)):
            (self.directory / name).write_text(text)
            (self.directory / name).chmod(0o755)

    def run_script(self, name, *arguments, status=0):
        done = subprocess.run([FOLDER / name, *arguments], capture_output=True, text=True,
                              timeout=20, env=self.environment, cwd=self.directory)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done

    def called(self):
        return self.calls.read_text().splitlines()


class Capture(Case):
    def test_one_process(self):
        self.run_script("capture", "--output", "out/x", "--", "vpkl-replay", "--fixture", "a b.h5")
        call = self.called()
        for flag in ("--capture-range=cudaProfilerApi", "--capture-range-end=stop",
                     "--trace=cuda,nvtx", "--output=out/x"):
            self.assertIn(flag, call)
        self.assertEqual(call[-4:], ["vpkl-replay", "--fixture", "a b.h5", "--profile"])
        self.assertTrue((self.directory / "out").is_dir())

    def test_ranks_write_reports_of_their_own(self):
        self.run_script("capture", "--launcher", "launch -n 2", "--", "vpkl-replay")
        self.assertEqual(self.called()[0], "launched -n 2")
        self.assertIn("--output=vpkl.%q{OMPI_COMM_WORLD_RANK}", self.called())
        self.assertIn("--trace=cuda,nvtx,mpi", self.called())
        for flags, variable in ((["--launcher", "srun -n 2"], "SLURM_PROCID"),
                                (["--launcher", "mpiexec -n 2", "--rank-variable", "PMI_RANK"],
                                 "PMI_RANK")):
            printed = self.run_script("capture", "--print", *flags, "--", "vpkl-replay").stdout
            self.assertIn(variable, printed)

    def test_refusals(self):
        for flags, says in (([], "no program"), (["--output"], "--output needs a value"),
                            (["vpkl-replay"], "unknown argument: vpkl-replay"),
                            (["--fast", "--", "x"], "--fast")):
            self.assertIn(says, self.run_script("capture", *flags, status=2).stderr)
        (self.directory / "nsys").unlink()
        self.assertIn("nsys", self.run_script("capture", "--", "x", status=2).stderr)
        self.assertFalse(self.calls.exists())

    def test_help(self):
        for name in ("capture", "stats"):
            self.assertIn("Example", self.run_script(name, "--help").stdout)


class Stats(Case):
    def test_recipes(self):
        for name in ("a.nsys-rep", "b.nsys-rep"):
            (self.directory / name).write_text("")
        self.run_script("stats", "a.nsys-rep", "b.nsys-rep")
        self.assertEqual(self.called().count("stats"), 2)
        for report in ("nvtx_pushpop_sum", "nvtx_gpu_proj_sum", "nvtx_kern_sum",
                       "cuda_gpu_mem_time_sum", "cuda_gpu_mem_size_sum", "cuda_api_sum"):
            self.assertEqual(self.called().count(report), 2)
        self.calls.unlink()
        self.run_script("stats", "--recipe", "copies", "--csv", "a.nsys-rep")
        self.assertEqual(self.called().count("--report"), 2)
        self.assertIn("csv", self.called())

    def test_refusals(self):
        for flags, says in (([], "no report"), (["none.nsys-rep"], "none.nsys-rep"),
                            (["--recipe", "speed", "a"], "ranges device kernels"),
                            (["--recipe"], "--recipe"), (["--fast"], "--fast")):
            self.assertIn(says, self.run_script("stats", *flags, status=2).stderr)
        self.assertFalse(self.calls.exists())


if __name__ == "__main__":
    unittest.main()
