"""Every CUDA source compiles for the architectures that kernels are made for, with nvcc alone: CI has no GPU."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import itertools
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch

from kernels import _load, latent_attention, prompt_linear, sampling, wide_linear, wide_quantized
from kernels._load import ARCHITECTURES, SOURCES, Gpu, KernelError, compile_source, find_nvcc, target_of
from kernels._signature import formats_of, kernels_of
from kernels.attention import Heads, _shared_bytes, choose_shape
from kernels.structs import StepSizes, format_of

GPUS = {
    "sm_80": Gpu(108, 167936, 8, 166912),
    "sm_86": Gpu(84, 102400, 8, 101376),
    "sm_89": Gpu(128, 102400, 8, 101376),
    "sm_90": Gpu(132, 233472, 9, 232448),
    "sm_100": Gpu(148, 233472, 10, 232448),
    "sm_120": Gpu(170, 102400, 12, 101376),
}
DEFINES = {
    "activation": {"ELEMENT": "__nv_bfloat16"},
    "all_reduce": {"ELEMENT": "__nv_bfloat16", "RANKS": 4},
    "append_kv": {"DTYPE": 0, "NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128},
    "distribution": {"LOGIT": 1, "VECTOR": 1, "CLUSTER": 1},
    "drafter": {"ELEMENT": "__nv_bfloat16", "VECTORS": 2},
    "experts": {"ELEMENT": "__nv_bfloat16", "TOKENS": 16, "TILES": 2, "SLOTS": 32, "SHARED": 160 * 1024, "GATED": 1, "GATHER": 1},
    "latent": {"ELEMENT": "__nv_bfloat16", "SPLIT": 4, "STEPS": 4},
    "linear": {"ELEMENT": "__nv_bfloat16", "TOKENS": 8, "TILES": 2, "SHARED": 136 * 1024, "NORM": 4096, "GATED": 0},
    "ngram": {"THREADS": 512},
    "prompt_attention": {"ELEMENT": "__nv_bfloat16", "HEAD": 128, "VALUE": 128, "PAGE": 16},
    "route": {"ELEMENT": "__nv_bfloat16", "TOKENS": 1, "MANY": 0},
    "norm": {"ELEMENT": "__nv_bfloat16", "VECTORS": 2},
    "scattered": {"ELEMENT": "__nv_bfloat16", "RANKS": 4},
    "prompt_linear": {"ELEMENT": "__nv_bfloat16", "CODES": 0, "WIDTH": 192, "GATED": 1, "GROUPED": 1, "STAGES": 5},
    "quantized_expand": {"ELEMENT": "__nv_bfloat16", "KIND": 1, "ZEROS": 0},
    "quantized_experts": {"ELEMENT": "__nv_bfloat16", "KIND": 2, "ZEROS": 1, "TOKENS": 32, "GROUPED": 1, "GATED": 1, "GATHER": 1},
    "round_rows": {"ELEMENT": "__nv_bfloat16", "VECTORS": 8, "NORM": 1, "SUMS": 128, "BACK": 0},
    "wide_quantized": {
        "ELEMENT": "__nv_bfloat16",
        "KIND": 2,
        "ZEROS": 1,
        "GROUPED": 1,
        "TOKENS": 128,
        "ROWS": 128,
        "SPLIT": 1,
        "GATED": 1,
        "UNITS": 2,
        "STAGES": 4,
        "ROUNDED": 1,
        "SPAN": 2,
    },
    "wide_quantized_experts": {
        "ELEMENT": "__nv_bfloat16",
        "KIND": 2,
        "ZEROS": 1,
        "GROUPED": 1,
        "SPAN": 1,
        "UNITS": 2,
        "ROWS": 32,
        "WARPS": 8,
        "BLOCKS": 2,
        "GATED": 1,
        "GATHER": 1,
        "SHARED": 110 * 1024,
    },
    "wide_experts": {"ELEMENT": "__nv_bfloat16", "GATED": 1, "GATHER": 1, "SHARED": 222 * 1024},
    "wide_linear": {"ELEMENT": "__nv_bfloat16", "CODES": 0, "TOKENS": 64, "ROWS": 32, "WIDTH": 64, "SPLIT": 2, "GATED": 0, "STAGES": 17},
    "token_mask": {"LOGIT": 1},
    "sampling": {"LOGIT": 1, "VECTOR": 1, "CLUSTER": 1, "THREADS": 512, "RING": 4},
}


@pytest.fixture(scope="module")
def nvcc() -> str:
    try:
        return find_nvcc()
    except KernelError as error:
        pytest.skip(str(error))


NAMES = sorted(path.stem for path in SOURCES.glob("*.cu"))
KINDS = [(name, a) for name in NAMES for a in ("sm_80", "sm_90", "sm_100")] + [(name, a) for name in ("attention", "sampling") for a in ARCHITECTURES]
"""All that differs between a generation's architectures is how much shared memory there is."""


