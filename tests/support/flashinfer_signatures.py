"""What FlashInfer's functions take, read with `ast` from its wheels and kept in `tests/signatures`.

    python tests/support/flashinfer_signatures.py flashinfer_python-0.6.13-py3-none-any.whl ..

writes the records again. A wheel comes from `pip download --no-deps flashinfer-python==0.6.13`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parents[1] / "signatures"
VERSIONS: Final = ("0.6.13", "0.7.2", "0.7.2.post1")
METHODS: Final = ("__init__", "plan", "run", "reset_workspace_buffer")
RECORDED: Final[Mapping[str, Sequence[str]]] = {
    "decode.py": (*(f"BatchDecodeWithPagedKVCacheWrapper.{method}" for method in METHODS), "fast_decode_plan"),
    "prefill.py": tuple(f"BatchPrefillWithPagedKVCacheWrapper.{method}" for method in METHODS),
    "jit/attention/modules.py": ("gen_batch_prefill_module",),
    "jit/core.py": ("build_jit_specs",),
    "jit/norm.py": ("gen_norm_module",),
    "jit/page.py": ("gen_page_module",),
    "jit/rope.py": ("gen_rope_module",),
    "jit/activation.py": ("gen_act_and_mul_module",),
}
"""Functions of each file of the package."""
EXPORTED: Final[Mapping[str, Mapping[str, str]]] = {
    "data/csrc/flashinfer_norm_binding.cu": {"rmsnorm": "rmsnorm", "fused_add_rmsnorm": "fused_add_rmsnorm"},
    "data/csrc/flashinfer_page_binding.cu": {"append_paged_kv_cache": "append_paged_kv_cache"},
    "data/csrc/flashinfer_rope_binding.cu": {"apply_rope_pos_ids_cos_sin_cache": "apply_rope_pos_ids_cos_sin_cache"},
    "jit/activation.py": {"silu_and_mul": "{{ func_name }}"},
}
"""Functions of the compiled modules: their names, and how the files with their C++ call them."""
PHRASES: Final = {"data/include/flashinfer/allocator.h": "Increase the workspace buffer size."}
"""What a file of the package says in an error that the attention backend understands."""


@functools.cache
def signatures(version: str) -> Mapping[str, inspect.Signature]:
    """Return the recorded signatures of *version*, by name."""
    recorded: dict[str, str] = json.loads((FOLDER / f"flashinfer-{version}.json").read_text())
    return {name: inspect.signature(eval(f"lambda {parameters}: None")) for name, parameters in recorded.items()}


def read(wheel: Path) -> dict[str, str]:
    """Return the parameters of each recorded function of a wheel, without annotations."""
    found = {}
    with zipfile.ZipFile(wheel) as files:
        for path, phrase in PHRASES.items():
            assert phrase in files.read(f"flashinfer/{path}").decode(), f"{wheel.name}: {path} lacks {phrase!r}"
        for path, names in RECORDED.items():
            tree = ast.parse(files.read(f"flashinfer/{path}"))
            for name in names:
                function = _find(tree, name)
                for argument in ast.walk(function.args):
                    if isinstance(argument, ast.arg):
                        argument.annotation = None
                found[name] = ast.unparse(function.args)
        for path, exported in EXPORTED.items():
            source = files.read(f"flashinfer/{path}").decode()
            for name, called in exported.items():
                (parameters,) = re.findall(rf"void {re.escape(called)}\(([^)]*)\)", source)
                found[name] = ", ".join(f"{each.split()[-1]}" for each in parameters.split(","))
    return found


def _find(tree: ast.Module, name: str) -> ast.FunctionDef:
    """Return a function or method of *tree*, or the method that it hands its `**kwargs` on to."""
    owner, _, method = name.rpartition(".")
    body = tree.body
    if owner:
        (kind,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
        body = kind.body
    function = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == method][
        -1
    ]  # after overloads
    if function.args.kwarg is None:
        return function
    (forwarded,) = {
        call.func.attr
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and any(keyword.arg is None for keyword in call.keywords)
    }
    return _find(tree, f"{owner}.{forwarded}")


def main(wheels: Sequence[str]) -> None:
    """Write the records of *wheels*."""
    for wheel in map(Path, wheels):
        version = wheel.name.split("-")[1]
        (FOLDER / f"flashinfer-{version}.json").write_text(json.dumps(read(wheel), indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
