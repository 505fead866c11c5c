"""Adam with moments and main parameters stored in fewer bits than fp32 (--use-precision-aware-optimizer).

Each update converts the states to fp32, applies Adam in fp32, and rounds the results. If compiled, an update is fused
into a few kernels, which read and write only the stored formats.

If parameters are bf16, the optimizer stores only the lower 16 bits of each fp32 main parameter. The bf16 parameter
holds the upper 16 bits, so no bit is lost (Megatron-LM's --store-param-remainders).

Rounding is stochastic: values are rounded up or down with probabilities that make the expected value exact. With
rounding to nearest, many bf16 and fp8 moments would never change, because one update changes them by less than half the
distance to the next number. The random bits are a hash of the element's main parameter and the update number. A step
therefore depends neither on the layout nor on the state of a random generator, and a resumed run takes the same steps.

fp16 and fp8 (e4m3) states have one power-of-two scale for each block of 64 elements. In buffers, parameters and shards
are aligned to these blocks, so sharding splits no block. These formats store the square root of the second moment,
which needs only half the exponent range. The square root is rounded so that the expected value of its square is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.compiled_regions import region
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.dropout import mixed, round_to_bf16, uniform_of
from megatron.core.optimizer.optimizer import MAIN_PARAM, Shard, ShardSpec, ShardUpdate, StepValues
from megatron.core.optimizer.transforms import FusedTransform, StageOfUpdate, State, Transform, elements
from megatron.core.param_meta import ParamMeta
from megatron.extensions.optim.optimizers.flags import SCALE_BLOCK, PrecisionAwareFlags

SMALLEST = -126
"""Exponent of the smallest scale. 2^-126 is the smallest normal fp32 number. Blocks with smaller values also have the
scale 2^-126."""


@dataclass(frozen=True)
class StateFormat:
    """Number format in which an optimizer state is stored."""

    dtype: torch.dtype
    mantissa: int
    """Number of explicit mantissa bits."""

    least: int = SMALLEST
    """Exponent of the smallest normal number."""

    largest: float | None = None
    """Largest number that the format can represent; None for formats without scales."""

    exported: torch.dtype | None = None
    """For formats with scales, the dtype in which checkpoints store the state. This dtype represents every scaled value
    exactly."""

    @property
    def scaled(self) -> bool:
        return self.largest is not None


FORMATS = {
    "fp32": StateFormat(torch.float32, 23),
    "bf16": StateFormat(torch.bfloat16, 7),
    "fp16": StateFormat(torch.float16, 10, -14, 65504.0, torch.float32),
    "fp8": StateFormat(torch.float8_e4m3fn, 3, -6, 448.0, torch.bfloat16),
}


class StoredState:
    """Flat optimizer state of one shard, stored in a format of `FORMATS`. If `squared` is True, the state is a second
    moment.

    `numel` must be a multiple of the scale block size. The format "fp32" stores values as `main_dtype`.
    """

    def __init__(
        self,
        numel: int,
        name: str,
        main_dtype: torch.dtype,
        zeros: Callable[[int, torch.dtype], Tensor],
        squared: bool = False,
    ) -> None:
        """Allocate the state.

        Args:
            numel: Number of elements.
            name: Name of the format.
            main_dtype: Dtype that is used if `name` is "fp32".
            zeros: Function that allocates a tensor of zeros, `zeros(numel, dtype)`.
            squared: True if the state is a second moment. Formats with scales store the square root of a second moment.
        """
        self.format, self.squared = FORMATS[name], squared and FORMATS[name].scaled
        dtype = main_dtype if name == "fp32" else self.format.dtype
        self.codes = zeros(numel, dtype)
        blocks = numel // SCALE_BLOCK if self.format.scaled else 0
        self.exponents = zeros(blocks, torch.int8).fill_(SMALLEST)
        self.rounds = name != "fp32"

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.exponents.nbytes

    def tensors(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return views of the codes and of the scale exponents for the elements [start, stop). The range must consist
        of whole scale blocks."""
        return self.codes[start:stop], self.exponents[start // SCALE_BLOCK : -(-stop // SCALE_BLOCK)]

    def read(self, codes: Tensor, exponents: Tensor) -> Tensor:
        """Decode codes and scale exponents to fp32. For the format "fp32", return the codes, in the main dtype."""
        if not self.rounds:
            return codes
        if not self.format.scaled:
            return codes.float()
        values = (codes.float().view(-1, SCALE_BLOCK) * power_of_two(exponents)[:, None]).view(-1)
        return values.square() if self.squared else values

    def rounded(self, values: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor | None]:
        """Round values to the format. Return the codes to store, and the exponent of each block's scale.

        `uniform` contains a number in [0, 1) for each value. The value is rounded up if the number is less than the
        probability of rounding up. 0.5 rounds to nearest.
        """
        if not self.rounds:
            return values, None
        values = values.float()
        if not self.format.scaled:
            return round_to_bf16(values, uniform), None
        values = values.sqrt() if self.squared else values
        blocks = values.view(-1, SCALE_BLOCK)
        exponents = scale_exponents(blocks.abs().amax(1), self.format)
        scaled = (blocks / power_of_two(exponents)[:, None]).view(-1)
        codes = round_scaled(scaled, uniform, self.format, self.squared)
        return codes.to(self.format.dtype), exponents.to(torch.int8)

    def exported(self) -> Tensor:
        """Return the values that a checkpoint stores. For formats without scales, return the stored tensor itself;
        otherwise, return an exact copy on the host."""
        if not self.format.scaled:
            return self.codes
        return on_host(self.codes.numel(), self.format.exported, lambda *part: self.read(*self.tensors(*part)))

    def take_up(self, values: Tensor) -> None:
        """Encode values from a checkpoint. States without scales are loaded in place, so they need no encoding."""
        if not self.format.scaled:
            return
        for start, stop in chunks(self.codes.numel()):
            part = values[start:stop].to(self.codes.device).float()
            codes, exponents = self.rounded(part, torch.full_like(part, 0.5))
            assert exponents is not None
            for own, new in zip(self.tensors(start, stop), (codes, exponents), strict=True):
                own.copy_(new)


def chunks(numel: int, size: int = 2**22) -> list[tuple[int, int]]:
    """Divide `numel` elements into chunks of at most `size` elements, which limits the size of temporary tensors.
    Return the range [start, stop) of each chunk."""
    return [(start, min(start + size, numel)) for start in range(0, numel, size)]


def on_host(numel: int, dtype: torch.dtype | None, read: Callable[[int, int], Tensor]) -> Tensor:
    """Copy all elements to host memory, one chunk at a time. `read(start, stop)` returns the elements of a chunk."""
    values = torch.empty(numel, dtype=dtype)
    for start, stop in chunks(numel):
        values[start:stop].copy_(read(start, stop))
    return values


def power_of_two(exponents: Tensor) -> Tensor:
    """Compute 2^e exactly in fp32, for integers e from -126 to 127."""
    return ((exponents.to(torch.int32) + 127) << 23).view(torch.float32)


def scale_exponents(amax: Tensor, number: StateFormat) -> Tensor:
    """Return the smallest exponent e, as int32, for which amax / 2^e is at most the format's largest number.

    If the values were already rounded with the scale 2^e, the result may be a smaller exponent, whose scale also
    represents the values exactly.
    """
    assert number.largest is not None
    ratio = (amax / number.largest).view(torch.int32)
    above = (ratio & 0x7FFFFF) != 0
    exponents = (ratio >> 23) - 127 + above.to(torch.int32)
    return exponents.clamp(SMALLEST, 127)


def round_scaled(x: Tensor, uniform: Tensor, number: StateFormat, squared: bool) -> Tensor:
    """Round x to values that the format can represent, and return these values in fp32. Rounding is stochastic, and the
    expected value of the result is x. If `squared` is True, the expected square of the result is the square of x.
    """
    assert number.largest is not None
    magnitude = x.abs()
    exponent = (magnitude.view(torch.int32) >> 23).clamp(min=number.least + 127)
    step = ((exponent - number.mantissa) << 23).view(torch.float32)
    low = torch.floor(magnitude / step) * step
    share = (magnitude - low) / step
    if squared:
        share = share * (magnitude + low) / (2 * low + step)
    rounded = torch.where(uniform < share, low + step, low).clamp(max=number.largest)
    return torch.copysign(rounded, x)


def split_master(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 numbers without loss into the nearest bf16 numbers (ties away from zero) and int16 remainders."""
    bits = values.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def join_master(params: Tensor, remainders: Tensor) -> Tensor:
    """Restore fp32 numbers from the bf16 numbers and the remainders that `split_master` returned."""
    return ((params.view(torch.int16).to(torch.int32) << 16) + remainders.to(torch.int32)).view(torch.float32)


CHUNK = 2**18
"""Number of elements that an update processes at once if it is not compiled. Temporary tensors of this size fit into a
CPU's cache."""

EXP_AVG = 0x3C6EF372
EXP_AVG_SQ = 0x1B873593
MAIN = 0x52DCE729
"""Salts of the hashes that compute the random bits for rounding: MAIN for main parameters, EXP_AVG and EXP_AVG_SQ for
Adam's moments."""


class PackedShard(Shard):
    """Optimizer shard that stores main parameters and moments in the formats of --main-params-dtype, --exp-avg-dtype
    and --exp-avg-sq-dtype."""

    changes_params_when_loaded = True

    def __init__(self, spec: ShardSpec) -> None:
        super().__init__(spec)
        config, main_dtype = spec.config, spec.main_dtype
        params = self.params
        numel = self.numel
        names = str(params.dtype).removeprefix("torch."), str(main_dtype).removeprefix("torch.")
        plan, options = config.state_plan, config.options(PrecisionAwareFlags)
        self.kind = plan.main_kind(config, *names, on_host=self.on_host)
        self.as_remainders = plan.main_kind(config, *names) == "remainders"
        """True if bf16 parameters are rounded as by `split_master`, with ties away from zero. On the host, no
        remainders are stored, but parameters are rounded in the same way as on the device."""
        self.remainders = self.zeros(numel if self.kind == "remainders" else 0, torch.int16)
        stored = {"stored": numel, "fp16": numel}.get(self.kind, 0)
        name = "fp16" if self.kind == "fp16" else "fp32"
        self.main = StoredState(stored, name, main_dtype, self.zeros)
        self.exp_avg = StoredState(numel, options.exp_avg_dtype, main_dtype, self.zeros)
        self.exp_avg_sq = StoredState(numel, options.exp_avg_sq_dtype, main_dtype, self.zeros, squared=True)
        self.take_up({MAIN_PARAM: params.to(self.device, main_dtype)})

    def write_params(self) -> None:
        """Do nothing, because an update writes the parameters together with the main parameters."""

    def read_main(self, start: int, stop: int) -> Tensor:
        first, last = start // SCALE_BLOCK * SCALE_BLOCK, -(-stop // SCALE_BLOCK) * SCALE_BLOCK
        return read_main(self.kind, self.part(first, last), self.main)[start - first : stop - first]

    def part(self, start: int, stop: int) -> Part:
        """Return the views that an update of elements [start, stop) reads and writes. The range must consist of whole
        scale blocks."""
        main = self.main.tensors(start, stop) if self.kind in ("stored", "fp16") else self.main.tensors(0, 0)
        grads, params, remainders = (x[start:stop] for x in (self.grads, self.params, self.remainders))
        moments = self.exp_avg.tensors(start, stop), self.exp_avg_sq.tensors(start, stop)
        return Part(grads, params, remainders, main, *moments)

    def exported(self) -> dict[str, Tensor]:
        states = {"exp_avg": self.exp_avg.exported(), "exp_avg_sq": self.exp_avg_sq.exported()}
        if self.params_are_main:
            return states
        if self.kind == "stored":
            return {MAIN_PARAM: self.main.codes} | states
        return {MAIN_PARAM: on_host(self.numel, torch.float32, self.read_main)} | states

    def take_up(self, loaded: Mapping[str, Tensor]) -> None:
        for key, state in (("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq)):
            if key in loaded:
                state.take_up(loaded[key])
        main, params = loaded.get(MAIN_PARAM), self.device_params
        if self.params_are_main and self.on_host:
            self.main.codes.copy_(params)
        if main is None or self.params_are_main:
            return
        if self.as_remainders:
            for start, stop in chunks(len(params)):
                upper, lower = split_master(main[start:stop].to(params.device))
                params[start:stop].copy_(upper)
                if self.kind == "remainders":
                    self.remainders[start:stop].copy_(lower)
        if self.kind == "fp16":
            self.main.take_up(main)
        elif self.kind == "stored" and main is not self.main.codes:
            self.main.codes.copy_(main)

    @property
    def nbytes(self) -> tuple[int, int]:
        return self.remainders.nbytes + self.main.nbytes, self.exp_avg.nbytes + self.exp_avg_sq.nbytes


class Part(NamedTuple):
    """Views of a range of elements in the tensors of a `PackedShard`. `PackedShard.kind` determines whether
    `remainders` and `main` are empty. Each optimizer state is a pair (codes, scale exponents).
    """

    grads: Tensor
    params: Tensor
    remainders: Tensor
    main: tuple[Tensor, Tensor]
    exp_avg: tuple[Tensor, Tensor]
    exp_avg_sq: tuple[Tensor, Tensor]


class Scalars(NamedTuple):
    """Scalar inputs of an update, as tensors on the device, so that new values do not trigger recompilation."""

    lr: Tensor
    weight_decay: Tensor
    factor: Tensor
    """Factor by which gradients are multiplied."""

    number: Tensor
    """Number of the update, counted from 1."""

    skip: Tensor
    correction1: Tensor
    """Bias correction 1 - beta1 ** number. This value is computed once per update, because a kernel would compute the
    power in float64 for each element."""

    correction2: Tensor


def read_main(kind: str, part: Part, main: StoredState) -> Tensor:
    """Return the main parameters of the elements in `part`, in fp32 or in the main dtype."""
    if kind == "aliased":
        return part.params
    if kind == "remainders":
        return join_master(part.params, part.remainders)
    return main.read(*part.main)


class PrecisionAwareAdam(FusedTransform):
    """Adam with decoupled weight decay (arXiv 1711.05101). The moments are stored in the formats of --exp-avg-dtype and
    --exp-avg-sq-dtype."""

    def states(self, meta: ParamMeta) -> Sequence[State]:
        options = self.config.options(PrecisionAwareFlags)
        formats = {"exp_avg": options.exp_avg_dtype, "exp_avg_sq": options.exp_avg_sq_dtype}
        return [stored_state(name, meta, FORMATS[chosen]) for name, chosen in formats.items()]

    def kernel(self, shards: Sequence[Shard], stage: StageOfUpdate) -> ShardUpdate:
        packed = [shard for shard in shards if isinstance(shard, PackedShard)]
        assert len(packed) == len(shards), "states are stored in different formats"
        return PackedKernel(self.config, packed, stage.compiled)


def stored_state(name: str, meta: ParamMeta, number: StateFormat) -> State:
    """Return the `State` of a moment that is stored in the format `number`. If `number` is fp32, the moment has the
    main dtype."""
    dtype = None if number.dtype == torch.float32 else str(number.dtype).removeprefix("torch.")
    return elements(name, meta, dtype, SCALE_BLOCK if number.scaled else 0)


def packed_adam(config: OptimizerConfig, meta: ParamMeta) -> Sequence[Transform]:
    """Return the transforms of --optimizer adam under --use-precision-aware-optimizer."""
    return [PrecisionAwareAdam(config)]


class PackedKernel(ShardUpdate):
    """Adam update of shards whose states are stored in the formats of `FORMATS`."""

    def __init__(self, config: OptimizerConfig, shards: Sequence[PackedShard], compiled: bool) -> None:
        self.config = config
        self.shards = shards
        self._update = region(adam_step_, compiled, static=True)
        self._chunk = None if compiled else CHUNK
        self._factor: Tensor | None = None

    def scale_gradients(self, factor: Tensor) -> None:
        self._factor = factor

    def step(self, values: StepValues) -> None:
        skip, updates = values.skip, values.updates
        factor = torch.ones_like(updates) if self._factor is None else self._factor
        self._factor, number = None, updates + 1.0
        corrections = [1 - beta**number for beta in (self.config.adam_beta1, self.config.adam_beta2)]
        for shard in self.shards:
            rate, decay = values.rates.of(shard.group)
            on_device = torch.full_like(updates, rate), torch.full_like(updates, decay)
            scalars = Scalars(on_device[0], on_device[1], factor, number, skip, *corrections)
            for start, stop in chunks(shard.numel, self._chunk or shard.numel):
                self._update(shard, shard.part(start, stop), scalars, self.config)


def adam_step_(shard: PackedShard, part: Part, scalars: Scalars, config: OptimizerConfig) -> None:
    """Update the elements in `part`, a range of `shard`, with Adam, in place."""
    kind, skipped = shard.kind, scalars.skip > 0
    before = read_main(kind, part, shard.main)
    lr, weight_decay, factor = (value.to(before.dtype) for value in scalars[:3])
    beta1 = config.adam_beta1
    beta2 = config.adam_beta2
    number = scalars.number
    grad = part.grads.to(before.dtype) * factor
    exp_avg = shard.exp_avg.read(*part.exp_avg).to(before.dtype)
    exp_avg = exp_avg.lerp(grad, 1 - beta1)
    exp_avg_sq = shard.exp_avg_sq.read(*part.exp_avg_sq).to(before.dtype)
    exp_avg_sq = exp_avg_sq * beta2 + (1 - beta2) * grad * grad
    correction1, correction2 = (value.to(before.dtype) for value in (scalars.correction1, scalars.correction2))
    direction = exp_avg / correction1 / ((exp_avg_sq / correction2).sqrt() + config.adam_eps * shard.group.eps_mult)
    main = before * (1 - lr * weight_decay) - lr * direction

    key = mixed(_leading_bits(before))
    if kind == "fp16":  # hash the gradient too, because many elements have equal fp16 main parameters
        key = mixed(key ^ _leading_bits(grad))
    key = key ^ mixed(number.to(torch.int32))
    _store(shard.exp_avg, exp_avg, part.exp_avg, key, EXP_AVG, skipped)
    _store(shard.exp_avg_sq, exp_avg_sq, part.exp_avg_sq, key, EXP_AVG_SQ, skipped)
    if kind == "remainders":
        upper, lower = split_master(main)
        _keep_or_copy_(part.params, upper, skipped)
        _keep_or_copy_(part.remainders, lower, skipped)
        return
    if kind != "aliased":
        _store(shard.main, main, part.main, key, MAIN, skipped)
        main = read_main(kind, part, shard.main)
    _keep_or_copy_(part.params, split_master(main)[0] if shard.as_remainders else main.to(part.params.dtype), skipped)


def _leading_bits(x: Tensor) -> Tensor:
    """Return the sign, the exponent and the 16 leading mantissa bits of `x` as int32.

    x is rounded to nearest, so that a different summation order of gradients rarely changes the result.
    """
    return (x.float().view(torch.int32) + 0x40) >> 7


def _store(
    state: StoredState, values: Tensor, into: tuple[Tensor, Tensor], key: Tensor, salt: int, skipped: Tensor
) -> None:
    codes, exponents = state.rounded(values, uniform_of(key, salt))
    _keep_or_copy_(into[0], codes, skipped)
    if exponents is not None:
        _keep_or_copy_(into[1], exponents, skipped)


def _keep_or_copy_(into: Tensor, values: Tensor, skipped: Tensor) -> None:
    if into.dtype == torch.float8_e4m3fn:  # torch.where does not support float8_e4m3fn
        into, values = into.view(torch.int8), values.view(torch.int8)
    into.copy_(torch.where(skipped, into, values))
