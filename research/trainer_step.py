"""Run one step of transformers' Trainer with gradient accumulation, and save the step for tools/referee.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

MICRO_BATCHES, LENGTH = 4, 17
TOKENS = 64
IGNORED = {0: 12, 2: 5}
"""Number of labels to ignore at the beginning of a sample, keyed by sample. Labels are ignored so that micro-batches
have different numbers of labels."""


class KeepGradients(TrainerCallback):
    """Callback that saves the gradients that the optimizer is about to use."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_pre_optimizer_step(self, args: object, state: object, control: object, **others: Any) -> None:
        named = others["model"].named_parameters()
        save_file({name: param.grad.clone().contiguous() for name, param in named}, self.file)


class OfMeans(Trainer):
    """Trainer that averages the mean losses of micro-batches, as transformers did before release 4.46."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.model_accepts_loss_kwargs = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return super().compute_loss(model, inputs, return_outputs)


def save_step(folder: Path, of_means: bool = False) -> float:
    """Run one step of transformers' Trainer on a small Llama model, and save the model, the batch and the gradients.
    The step accumulates gradients over micro-batches of one sample each. The samples have different numbers of labels.
    Return the loss that Trainer logs."""
    torch.manual_seed(1)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=TOKENS, max_position_embeddings=32)
    config.tie_word_embeddings = False
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "model")
    ids = torch.randint(0, TOKENS, (MICRO_BATCHES, LENGTH), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    for sample, count in IGNORED.items():
        labels[sample, :count] = -100
    np.savez(folder / "batch.npz", input_ids=ids.numpy(), labels=labels.numpy())
    options = TrainingArguments(
        output_dir=str(folder / "run"),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=MICRO_BATCHES,
        max_steps=1,
        max_grad_norm=0,
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    samples = [{"input_ids": each, "labels": own} for each, own in zip(ids, labels, strict=True)]
    trainer = (OfMeans if of_means else Trainer)(
        model=model,
        args=options,
        train_dataset=samples,  # type: ignore[arg-type]
        callbacks=[KeepGradients(folder / "gradients.safetensors")],
    )
    trainer.train()
    return float(next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry))
