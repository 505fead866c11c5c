r"""1F1B pipeline schedule in which each rank runs twice as many warm-up forward passes, so that messages have more time
to arrive.

python tools/plot_schedule.py --extension examples/eager_1f1b.py --pipeline-schedule eager-1f1b --pp 4 \
    --num-microbatches 8 --output eager.png
python pretrain_gpt.py --extension examples/eager_1f1b.py --pipeline-schedule eager-1f1b --pp 4 ...
"""

from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES, B, F, Schedule, alternate


@PIPELINE_SCHEDULES.register("eager-1f1b")
def eager_1f1b(p: int, m: int) -> Schedule:
    return [
        alternate([F(rank, i) for i in range(m)], [B(rank, i) for i in range(m)], ahead=2 * (p - rank - 1))
        for rank in range(p)
    ]
