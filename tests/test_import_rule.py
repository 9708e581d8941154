"""Who imports whom: read off the source, so that an import in a function counts too; and tried in a fresh process."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("minisgl", "ops", "pipeline", "stages", "web")
STAGES = ("stages.tokenize", "stages.generate", "stages.detokenize", "stages.archive")
UNTIL_THE_WORKERS_START = (
    "ops.serve.command, pipeline.process.observe, pipeline.process.redis_server, pipeline.stage.supervisor, "
    "stages.generate.model.folder, web.http.listener, ops.serve.with_shell"
)
"""What `serve` needs before there are workers, which need both cores of a small machine at once."""
WITH_TORCH = (
    "stages.generate.attention",
    "stages.generate.batch",
    "stages.generate.collectives",
    "stages.generate.forward",
    "stages.generate.model.attention",
    "stages.generate.model.by_transformers",
    "stages.generate.model.compiled",
    "stages.generate.model.decoder",
    "stages.generate.model.layers",
    "stages.generate.ranks.channel",
    "stages.generate.ranks.links",
    "stages.generate.ranks.stores",
    "stages.generate.sampling",
    "stages.generate.setup.resolve",
)
"""Where tensors are. Everything else starts fast and small, and the schedule decides without them."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield every module of ours, by its dotted name; a package is `name.__init__`."""
    for top in OURS:
        paths = [ROOT / f"{top}.py"] if top == "minisgl" else sorted((ROOT / top).rglob("*.py"))
        for path in paths:
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts), ast.parse(path.read_text(), str(path))


