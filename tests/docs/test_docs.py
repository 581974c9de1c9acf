#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the documentation quotes: code of the README, error messages, links between pages."""

import importlib.util
import os
import re
import subprocess
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    p for d in (".", "docs", "fixtures", "profiling", "spack") for p in (ROOT / d).glob("*.md")
]


def code_blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)


def squeeze(text):
    return re.sub(r"\s+", "", text)


needs_binding = unittest.skipUnless(
    "VPKL_LIBRARY" in os.environ and importlib.util.find_spec("torch"), "no C interface or no torch"
)


class Readme(unittest.TestCase):
    def test_cpp_is_in_the_example(self):
        """Every statement, in order, whatever the line breaks."""
        (block,) = code_blocks("README.md", "cpp")
        example = squeeze((ROOT / "docs/examples/train.cpp").read_text())
        for statement in filter(None, squeeze(block).split(";")):
            at = example.find(statement + ";")
            self.assertGreaterEqual(at, 0, f"'{statement};' is not in the example, or earlier")
            example = example[at:]

    @needs_binding
    def test_pytorch_computes_the_same(self):
        import torch

        sys.path.insert(0, str(ROOT / "apps/pytorch"))
        from vpkl_torch import streamed_distillation_loss

        generator = torch.Generator().manual_seed(1)
        student, teacher = (torch.randn(2, 9, 301, generator=generator) for _ in range(2))
        mask = torch.rand(2, 9, generator=generator) < 0.5
        ours = student.clone().requires_grad_()
        loss = streamed_distillation_loss(
            ours[:, :-1],
            lambda begin, end: teacher[:, begin:end],
            mask[:, 1:].float(),
            "forward_kl",
            temperature=2.0,
        )
        loss.backward()

        (block,) = code_blocks("README.md", "python")
        theirs = student.clone().requires_grad_()
        names = {"F": torch.nn.functional, "teacher": teacher, "mask": mask, "student": theirs}
        exec(block, names)
        self.assertAlmostEqual(loss.item(), names["last"], delta=1e-5 * names["last"])
        self.assertLess((ours.grad - theirs.grad).norm() / theirs.grad.norm(), 1e-5)


class Example(unittest.TestCase):
    @needs_binding
    def test_pytorch_loss_falls(self):
        example = str(ROOT / "docs/examples/train.py")
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "apps/pytorch")}
        two_ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        for launcher in [], two_ranks:
            with self.subTest(launcher=launcher):
                subprocess.run([sys.executable, *launcher, example], env=environment, check=True)


def literals():
    """String literals of the sources, neighbours joined, each inserted value as "…"."""
    files = [ROOT / "CMakeLists.txt", *(ROOT / "cmake").iterdir()]
    for kind in ("src/**/*.?pp", "src/**/CMakeLists.txt", "apps/**/*.?pp", "apps/**/*.py"):
        files += ROOT.glob(kind)
    found = []
    for file in files:
        text = re.sub(r"^#.*$", "", file.read_text(), flags=re.M)
        text = re.sub(r'(?<!\\)"\s*"', "", text)
        for literal in re.findall(r'"((?:[^"\\]|\\.)+)"', text):
            literal = re.sub(r"\$\{.*?\}|@\w+@|(?<!\{)\{[^{}]*\}(?!\})", "…", literal)
            found.append(re.sub(r"\\(.)", r"\1", literal.replace("{{", "{").replace("}}", "}")))
    return found


class Messages(unittest.TestCase):
    def test_quoted_ones_are_in_the_sources(self):
        text = (ROOT / "docs/errors.md").read_text().split("\n## Messages")[1]
        quoted = re.findall(r"^\| `(.+?)` \|", text, re.M)
        self.assertGreater(len(quoted), 40)
        sources = literals()
        for message in quoted:
            pieces = [re.escape(piece) for piece in message.strip("…").split("…")]
            pattern = re.compile(".*".join(pieces), re.S)
            self.assertTrue(any(map(pattern.search, sources)), f"no source has: {message}")


class Links(unittest.TestCase):
    def test_files_and_headings_exist(self):
        for page in PAGES:
            text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
            for target in re.findall(r"\]\(([^)\s]+)\)", text):
                if "://" in target:
                    continue
                path, _, anchor = target.partition("#")
                file = page.parent / path if path else page
                self.assertTrue(file.exists(), f"{page.name}: {target}")
                if anchor:
                    headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
                    names = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]
                    self.assertIn(anchor, names, f"{page.name}: {target}")


if __name__ == "__main__":
    unittest.main(verbosity=2)
