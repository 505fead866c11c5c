"""Properties of the tree as a whole that no single module's test sees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# What decides by integers and text runs on a login node, where torch may be missing or slow to import.
WITHOUT_TORCH = [
    "megatron.core.config",
    "megatron.core.model_math",
    "megatron.core.param_meta",
    "megatron.core.parallel_dims",
    "megatron.core.pipeline_parallel.actions",
    "megatron.core.pipeline_parallel.layout",
    "megatron.core.pipeline_parallel.passes",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.pipeline_parallel.simulator",
    "megatron.core.distributed.param_layout",
    "megatron.core.tokenizers",
    "megatron.core.transformer.segments",
    "megatron.planner.activations",
    "megatron.training.config",
    "megatron.training.arguments",
    "megatron.training.validation",
    "megatron.training.launch",
    "megatron.training.dry_run",
    "pretrain_gpt",
]

BLOCK_TORCH = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ImportError("torch is blocked")

sys.meta_path.insert(0, Blocked())
failed = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(f"{name}: {error!r}")
sys.exit("\\n".join(failed) or 0)
"""


def test_what_plans_and_schedules_need_imports_without_torch() -> None:
    command = [sys.executable, "-c", BLOCK_TORCH, *WITHOUT_TORCH]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_folder_of_the_library_is_a_package() -> None:
    """setup.py finds packages by __init__.py: a folder without one would be missing from an installation."""
    folders = {path.parent for path in (ROOT / "megatron").rglob("*.py")}
    assert folders
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []
