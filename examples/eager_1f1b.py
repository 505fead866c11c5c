r"""A pipeline schedule: 1F1B whose ranks run ahead by twice as many forwards, so that messages have time to travel.

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
