"""Every CUDA source compiles for the architectures that kernels are made for, with nvcc alone: CI has no GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from kernels import wide_linear
from kernels._load import ARCHITECTURES, SOURCES, Gpu, KernelError, compile_source, find_nvcc
from kernels.attention import choose_shape

H200, A100 = Gpu(132, 233472, 9), Gpu(108, 167936, 8)
DEFINES = {
    "activation": {"ELEMENT": "__nv_bfloat16"},
    "append_kv": {"DTYPE": 0, "NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128},
    "distribution": {"LOGIT": 1, "VECTOR": 1, "CLUSTER": 1},
    "linear": {"ELEMENT": "__nv_bfloat16", "TOKENS": 8, "TILES": 2, "SHARED": 136 * 1024, "NORM": 4096, "GATED": 0},
    "ngram": {"THREADS": 512},
    "norm": {"ELEMENT": "__nv_bfloat16", "VECTORS": 2},
    "wide_linear": {"ELEMENT": "__nv_bfloat16", "TOKENS": 64, "WIDTH": 64, "SPLIT": 2, "GATED": 0, "STAGES": 13},
    "sampling": {"LOGIT": 1, "VECTOR": 1, "CLUSTER": 1, "THREADS": 512},
}


@pytest.fixture(scope="module")
def nvcc() -> str:
    try:
        return find_nvcc()
    except KernelError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", sorted(path.stem for path in SOURCES.glob("*.cu")))
def test_compiles(nvcc: str, source: str, architecture: str) -> None:
    if source == "attention":
        gpu = A100 if architecture == "sm_80" else H200
        defines = dict(choose_shape(8, 4, 16, 32, 8, 128, torch.bfloat16, False, gpu))
    else:
        defines = dict(DEFINES.get(source, {}))
    assert compile_source(source, architecture, defines).stat().st_size > 0


@pytest.mark.parametrize("out_size", [32, 576, 2048, 3072, 4096, 6144, 28672, 33824, 128256])
@pytest.mark.parametrize("in_size", [64, 192, 2048, 4096, 14336])
@pytest.mark.parametrize("is_gated", [False, True])
def test_tiles_of_wide_products(out_size: int, in_size: int, is_gated: bool) -> None:
    """The order in which terms are added is the same for every number of tokens, and no tile is larger than shared memory or registers allow."""
    shapes = [wide_linear.choose_shape(tokens, out_size, in_size, torch.bfloat16, is_gated, 132) for tokens in (17, 64, 65, 128, 129, 192)]
    assert len({shape["SPLIT"] for shape in shapes}) == 1
    for shape in shapes:
        tokens, width, split, stages = (int(shape[key]) for key in ("TOKENS", "WIDTH", "SPLIT", "STAGES"))
        assert width in wide_linear.WIDTHS and width % (8 * split * (1 + is_gated)) == 0 and width * tokens <= 192 * 224
        assert stages >= 3 and stages * (tokens + width) * 128 + 1024 <= wide_linear.SHARED


def test_the_largest_tile_compiles_without_spills(nvcc: str) -> None:
    defines = wide_linear.choose_shape(192, 28672, 4096, torch.bfloat16, True, 132)
    assert defines["TOKENS"] == 192 and defines["WIDTH"] == 224
    log = compile_source("wide_linear", "sm_90", defines).with_suffix(".log").read_text()
    assert " 0 bytes spill stores" in log and "serialized" not in log


def test_what_does_not_compile_is_said(nvcc: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(SOURCES, tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "kernels" / "step.cu").write_text("this is no kernel;")
    monkeypatch.setattr("kernels._load.SOURCES", tmp_path / "kernels")
    with pytest.raises(KernelError, match=r"nvcc could not compile step.cu for sm_90:\n.*error"):
        compile_source("step", "sm_90")


def test_without_nvcc_what_to_do_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(Path, "is_file", lambda self: False)
    with pytest.raises(KernelError, match="no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda: install CUDA's compiler, or use --device cpu"):
        find_nvcc()