def imports(name: str, tree: ast.Module, *, for_types: bool = True) -> set[str]:
    """Return the dotted names that a module imports, wherever in it: `from a import b` as `a.b`.

    *for_types*: also those that only type checkers see.
    """
    found: set[str] = set()
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if not for_types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        todo += (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = name.split(".")[: -node.level] if node.level else []
            found |= {".".join([*package, *([node.module] if node.module else []), alias.name]) for alias in node.names}
    return found


@functools.cache
def all_trees() -> dict[str, ast.Module]:
    return dict(modules())


@functools.cache
def all_imports() -> dict[str, set[str]]:
    return {name: imports(name, tree) for name, tree in all_trees().items()}


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def offences(importers: tuple[str, ...], forbidden: tuple[str, ...], allowed: tuple[str, ...] = ()) -> list[str]:
    """Return `importer -> imported` for each import by *importers* that is of *forbidden* and not of *allowed*."""
    checked = [name for name in all_imports() if within(name, *importers)]
    assert checked, f"no module of ours is in {importers}"
    return [
        f"{name} -> {imported}"
        for name in checked
        for imported in sorted(all_imports()[name])
        if within(imported, *forbidden) and not within(imported, *allowed)
    ]


def test_every_module_of_ours_is_looked_at() -> None:
    assert {name.partition(".")[0] for name in all_imports()} == set(OURS)
    assert within("stages.generate.loop.worker", *all_imports())


def test_pipeline_imports_nothing_of_ours() -> None:
    assert not offences(("pipeline",), OURS, allowed=("pipeline",))


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_only_pipeline_and_itself(stage: str) -> None:
    assert not offences((stage,), OURS, allowed=("pipeline", stage))


def test_what_the_stages_share_is_in_pipeline() -> None:
    shared = [name for name in all_imports() if within(name, "stages") and not within(name, *STAGES)]
    assert shared in ([], ["stages.__init__"])
    assert not any(all_imports()[name] for name in shared)


def test_web_imports_only_pipeline_and_itself() -> None:
    assert not offences(("web",), OURS, allowed=("pipeline", "web"))


def test_nothing_imports_the_command() -> None:
    assert not offences(("pipeline", "stages", "web"), ("minisgl", "ops"))


def test_nothing_imports_the_training_of_the_demo_model() -> None:
    """The wheel does not have it."""
    everybody_else = tuple(name for name in all_imports() if not within(name, "ops.demo_model"))
    assert not offences(everybody_else, ("ops.demo_model",))


def test_torch_is_for_the_tensors_of_the_engine_alone() -> None:
    everybody_else = tuple(name for name in all_imports() if not within(name, *WITH_TORCH, "ops"))
    training = tuple(f"ops.demo_model.{name}" for name in ("train", "evaluate"))
    served = tuple(name for name in all_imports() if within(name, "ops.demo_model") and not within(name, *training))
    assert not offences((*everybody_else, *served), ("torch",))


def test_transformers_is_for_the_tokenizer_and_for_models_that_it_computes() -> None:
    using = ("stages.tokenize", "stages.generate.model.by_transformers", "ops")
    everybody_else = tuple(name for name in all_imports() if not within(name, *using))
    assert not offences(everybody_else, ("transformers",))


def test_no_module_imports_itself_through_others() -> None:
    """Imports in functions count, too; those for types alone do not."""
    ours = {name.removesuffix(".__init__"): imports(name, tree, for_types=False) for name, tree in all_trees().items()}
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for name, found in ours.items():
        sorter.add(
            name, *({each if each in ours else each.rpartition(".")[0] for each in found} & ours.keys() - {name})
        )
    sorter.prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("top", ["pipeline", "stages.generate", "stages.tokenize", "web"])
def test_no_room_imports_another_that_imports_it(top: str) -> None:
    """A room is a folder, or a module beside folders."""

    def room(name: str) -> str:
        return name.removeprefix(f"{top}.").partition(".")[0]

    sorter: TopologicalSorter[str] = TopologicalSorter()
    for name, found in all_imports().items():
        if name.startswith(f"{top}."):
            sorter.add(room(name), *({room(each) for each in found if each.startswith(f"{top}.")} - {room(name)}))
    sorter.prepare()  # raises CycleError, which names the circle


def test_nobody_but_the_log_appends_to_a_stream() -> None:
    """A raw XADD outside of `pipeline` would be an event that no commit knows."""
    appends = [
        f"{name}:{node.lineno}"
        for name, tree in all_trees().items()
        if not within(name, "pipeline")
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr.lower() == "xadd")
        or (isinstance(node, ast.Constant) and str(node.value).upper() == "XADD")
    ]
    assert not appends


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("minisgl", ("torch", "transformers", "numpy")),
        ("web.server, ops.top.command", ("torch", "transformers", "tokenizers", "numpy")),
        ("stages.tokenize.worker, stages.generate.schedule.schedule", ("torch",)),
        ("stages.detokenize.worker", ("torch", "transformers")),
        ("stages.generate.model.checkpoint", ("torch", "numpy")),
        (UNTIL_THE_WORKERS_START, ("torch", "numpy", "redis", "pydantic", "rich")),
        ("ops.shell.command", ("torch", "aiohttp", "prompt_toolkit", "rich", "redis", "pydantic")),
        (
            "ops.shell.chat, ops.shell.keyboard, ops.shell.server",
            ("torch", "transformers", "numpy", "redis", "pydantic"),
        ),
    ],
)
def test_a_process_that_needs_no_torch_does_not_load_it(module: str, absent: tuple[str, ...]) -> None:
    program = f"import sys, {module}\nprint(*sorted(set({absent!r}) & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert loaded.stdout.split() == []


def test_a_worker_does_not_load_what_only_shows_tracebacks() -> None:
    program = (
        "import sys, minisgl\n"
        "from ops.serve import worker\n"
        "imported = worker._imported\n"
        "worker._imported = lambda config: (imported(config), lambda: 0)[1]\n"
        "minisgl.main(['stage', 'detokenize', '--slot', '0', '--redis-url', 'redis://127.0.0.1:1'])\n"
        "assert 'structlog' in sys.modules and 'redis' in sys.modules\n"
        "print('rich' in sys.modules)\n"
        "import rich\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("False\n", "")
