"""Run one step of megatron-core on two gloo CPU ranks, and save it for the referee (`python research/referee.py`).

    python research/megatron_core_step.py RANK FOLDER FAULT     once for each of the ranks 0 and 1, at the same time

The model has a dense layer, a layer of 4 experts and one module of multi-token prediction, with TP 2 and sequence
parallelism, in fp32. The script writes these files to FOLDER: `checkpoint/` (torch_dist, before the step), `batch.npz`,
`loss.txt`, and `wgrads/iter_0000001/mp_rank_XX.pth`, which has the format of Megatron-LM's `save_grads`
(--save-wgrads-interval).

FAULT is "none", or "norms" to introduce an error: each rank sums the gradients of the norms over its part of the
sequence, but the script does not all-reduce these sums. This module imports nothing from this program, because both
this program's package and megatron-core's are named `megatron`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from dataclasses import fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

LENGTH, SAMPLES = 8, 4
TOKENS = 29
ARGUMENTS: dict[str, Any] = {
    **{"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "kv_channels": 4, "ffn_hidden_size": 24},
    **{"seq_length": LENGTH, "max_position_embeddings": 16, "vocab_size": TOKENS, "padded_vocab_size": 32},
    **{"make_vocab_size_divisible_by": 8, "untie_embeddings_and_output_weights": True, "add_bias_linear": False},
    **{"position_embedding_type": "rope", "rotary_percent": 1.0, "rotary_base": 10000, "swiglu": True},
    **{"normalization": "RMSNorm", "norm_epsilon": 1e-5, "group_query_attention": False},
    **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "num_experts": 4, "moe_router_topk": 2},
    **{"moe_ffn_hidden_size": 8, "moe_grouped_gemm": False, "moe_router_load_balancing_type": "none"},
    **{"moe_aux_loss_coeff": 0.0, "moe_layer_freq": [0, 1], "moe_token_dispatcher_type": "alltoall"},
    **{"moe_router_dtype": "fp64", "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3},
}
"""Model arguments that are stored in the checkpoint, under the names that Megatron-LM uses."""

RUN: dict[str, Any] = {
    **{"iteration": 1, "consumed_train_samples": SAMPLES, "world_size": 2, "data_parallel_size": 1},
    **{"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1},
    **{"sequence_parallel": True, "train_iters": 4, "global_batch_size": SAMPLES, "micro_batch_size": SAMPLES},
    **{"lr": 0.01, "min_lr": 0.01, "lr_decay_style": "constant", "seed": 1234, "ckpt_format": "torch_dist"},
}


class _Nothing:
    """Placeholder for a CUDA stream or event, whose methods do nothing."""

    def __init__(self, *args: object, **options: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: _Nothing()


def stay_on_cpu() -> None:
    """Replace the torch.cuda functions that megatron-core calls, so that megatron-core can train on a CPU."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.current_stream = cuda.Stream = cuda.Event = _Nothing
    cuda.stream = lambda stream=None: contextlib.nullcontext()
    for name in ("set_device", "synchronize", "empty_cache", "manual_seed"):
        setattr(cuda, name, lambda *args, **options: None)
    anything: Any = torch
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "empty_like"):
        setattr(anything, name, _on_cpu(getattr(torch, name)))
    anything.Tensor.cuda = lambda self, *args, **options: self


def _on_cpu(factory: Any) -> Any:
    def made(*args: Any, **options: Any) -> Any:
        if options.get("device") is not None:
            options["device"] = "cpu"
        return factory(*args, **options)

    return made


def replace_private(module: Any, **functions: Any) -> None:
    """Replace private functions of a megatron-core module. The argument `name=function` replaces `module._name`."""
    for name, function in functions.items():
        assert hasattr(module, f"_{name}"), f"this megatron-core has no _{name}"
        setattr(module, f"_{name}", function)


def norm_under_sequence_parallelism(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
    """Return a torch RMSNorm whose weight is marked as sequence-parallel, as in Transformer Engine. megatron-core sums
    the gradients of such weights over the tensor-parallel ranks, which hold different parts of the sequence."""
    norm: Any = torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)
    norm.weight.sequence_parallel = config.sequence_parallel
    return norm


