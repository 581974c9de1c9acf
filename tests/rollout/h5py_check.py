# SPDX-License-Identifier: Apache-2.0
"""Fixtures cross between vpkl and h5py in both directions, bit for bit.

Usage: h5py_check.py <vpkl-fixture> <fixtures directory>
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np

program, fixtures = sys.argv[1:]
sys.dont_write_bytecode = True
sys.path.insert(0, fixtures)
import fixture_file as ff  # noqa: E402


def run(*arguments):
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_what_vpkl_wrote(path, kind, dtype):
    run("make", "--output", path, "--type", kind, "--samples", 3, "--hidden-student", 40, "--seed", 4)
    with h5py.File(path) as file:
        assert file.attrs["format"] == ff.FORMAT and file.attrs["complete"] == 1
        assert file.attrs["content_sha256"] == ff.content_sha256(file)
        assert file["tokens"].shape == (3, 64) and file["tokens"].dtype == np.int32
        assert np.array_equal(file["length"], file["attention_mask"][...].sum(1))
        assert ff.type_tag(file["teacher/head"]) == dtype
        states = ff.values(file["student/hidden"])
        assert states.shape == (3, 64, 40) and 0.5 < states[:, :16].std() < 2
        assert not states[file["attention_mask"][...] == 0].any()
        for name, dataset in ff.datasets(file).items():
            assert dataset.fletcher32, name
            assert np.prod(dataset.chunks) * dataset.dtype.itemsize <= 1 << 20, name


def write_what_vpkl_reads(path):
    words = np.arange(3 * 8 * 4, dtype="<u2").reshape(3, 8, 4) * 683
    words.flat[:6] = 0x3F95, 0x8000, 0x0001, 0x7F80, 0x7FC1, 0xFF81
    mask = np.ones((3, 8), "u1")
    mask[0, :2] = mask[1, 6:] = 0
    with ff.create(path) as file:
        for name, value in (("schema_version", 1), ("vocabulary_size", 11), ("bos_token_id", -1),
                            ("eos_token_id", 2), ("pad_token_id", 0), ("seed", 0)):
            file.attrs[name] = np.int64(value)
        for name in ("generator", "tokenizer_fingerprint", "student_name", "teacher_name"):
            file.attrs[name] = "µ"
        file.attrs["format"] = ff.FORMAT
        ff.write(file, "tokens", np.arange(24).reshape(3, 8) % 11, "i4")
        ff.write(file, "attention_mask", mask)
        ff.write(file, "response_start", np.array([4, 3, 8]), "i8")
        ff.write(file, "length", mask.sum(1), "i8")
        ff.write(file, "vocabulary_ids", np.arange(11) * 3, "i4")
        ff.write_strings(file, "prompt_text", ["one", "", "µ\n" * 3000])
        for side in ("student", "teacher"):
            ff.write(file.create_group(side), "hidden", words, "bf16", compress=True)
        ff.write(file["teacher"], "head", np.ones((11, 4), "<f2"), "f2")
        file["student/head"] = file["teacher/head"]
        sha = ff.content_sha256(file)
    assert sha in run("verify", path)
    assert '"response_tokens": 7' in run("inspect", "--json", path)


with tempfile.TemporaryDirectory() as directory:
    for kind, dtype in (("bf16", "bf16"), ("fp16", "f2"), ("fp32", "f4")):
        read_what_vpkl_wrote(Path(directory) / f"{kind}.h5", kind, dtype)
    write_what_vpkl_reads(Path(directory) / "python.h5")
for shipped in sorted(Path(fixtures).glob("*.h5")):
    with h5py.File(shipped) as file:
        assert ff.content_sha256(file) in run("verify", shipped)
print("ok")