@pytest.mark.parametrize(("source", "architecture"), list(dict.fromkeys(KINDS)))
def test_compiles(nvcc: str, source: str, architecture: str) -> None:
    if source == "attention":
        defines = dict(choose_shape(8, 4, 16, (32, 8, 128), torch.bfloat16, False, GPUS[architecture]))
    elif source == "latent_attention":
        found = latent_attention.choose_shape(2, 16, Heads(16, 16, 192, 512, 64), torch.bfloat16, GPUS[architecture])
        assert found is not None
        defines = dict(found)
    else:
        defines = dict(DEFINES.get(source, {}))
    if architecture not in _load._known_to(nvcc):
        pytest.skip(f"this nvcc does not know {architecture}")
    assert compile_source(source, architecture, defines).suffix == ".cubin"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_prefixes", [False, True])
def test_attention_over_trees_compiles(nvcc: str, dtype: torch.dtype, has_prefixes: bool) -> None:
    window = None if has_prefixes else 512
    defines = choose_shape(1, 64, 16, (32, 8, 128), dtype, has_prefixes, GPUS["sm_90"], window, has_trees=True)
    assert compile_source("attention", "sm_90", defines).suffix == ".cubin"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_of_whole_blocks_compiles(nvcc: str, dtype: torch.dtype) -> None:
    defines = choose_shape(8, 8, 16, (32, 8, 128), dtype, False, GPUS["sm_90"], 2048, is_whole=True)
    assert defines["WHOLE"] == 1 and compile_source("attention", "sm_90", defines).suffix == ".cubin"


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("source", ["append_kv", "latent", "attention", "attention in float32", "latent_attention"])
def test_pages_in_e4m3_compile(nvcc: str, source: str, architecture: str) -> None:
    gpu, dtype = GPUS[architecture], torch.float32 if "float32" in source else torch.bfloat16
    if source.startswith("attention"):
        defines = choose_shape(8, 4, 16, (32, 8, 128), dtype, False, gpu, is_e4m3=True)
    elif source == "latent_attention":
        defines = dict(latent_attention.choose_shape(2, 16, Heads(16, 16, 192, 512, 64), dtype, gpu, True) or ())
    else:
        defines = DEFINES[source] | {"E4M3": 1}
    assert defines["E4M3"] == 1 and compile_source(source.split(" ")[0], architecture, defines).suffix == ".cubin"


def test_an_architecture_that_is_not_on_the_list_gets_ptx(nvcc: str) -> None:
    """The nearest one's before it; the driver finishes it."""
    text = compile_source("step", "sm_87").read_text()
    assert ".target sm_86" in text and ".entry prepare_step" in text


def test_targets() -> None:
    known = {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90"}
    assert target_of("sm_90", known) == ("sm_90", False)
    assert target_of("sm_103", known) == target_of("sm_100", known) == ("sm_90", True)  # an old nvcc, or a GPU that is newer than this list
    assert target_of("sm_87", known) == ("sm_86", True)
    with pytest.raises(KernelError, match="kernels are made for sm_80 and later, not for sm_75; this nvcc knows sm_75, sm_80"):
        target_of("sm_75", known)


@pytest.mark.parametrize("architecture", GPUS)
def test_every_shape_fits_the_gpu(architecture: str) -> None:
    """Shared memory of each kernel, at the sizes of models that are about: what does not fit is said before nvcc or the driver says it."""
    gpu = GPUS[architecture]
    for vocab_size in (32000, 49152, 128256, 151936, 202048, 262144):
        for dtype in (torch.float32, torch.bfloat16):
            for rows in (1, 20, 64, 1000):
                try:
                    _, shared = sampling.choose_shape(rows, vocab_size, dtype, gpu)
                except ValueError as error:
                    assert gpu.block_memory < 110_000 and dtype == torch.float32 and vocab_size > 160_000, error
                else:
                    assert shared + sampling.STATIC_SHARED <= gpu.block_memory
    for head_dim in (64, 128, 256):
        try:
            defines = choose_shape(8, 6, 16, (32, 8, head_dim), torch.bfloat16, False, gpu)
        except KernelError as error:
            assert head_dim == 256 and gpu.block_memory < 110_000, error
        else:
            assert gpu.has_clusters or defines["CLUSTER"] == 1
        for batch, queries in ((1, 1), (32, 1), (8, 17)):
            with contextlib.suppress(KernelError):
                plain = choose_shape(batch, queries, 16, (32, 8, head_dim), torch.bfloat16, False, gpu)
                codes = choose_shape(batch, queries, 16, (32, 8, head_dim), torch.bfloat16, False, gpu, is_e4m3=True)
                shape = [codes[key] for key in ("MAX_ROWS", "HEAD_DIM", "CLUSTER", "STAGES", "TILE")]
                assert _shared_bytes(*shape, True) * codes["MIN_CTAS"] <= gpu.shared_memory - 1024 * codes["MIN_CTAS"]
                tokens = [own["MIN_CTAS"] * (own["STAGES"] - 1) * own["TILE"] for own in (plain, codes)]
                assert tokens[0] <= tokens[1], "fewer keys are on their way to a multiprocessor"


KERNELS = [(path, name) for path in sorted(SOURCES.glob("*.cu")) for name in kernels_of(path)]


@pytest.mark.parametrize(("source", "name"), KERNELS, ids=lambda value: getattr(value, "stem", value))
def test_the_arguments_of_every_kernel_are_read_off_its_source(source: Path, name: str) -> None:
    assert formats_of(source, name)


def test_no_kernel_is_missed() -> None:
    count = sum(path.read_text().count("__global__") for pattern in ("*.cu", "*.cuh") for path in SOURCES.glob(pattern))
    assert len({name for _, name in KERNELS}) == count - 1  # append_attention is there twice, by type; headers' kernels are several sources'


def test_arguments_are_packed_as_the_compiler_lays_them_out() -> None:
    formats = formats_of(SOURCES / "step.cu", "prepare_step")
    assert "".join(formats[:8]) == "PPPPPPPi" and struct.calcsize("".join(formats[:8])) == 60
    # The request table is aligned as its pointers are, and so is what follows it.
    assert struct.calcsize("".join(formats[:9])) == 64 + struct.calcsize(format_of("Requests")) == 64 + 13 * 8 + 4 * 4
    assert formats[-1] == "i" * len(StepSizes._fields)
    assert formats_of(SOURCES / "wide_linear.cu", "wide_linear")[:3] == ("128s", "128s", "P")
    with pytest.raises(ValueError, match=r"step.cu has no kernel prepare\b"):
        formats_of(SOURCES / "step.cu", "prepare")


def test_a_struct_that_python_does_not_know_is_said(tmp_path: Path) -> None:
    (tmp_path / "odd.cu").write_text('#include "odd.cuh"\n// __global__ void odd(int* commented) {\nextern "C" __global__ void odd(Odd argument) {}')
    (tmp_path / "odd.cuh").write_text("struct Odd { int x; };")
    with pytest.raises(ValueError, match=r"odd.cu: odd takes a Odd, whose layout is not known"):
        formats_of(tmp_path / "odd.cu", "odd")


@pytest.mark.parametrize("out_size", [32, 576, 2048, 3072, 4096, 6144, 28672, 33824, 128256])
@pytest.mark.parametrize("in_size", [64, 192, 2048, 4096, 14336])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_tiles_of_wide_products(out_size: int, in_size: int, is_gated: bool, size: int) -> None:
    """The order in which terms are added is the same for every number of tokens, and no tile is larger than shared memory or registers allow."""
    shapes = [
        wide_linear.choose_shape(tokens, out_size, in_size * size, torch.bfloat16, is_gated, 132) for tokens in (1, 8, 9, 32, 64, 65, 128, 129, 192)
    ]
    assert len({shape["SPLIT"] for shape in shapes}) == 1
    for shape in shapes:
        tokens, rows, width, split, stages = (int(shape[key]) for key in ("TOKENS", "ROWS", "WIDTH", "SPLIT", "STAGES"))
        assert width in wide_linear.WIDTHS and width % (8 * split * (1 + is_gated)) == 0 and width * tokens <= 192 * 224
        # A product reads 64 rows, also of a last stage that has room for fewer.
        assert rows in (8, 32, tokens) and stages >= 3 and stages * (rows + width) * 128 + (max(rows, 64) - rows) * 128 + 1024 <= wide_linear.SHARED


@pytest.mark.parametrize("grouped", [0, 1])
@pytest.mark.parametrize("codes", [0, 1])
def test_the_largest_tile_of_prompts_compiles(nvcc: str, codes: int, grouped: int) -> None:
    width = max(prompt_linear.WIDTHS)
    stages = prompt_linear.count_stages(width, bool(grouped))
    assert stages >= 4
    defines = {"ELEMENT": "__nv_bfloat16", "CODES": codes, "WIDTH": width, "GATED": 1, "GROUPED": grouped, "STAGES": stages}
    log = compile_source("prompt_linear", "sm_90", defines).with_suffix(".log").read_text()
    assert max(map(int, re.findall(r"(\d+) bytes spill stores", log))) <= 32 and "serialized" not in log


@pytest.mark.parametrize("codes", [0, 1])
def test_the_largest_tile_compiles_without_spills(nvcc: str, codes: int) -> None:
    defines = wide_linear.choose_shape(192, 28672, 4096 * (2 - codes), torch.bfloat16, True, 132) | {"CODES": codes}
    assert defines["TOKENS"] == 192 and defines["WIDTH"] == 224
    log = compile_source("wide_linear", "sm_90", defines).with_suffix(".log").read_text()
    most_spilled = 4 if codes else 0
    assert max(map(int, re.findall(r"(\d+) bytes spill stores", log))) <= most_spilled and "serialized" not in log


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
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KernelError, match=r"no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda: install CUDA's compiler .*, or use --device cpu"):
        find_nvcc()


