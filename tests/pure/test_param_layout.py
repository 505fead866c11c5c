"""Test that, for any sizes of buffers, buckets and shards, the layout contains each element of each parameter exactly
once."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.distributed.param_layout import ALIGNMENT, default_bucket_size, launch_order, plan_buffers
from megatron.core.param_meta import ParamMeta


def matrix(name, shape, **tags):
    return ParamMeta(f"decoder.{name}.weight", shape, role="hidden", **tags), shape


def vector(name, size, **tags):
    return ParamMeta(f"decoder.{name}.bias", (size,), role="bias", **tags), (size,)


@st.composite
def parameter_lists(draw):
    params = []
    for i in range(draw(st.integers(1, 12))):
        expert, shared = draw(st.booleans()), draw(st.booleans())
        if draw(st.booleans()):
            shape = draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
            params.append(matrix(f"m{i}", shape, expert=expert, shared_stages=(0, 1) if shared and not expert else ()))
        else:
            params.append(vector(f"v{i}", draw(st.integers(1, 300)), expert=expert))
    return params


@given(parameter_lists(), st.integers(1, 9), st.integers(1, 5), st.integers(1, 4000))
def test_shards_tile_every_buffer(params, dp, expert_dp, bucket_size):
    seen = {}
    for buffer in plan_buffers(params, dp, expert_dp, bucket_size):
        assert buffer.data_parallel_size == (expert_dp if buffer.expert else dp)
        end = 0
        for bucket in buffer.buckets:
            assert bucket.start == end
            for rank in range(buffer.data_parallel_size):
                start, stop = bucket.shard(rank)
                assert start == end
                assert stop > start and start % ALIGNMENT == 0 and stop % ALIGNMENT == 0
                end = stop
                for piece in bucket.pieces(start, stop):
                    assert start <= piece.offset and piece.offset + piece.stop - piece.start <= stop
                    assert piece.start == seen.get(piece.index, 0) < piece.stop
                    seen[piece.index] = piece.stop
            assert end == bucket.stop
        assert buffer.numel == end
        for place in buffer.params:
            meta, shape = params[place.index]
            assert place.meta is meta and (meta.expert, meta.matrix) == (buffer.expert, buffer.group.decays)
            assert place.stop - place.start == prod(shape) and place.start % ALIGNMENT == 0
    assert seen == {i: prod(shape) for i, (_, shape) in enumerate(params)}


@given(parameter_lists(), st.integers(1, 4), st.integers(1, 4000))
def test_buckets_fill_in_backward_order(params, dp, bucket_size):
    buffers = plan_buffers(params, dp, dp, bucket_size)
    for buffer in buffers:
        indices = [place.index for place in buffer.params]
        assert indices == sorted(indices, reverse=True)
        for bucket, following in zip(buffer.buckets, buffer.buckets[1:], strict=False):
            alone = any(p.meta.shared_stages for p in bucket.params + following.params)
            assert alone or bucket.stop - bucket.start >= bucket_size
    completed = [min(p.index for p in buffers[b].buckets[k].params) for b, k in launch_order(buffers)]
    assert completed == sorted(completed, reverse=True)
    assert len(completed) == sum(len(buffer.buckets) for buffer in buffers)


def test_groups_and_padding_match_a_manual_layout():
    params = [matrix("w", (10, 10)), vector("b", 10), matrix("e", (3, 50), expert=True)]
    dense, bias, expert = plan_buffers(params, data_parallel_size=3, expert_data_parallel_size=2)
    assert [(b.expert, b.group.decays, b.numel) for b in (dense, bias, expert)] == [
        (False, True, 192),
        (False, False, 192),
        (True, True, 256),
    ]
    (bucket,) = dense.buckets
    assert [[(p.start, p.stop, p.offset) for p in bucket.pieces(*bucket.shard(r))] for r in range(3)] == [
        [(0, 64, 0)],
        [(64, 100, 64)],
        [],
    ]


def test_default_bucket_size_grows_with_data_parallel_size():
    assert default_bucket_size(1) == 40_000_000
    assert default_bucket_size(64) == 64_000_000


def test_duplicate_names_are_refused():
    with pytest.raises(AssertionError, match="unique"):
        plan_buffers([matrix("w", (2, 2)), matrix("w", (2, 2))], 1)
