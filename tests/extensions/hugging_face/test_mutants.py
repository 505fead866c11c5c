"""Mutation tests of the comparison with transformers. Each test breaks a layer of a published model on purpose, and the
comparison must fail.

Comparisons between layouts cannot detect such errors, because a one-process run makes the same errors.
"""

from __future__ import annotations

import pytest

from tests.extensions.hugging_face.hf_models import CASES
from tests.extensions.hugging_face.test_hf_parity import (
    test_logits_gradients_weights_and_settings_match_transformers as compare,
)
from tests.parity.matrix.combination import Combination
from tests.parity.mutants import Mutant, planted

pytestmark = pytest.mark.usefixtures("fp64")

LATENTS = "attention.latent_attention.multi_latent_attention.MultiLatentAttention"
NORMS = "layers.gated_norms.layer"
TABLES = "layers.per_layer_embeddings.residual.LayerEmbeddings"
SHARED = "attention.normed_values"
FILES = "interop.hugging_face"

MUTANTS: dict[str, tuple[str, str, str, str]] = {
    "norms are not gated": ("axk2", f"{NORMS}.GatedNorm.forward", "y * torch", "y + 0 * torch"),
    "gates read hidden states before the norm": ("axk2", f"{NORMS}.GatedNorm.forward", "gate_down(y)", "gate_down(x)"),
    "heads are not gated": ("axk2", f"{LATENTS}._projected_back", "self.gated(out, gate", "self.gated(out, 0 * gate"),
    "no latent before its norm": ("axk2", f"{LATENTS}._latents", "torch.cat((q, down)", "torch.cat((q, q)"),
    "no gradient of the latent before its norm": (
        *("axk2", f"{LATENTS}._latents"),
        *("torch.cat((q, down)", "torch.cat((q, down.detach())"),
    ),
    "rows of a table are not scaled": ("gemma4", f"{TABLES}._inputs", "rows * of_rows", "rows"),
    "embeddings are not gated": ("gemma4", f"{TABLES}.forward", "self._activated(self.gate(x)) *", ""),
    "projections of hidden states": ("gemma4", f"{TABLES}.forward", "words.contiguous()", "x"),
    "a table of the layer before": (
        *("gemma4", f"{FILES}.layouts.PartOfLayer.part"),
        *("self.layer *", "(self.layer - 1) % config.num_layers *"),
    ),
    "keys of the first layer of a kind": ("gemma4", f"{SHARED}.flags.source_of", "same[-1]", "same[0]"),
    "keys of layers of any kind": ("gemma4", f"{SHARED}.flags.source_of", "local[layer] == local[number]", "True"),
    "no gradient of shared keys": (
        *("gemma4", f"{SHARED}.normed_values.NormedValueAttention._with_earlier_keys"),
        *("both.split", "both.detach().split"),
    ),
    "MLPs are not twice as wide": (
        *("gemma4", f"{FILES}.config_json.gemma4.LayersWithoutKeys.read"),
        *("2 * width", "width"),
    ),
    "MLPs of the other layers are twice as wide": (
        *("gemma4", f"{FILES}.config_json.gemma4.LayersWithoutKeys.read"),
        *("[width] * len(own) + [2 * width] * shared", "[2 * width] * len(own) + [width] * shared"),
    ),
    "a width that is written as another": (
        *("gemma4", f"{FILES}.config_json.gemma4.LayersWithoutKeys.write"),
        *("== 2 * config.ffn_sizes[0]", "== config.ffn_sizes[0]"),
    ),
}
"""Each mutant consists of the case in `CASES` that detects the mutant, the mutated function, text that occurs once in
the function's source, and the replacement text."""


@pytest.mark.parametrize("name", [name for name, (case, *_) in MUTANTS.items() if case in CASES])
def test_a_broken_layer_is_detected(name: str) -> None:
    case, path, old, new = MUTANTS[name]
    with planted(Mutant({f"extensions.{path}": [(old, new)]}, Combination.of())), pytest.raises(AssertionError) as seen:
        compare(case)
    assert "TypeError" not in str(seen.value) and "NameError" not in str(seen.value)