def build_model() -> tuple[Any, Any]:
    """Return the configuration and the GPTModel. The initial weights are deterministic, and larger than usual."""
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import random as states

    # Without Transformer Engine, megatron-core 0.16.1 does not define `te_general_gemm`, but reads it.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    WrappedTorchNorm.__new__ = norm_under_sequence_parallelism
    replace_private(
        states,
        get_cuda_rng_state=lambda *args, **options: torch.get_rng_state(),
        set_cuda_rng_state=lambda state, *args, **options: torch.set_rng_state(state),
    )
    states.model_parallel_cuda_manual_seed(1234)
    known = {each.name for each in fields(TransformerConfig)}
    config = TransformerConfig(
        **{name: value for name, value in ARGUMENTS.items() if name in known},
        **{"num_moe_experts": 4, "gated_linear_unit": True, "activation_func": torch.nn.functional.silu},
        **{"layernorm_epsilon": 1e-5, "params_dtype": torch.float32, "use_cpu_initialization": True},
        **{"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 2},
        **{"bias_activation_fusion": False, "bias_dropout_fusion": False, "masked_softmax_fusion": False},
        **{"apply_rope_fusion": False, "gradient_accumulation_fusion": False},
    )
    torch.manual_seed(3)
    layers = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    model = GPTModel(
        config,
        layers,
        vocab_size=32,
        max_sequence_length=16,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        mtp_block_spec=specs.get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False),
    )
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() > 1:
                param.mul_(8)
            else:  # replicas are equal
                own = torch.Generator().manual_seed(sum(map(ord, name)))
                param.add_(0.3 * torch.randn(param.shape, generator=own))
    return config, model


def save_checkpoint(model: Any, folder: str) -> None:
    from megatron.core import dist_checkpointing, parallel_state

    content = {
        **{"non_homogeneous_layers": True, "distrib_optim_sharding_type": "fully_reshardable"},
        **{"chained_optim_avoid_prefix": True, "singleton_local_shards": False},
    }
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    base = f"{folder}/checkpoint/iter_0000001"
    if dist.get_rank() == 0:
        os.makedirs(base)
    dist.barrier()
    state = {
        "args": argparse.Namespace(**ARGUMENTS, **RUN),
        "checkpoint_version": 3.0,
        "iteration": 1,
        "content_metadata": content,
        "num_floating_point_operations_so_far": 0,
        "model": model.sharded_state_dict(metadata={**content, "dp_cp_group": replicas}),
    }
    dist_checkpointing.save(state, base)
    with open(f"{folder}/checkpoint/latest_checkpointed_iteration.txt", "w") as file:
        file.write("1")


def gradients(config: Any, model: Any, tokens: Any, labels: Any, fault: str) -> tuple[float, dict[str, Any]]:
    """Run one step on this rank. Return the mean loss, and the main gradients keyed by parameter name."""
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed import finalize_model_grads as reduce

    if fault == "norms":
        module = sys.modules["megatron.core.distributed.finalize_model_grads"]
        replace_private(module, allreduce_non_tensor_model_parallel_grads=lambda *args, **options: None)
    own = DistributedDataParallelConfig(use_distributed_optimizer=False, grad_reduce_in_fp32=True)
    config.finalize_model_grads_func = reduce
    wrapped = DistributedDataParallel(config, own, model)
    MTPLossAutoScaler.set_loss_scale(torch.ones(1))
    model.train()
    wrapped.zero_grad_buffer()
    hidden = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    positions = torch.arange(LENGTH)[None].expand(SAMPLES, LENGTH)
    counts = torch.ones(SAMPLES, LENGTH)
    loss = wrapped(tokens, positions, hidden, labels=labels, loss_mask=counts).float().mean()
    loss.backward()
    reduce([wrapped])
    return float(loss), {name: param.main_grad.clone() for name, param in model.named_parameters()}


def main(rank: int, folder: str, fault: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    stay_on_cpu()
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, expert_tensor_parallel_size=2)
    config, model = build_model()
    save_checkpoint(model, folder)
    text = torch.randint(TOKENS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    loss, grads = gradients(config, model, tokens, labels, fault)
    place = f"{folder}/wgrads/iter_0000001"
    os.makedirs(place, exist_ok=True)
    torch.save({"model_chunk0": grads}, f"{place}/mp_rank_{rank:02d}.pth")
    if rank == 0:
        np.savez(f"{folder}/batch.npz", tokens=tokens.numpy(), labels=labels.numpy())
        with open(f"{folder}/loss.txt", "w") as file:
            file.write(repr(loss))
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