def test_the_compiler_of_a_wheel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(Path, "is_file", lambda self: False)  # /usr/local/cuda's
    compiler = tmp_path / "nvidia" / "cu13" / "bin" / "nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.touch()
    spec = importlib.machinery.ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "nvidia")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert find_nvcc() == str(compiler)


def test_shapes_of_wide_products_of_stored_weights() -> None:
    """Each warpgroup has two stages at least, all its own; which half of K it has, SPLIT and SPAN do not depend on the tokens."""
    kinds = ((1, 0, 192), (1, 1, 192), (1, 2, 192), (2, 0, 128), (2, 2, 128), (2, 4, 128))
    for tiles, units in itertools.product((1, 20, 66, 67, 448), (1, 2, 3, 5, 8, 10, 24, 64, 172, 224)):
        for (parts, lines, most), rounds in itertools.product(kinds, (0, 1, 2)):
            given = (parts, lines, 132, rounds > 0, rounds > 1)
            shapes = [wide_quantized.choose_shape(tokens, tiles, units, *given) for tokens in (1, 9, 40, 100, most)]
            assert len({(shape["SPLIT"], shape["SPAN"]) for shape in shapes}) == 1
            assert all(int(shape["STAGES"]) >= 4 and int(shape["STAGES"]) % 2 == 0 for shape in shapes)
            own = units // int(shapes[0]["SPLIT"])
            halves = {-(-(own // int(shape["UNITS"])) // 2) * int(shape["UNITS"]) for shape in shapes}
            assert len(halves) == 1 and all(units % int(shape["UNITS"]) == 0 and int(shape["UNITS"]) % int(shape["SPAN"]) == 0 for shape in shapes)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "foretoken").write_bytes(b"")  # no folder
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = f"{tmp_path}/foretoken/kernels, where compiled kernels are kept, cannot be written: .*; set XDG_CACHE_HOME to another folder"
    with pytest.raises(KernelError, match=said):
        compile_source("norm", "sm_90", {"ELEMENT": "__nv_bfloat16", "VECTORS": 2})
