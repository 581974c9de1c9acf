# SPDX-License-Identifier: Apache-2.0
"""The ranges of vpkl-replay, as a Kokkos Tools library sees them on two ranks."""
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest


class Regions(unittest.TestCase):
    def test_phases_of_two_ranks(self):
        directory = pathlib.Path(tempfile.mkdtemp(prefix="vpkl-test-"))
        self.addCleanup(shutil.rmtree, directory)
        tool = os.environ["VPKL_REGIONS_TOOL"]
        # Kokkos calls it so before version 4, and since.
        environment = {**os.environ, "KOKKOS_PROFILE_LIBRARY": tool, "KOKKOS_TOOLS_LIBS": tool,
                       "VPKL_REGIONS_FILE": str(directory / "regions")}
        done = subprocess.run(
            [*os.environ["VPKL_MPIEXEC"].split(), "2", *os.environ["VPKL_MPIEXEC_FLAGS"].split(),
             os.environ["VPKL_REPLAY"], "--fixture",
             str(pathlib.Path(os.environ["VPKL_FIXTURES"]) / "smollm2-135m.h5"),
             "--implementation", "vocab_parallel", "--plan", "chunks", "--chunk-width", "16",
             "--warmup-updates", "0", "--measure-updates", "2", "--repetitions", "1"],
            env=environment, capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        files = sorted(directory.glob("regions.*"))
        self.assertEqual(len(files), 2)
        for file in files:
            # Without regions of other libraries; the tool's complaints have no colon.
            lines = [line for line in file.read_text().splitlines()
                     if line.strip().startswith("vpkl::") or ":" not in line]
            self.check(lines)

    def check(self, lines):
        self.assertTrue(all(line.strip().startswith("vpkl::") for line in lines), lines)
        inside = {}
        parents = []
        for line in lines:
            depth = len(line) - len(line.lstrip())
            del parents[depth:]
            inside.setdefault(line.strip(), set()).add(parents[-1] if parents else None)
            parents.append(line.strip())
        # Evaluations are no updates; heads and hidden states are read before them.
        self.assertEqual(inside, {
            "vpkl::update": {None},
            "vpkl::teacher": {"vpkl::update", None},
            "vpkl::store": {"vpkl::teacher"},
            "vpkl::chunk": {"vpkl::update", None},
            "vpkl::fetch": {"vpkl::chunk", None},
            "vpkl::statistics": {"vpkl::chunk"},
            "vpkl::combine": {"vpkl::chunk"},
            "vpkl::gradient": {"vpkl::chunk"},
        })
        self.assertEqual(lines.count("vpkl::update"), 2)


if __name__ == "__main__":
    unittest.main()
