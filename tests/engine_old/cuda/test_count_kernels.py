"""The kernels are compiled for GPUs, of which none is needed for that: the interpreter takes what the compiler refuses."""

import inspect
import os
import warnings

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets here")

POINTERS = {
    "*i32": ("tiles", "todo", "weight", "widths", "list", "others", "filled", "askers", "left"),
    "*i64": ("codes", "thresholds", "hits", "histogram"),
    "*fp32": ("shift", "lowest", "estimates"),
    "*fp64": ("reaches", "roundings"),
}
"""Type of an argument -> how its name ends."""


def signature(kernel, operand, constants):
    """The types of all arguments, as a call of `counter` has them; what is 1 is a constant for Triton."""
    types = {}
    for name in inspect.signature(kernel.fn).parameters:
        kinds = [kind for kind, ends in POINTERS.items() if name.endswith(ends)]
        if name in constants:
            types[name] = "constexpr"
        elif name.endswith("operand"):
            types[name] = operand
        else:
            types[name] = kinds[0] if kinds else "fp32" if name in ("origin", "scale", "floor") else "i32"
    return types


def compiled(kernel, operand, capability, warps, **constants):
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    if "constexprs" not in inspect.signature(compiler.ASTSource.__init__).parameters:
        pytest.skip("an old Triton, whose compiler is called otherwise")
    types = signature(kernel, operand, constants)
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(types.items())
        if kind.startswith("*") or name in ("dim", "components")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = compiler.ASTSource(kernel, types, constexprs=constants, attrs=aligned)
        return compiler.compile(
            source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": 3}
        )


@pytest.mark.parametrize(
    ("operand", "tf32", "capability", "tile"),
    [("*fp16", False, 90, 128), ("*fp32", True, 90, 128), ("*fp32", False, 80, 128), ("*fp32", True, 86, 64)],
)
def test_tiles(operand, tf32, capability, tile):
    from fewshot_callbacks.engine.cuda.count_kernels import count_tiles

    chunk = 64 if operand == "*fp16" else 32
    made = compiled(count_tiles, operand, capability, 8, CODES=2, TILE=tile, CHUNK=chunk, TF32=tf32)
    wanted = "wgmma" if capability == 90 else "mma.sync" if tf32 else "fma.rn.f32"
    assert wanted in made.asm["ptx"]
    assert made.metadata.shared <= (2**17 if tile == 128 else 99 * 1024)


@pytest.mark.parametrize("ones", [{}, {"number": 1, "components": 1}])
def test_lists(ones):
    from fewshot_callbacks.engine.cuda.count_kernels import place_pairs

    assert "fma.rn.f64" in compiled(place_pairs, "*fp32", 80, 4, BITS=6, PAIRS=32, CHUNK=64, **ones).asm["ptx"]


def test_sizes_of_one():
    from fewshot_callbacks.engine.cuda.count_kernels import count_tiles

    sizes = {"CODES": 1, "TILE": 16, "CHUNK": 32, "TF32": False, "rows": 1, "columns": 1, "bins": 1, "dim": 1}
    compiled(count_tiles, "*fp32", 80, 8, **sizes)
