"""Tests of --data-phases: the beginnings of phases, the settings that phases change, and error messages that report all
mistakes in a file at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.build import parse_blend
from megatron.core.optimizer.param_scheduler import ScheduleLength
from megatron.core.parallel_dims import ParallelDims
from megatron.extensions.data.phases.epochs import Epochs
from megatron.extensions.data.phases.flags import PhasesConfig
from megatron.extensions.data.phases.plan import PhasePlan
from megatron.training.config.arguments import parse_args
from megatron.training.config.saved_flags import changed_lengths
from megatron.training.config.validation import resolve, validate
from megatron.training.plan import History, plan_of
from tests.corpus import write_documents
from tests.pure.test_batch_size import GOOD


def flags(path: Path, more: str = "--mock-data --train-samples 400") -> list[str]:
    return [*GOOD.split(), "--data-phases", str(path), *more.split()]


def made(path: Path, text: str, more: str = "--mock-data --train-samples 400", world_size: int = 1) -> PhasePlan:
    path.write_text(text)
    config = parse_args(flags(path, more))
    assert not validate(config, world_size), validate(config, world_size)
    assert resolve(config, world_size) == resolve(resolve(config, world_size), world_size)
    plan = plan_of(resolve(config, world_size))
    assert isinstance(plan, PhasePlan)
    return plan


def test_phases_begin_after_the_batch_sizes_that_the_run_had(tmp_path: Path) -> None:
    """Before the phases are added, the run has trained 20 iterations with 8 samples each and 20 iterations with 4
    samples each."""
    path = tmp_path / "phases.yaml"
    path.write_text("- name: main\n- {name: end, from-iterations: 50, global-batch-size: 16}\n")
    config = parse_args(flags(path, "--mock-data --train-iters 60 --global-batch-size 4"))
    config = replace(config, past_batches=((0, 0), (20, 160), (40, 240)))
    assert not validate(config, 1)
    plan = plan_of(resolve(config, 1))
    assert [phase.first_sample for phase in plan.phases] == [0, 280]
    assert (plan.iterations, plan.samples, plan.schedule().length.decay) == (60, 440, 440)
    assert plan.phases[1].first_iteration == 50 and plan.sizes.at(240) == 4 and plan.sizes.at(280) == 16


def problems(path: Path, text: str, more: str = "--mock-data --train-samples 400", world_size: int = 1) -> list[str]:
    path.write_text(text)
    found = validate(parse_args(flags(path, more)), world_size)
    return [str(problem).replace(str(path), "FILE") for problem in found]


UNITS = st.sampled_from(("samples", "tokens", "iterations"))
PHASES = st.lists(st.tuples(UNITS, st.integers(1, 40), st.integers(1, 6), st.integers(1, 5)), max_size=4)


@given(PHASES, st.integers(1, 60))
@settings(max_examples=40, deadline=None)
def test_a_phase_begins_with_the_first_step_after_its_number(
    tmp_path_factory: pytest.TempPathFactory, later: list[tuple[str, int, int, int]], more: int
) -> None:
    """The expected values are computed by iterating over all steps."""
    begun, sizes = {"samples": 0, "tokens": 0, "iterations": 0}, [(3, 4)]
    text, firsts = "- {seq-length: 4, global-batch-size: 3, name: '0'}\n", [(0, 0, 0)]
    for number, (unit, further, length, size) in enumerate(later, 1):
        start = begun[unit] + further
        text += f"- {{from-{unit}: {start}, seq-length: {length}, global-batch-size: {size}, name: '{number}'}}\n"
        while begun[unit] < start:
            begun["samples"] += sizes[-1][0]
            begun["tokens"] += sizes[-1][0] * sizes[-1][1]
            begun["iterations"] += 1
        firsts.append((begun["samples"], begun["iterations"], begun["tokens"]))
        sizes.append((size, length))
    path = tmp_path_factory.mktemp("plan") / "phases.yaml"
    path.write_text(text)
    end = firsts[-1][0] + more
    plan = plan_of(resolve(parse_args(flags(path, f"--mock-data --train-samples {end}")), 1))
    assert [(phase.first_sample, phase.first_iteration, phase.first_token) for phase in plan.phases] == firsts
    assert plan.samples == end == plan.phases[-1].end
    consumed = tokens = 0
    while consumed < end:
        phase = plan.at(consumed)
        size, length = sizes[plan.phases.index(phase)]
        assert (plan.sizes.at(consumed), phase.config.model.seq_length) == (size, length)
        assert plan.tokens(consumed) == tokens
        consumed, tokens = consumed + size, tokens + size * length


TWO = """
- {name: main, rotary-base: 10000}
- {name: long, from-tokens: 3000, seq-length: 64, rotary-base: 5e5, global-batch-size: 4, micro-batch-size: 2}
- {name: cool-down, from-samples: 300, lr: 5e-4, lr-decay-style: linear, lr-warmup-iters: 2, lr-warmup-init: 1e-4}
"""


def test_a_phase_changes_its_settings(tmp_path: Path) -> None:
    plan = made(tmp_path / "s.yaml", TWO)
    main, long, last = plan.phases
    assert [phase.first_sample for phase in plan.phases] == [0, 192, 300]
    models = long.config.model, last.config.model
    assert [(model.seq_length, model.max_positions) for model in models] == [(64, 64), (16, 16)]
    assert [model.rotary_base for model in models] == [5e5, 10000], "not the value of the previous phase"
    assert plan.longest == long and plan.tokens(400) == 192 * 16 + 108 * 64 + 100 * 16
    assert (main.config.training.num_microbatches, long.config.training.num_microbatches) == (8, 2)
    run, own = plan.schedule_of(main), plan.schedule_of(last)
    assert run.lr_at(192) == plan.schedule_of(long).lr_at(192) == pytest.approx(1e-3 * (1 - 192 / 400))
    assert [own.lr_at(x) for x in (290, 300, 308, 316, 358, 400)] == pytest.approx([1e-4, 1e-4, 3e-4, 5e-4, 2.5e-4, 0])
    by_tokens = made(tmp_path / "s.yaml", TWO, "--mock-data --train-tokens 11600")
    assert by_tokens.samples == 300 + (11600 - 192 * 16 - 108 * 64) // 16
    by_iterations = made(tmp_path / "s.yaml", TWO, "--mock-data --train-iters 60 --lr-warmup-iters 30")
    assert (by_iterations.iterations, by_iterations.samples) == (60, 192 + 108 + 9 * 8)
    assert by_iterations.schedule_of(by_iterations.phases[0]).lr_at(216) == 1e-3, "30 iterations: 24 of 8, 6 of 4"


def test_a_ramp_and_phases_can_be_combined(tmp_path: Path) -> None:
    more = "--mock-data --train-samples 400 --rampup-batch-size 4 4 60"
    plan = made(tmp_path / "s.yaml", "- {}\n- {from-samples: 50, seq-length: 32}\n", more)
    assert [(s.first_sample, s.first_iteration) for s in plan.phases] == [(0, 0), (52, 13)]
    found = problems(tmp_path / "s.yaml", "- {}\n- {from-samples: 50, global-batch-size: 32}\n", more)
    assert (
        len(found) == 1
        and "--rampup-batch-size: cannot be combined with global-batch-size in FILE: phase 1; keep one" in found[0]
    )


def test_a_phase_begins_at_a_fraction_of_the_run(tmp_path: Path) -> None:
    last = "- {}\n- {name: last, from-fraction: 0.8, lr-decay-style: WSD, lr-wsd-decay-fraction: 0.5}\n"
    for more, number in (
        ("--train-samples 400", "from-samples: 320"),
        ("--train-iters 50", "from-iterations: 40"),
        ("--train-tokens 4000", "from-tokens: 3200"),
    ):
        plan = made(tmp_path / "s.yaml", last, f"--mock-data {more}")
        same = made(tmp_path / "s.yaml", last.replace("from-fraction: 0.8", number), f"--mock-data {more}")
        begun = [(phase.first_sample, phase.first_iteration, phase.first_token) for phase in plan.phases]
        assert begun == [(phase.first_sample, phase.first_iteration, phase.first_token) for phase in same.phases]
        optimizer = plan.phases[1].optimizer
        assert optimizer is not None
        assert ScheduleLength.in_samples(optimizer, plan.phases[1].samples).anneal == plan.phases[1].samples / 2 > 0
    for wrong in ("1", "-0.1", "80%", "[0.5]"):
        found = problems(tmp_path / "s.yaml", f"- {{}}\n- {{from-fraction: {wrong}}}\n")
        assert any("must be at least 0 and below 1: the fraction of the run that is before" in each for each in found)


def test_a_beginning_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    for wrong in ("[1, 2]", "{a: 1}", "soon", "true"):
        found = problems(tmp_path / "s.yaml", f"- {{}}\n- {{from-samples: {wrong}}}\n")
        assert any("from-samples" in each and "must be an integer, at least 0" in each for each in found)


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    text = """
- {name: a, hidden-size: 32, min-lr: 1}
- {name: b, from-tokens: 0, seq-lenght: 4}
- {name: a, seq-length: 34, micro-batch-size: 3, global-batch-size: 10}
- {name: d, from-samples: 1e6, from-tokens: 3, lr: -1, lr-decay-style: cubic}
- 7
"""
    found = "\n".join(problems(tmp_path / "s.yaml", text, "--mock-data --train-samples 400 --lr 0", 1))
    for part in (
        "FILE: phase 0 (a): hidden-size: a phase cannot change this; keys: name, from-samples, ",
        "FILE: phase 1 (b): seq-lenght: unknown key; did you mean seq-length?",
        "FILE: phase 2 (a): has no beginning; give one of from-samples, from-tokens, from-iterations and",
        "FILE: phase 3 (d): has more than one beginning",
        "FILE: phase 3 (d): lr-decay-style cubic: must be one of",
        "FILE: phase 4: is not a mapping; write a list of phases",
        "FILE: phase 2 (a): name a: is already the name of another phase; give each phase its own name",
        "FILE: phase 1 (b): from-tokens 0: must be after the beginning of phase a, sample 0; use a larger number",
        "--lr 0.0: must be above 0",
    ):
        assert part in found, f"{part}\n\nin\n\n{found}"


def test_each_phase_is_validated_by_the_rules_of_a_run(tmp_path: Path) -> None:
    text = """
- {min-lr: 1}
- {name: long, from-samples: 80, seq-length: 34, micro-batch-size: 3, global-batch-size: 10}
- {name: late, from-iterations: 4000}
"""
    found = problems(tmp_path / "s.yaml", text, "--mock-data --train-samples 400 --cp 2 --tp 2 --sequence-parallel", 4)
    text = "\n".join(found)
    for part in (
        "FILE: phase 0: --min-lr 1.0: must be at most --lr 0.001; nearest: 0.001",
        "FILE: phase 1 (long): --seq-length 34: must be a multiple of",
        "FILE: phase 1 (long): --global-batch-size 10: must be a multiple of",
        "FILE: phase 2 (late): from-iterations 4000: begins at sample",
        "but the run ends at sample 400; begin it earlier, remove it, or train longer",
    ):
        assert part in text, f"{part}\n\nin\n\n{text}"


WRONG = yaml.safe_load(Path(__file__).with_name("wrong_phases.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case["said"])
def test_invalid_phase_files_are_refused(tmp_path: Path, case: dict[str, str]) -> None:
    found = "\n".join(problems(tmp_path / "s.yaml", case["file"], case["flags"]))
    assert case["said"] in found, found


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    config = parse_args(flags(tmp_path / "none.yaml"))
    plan, found = PhasePlan.planned(resolve(config, 1))
    assert plan is None and "No such file" in str(found[0]) and found[0].flag == "--data-phases"


def test_phases_that_have_begun_stay_and_later_ones_may_change(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    before = made(path, TWO)
    history = History(200, before.record(200))
    assert [phase["planned"] for phase in history.phases] == [[192], [108]]
    later = TWO.replace("from-samples: 300, lr: 5e-4", "from-samples: 320, lr: 2e-4")
    plan = made(path, later).continued(history)
    assert [phase.lengths for phase in plan.phases] == [(192,), (108, 128), (80,)], (
        "what was planned orders its samples"
    )
    longer = made(path, TWO, "--mock-data --train-samples 500").continued(History(310, before.record(310)))
    assert longer.phases[-1].lengths == (100, 200)
    for text, message in (
        (TWO.replace("seq-length: 64", "seq-length: 32"), "(long) has begun with seq-length 64, but now has 32"),
        (TWO.replace("3000", "3500"), "(long) began at sample 192 in the checkpoint, but now begins at 224"),
        (TWO.replace("rotary-base: 10000", "lr: 1e-4"), "phase 0 (main) has begun without lr, but now has it"),
        ("- {name: main, rotary-base: 10000}", "has begun phase long, which is missing"),
        (TWO.replace("from-samples: 300", "from-samples: 196"), "begins at sample 196, but the run is at sample 200"),
    ):
        with pytest.raises(ValueError, match="a new phase may begin at sample 200 or later") as caught:
            made(path, text).continued(history)
        assert message in str(caught.value), str(caught.value)


def test_a_run_may_add_phases_later(tmp_path: Path) -> None:
    config = resolve(parse_args([*GOOD.split(), "--mock-data", "--train-samples", "400"]), 1)
    history = History(96, plan_of(config).record(96))
    text = "- {}\n- {from-samples: 96, seq-length: 32}"
    plan = made(tmp_path / "s.yaml", text).continued(history)
    with pytest.raises(ValueError, match=r"phase 0 has begun with seq-length 16, but now has 64"):
        made(tmp_path / "s.yaml", text.replace("{}", "{seq-length: 64}")).continued(replace(history, config=config))
    assert plan.phases[0].lengths == (400,) and plan.phases[1].first_sample == 96
    longer = replace(config, training=replace(config.training, train_samples=900))
    assert plan_of(longer).continued(history).phases[0].lengths == (400, 900)


def test_the_old_name_of_the_flag_is_accepted() -> None:
    config = parse_args([*GOOD.split(), "--mock-data", "--data-stages", "s.yaml"])
    assert config.options(PhasesConfig).data_phases == "s.yaml"
    assert "--data-phases s.yaml -> not given" in str(changed_lengths(config, parse_args(GOOD.split())))


def test_epochs_of_each_source_are_counted_over_phases(tmp_path: Path) -> None:
    class Alternating:
        """Dataset that alternates between sources 0 and 1."""

        def sources_of(self, samples: range) -> np.ndarray:
            return np.arange(samples.start, samples.stop) % 2

    plan = made(tmp_path / "s.yaml", "- {}\n- {from-samples: 40, seq-length: 32}")
    epochs = Epochs(plan, Alternating(), ["a", "b"], [160, 10_000])  # type: ignore[arg-type]
    assert list(epochs.ended(16)) == [] and epochs.line(16) == "a 0.8, b 0.0128"
    assert list(epochs.ended(24)) == ["epoch 1 of a has ended by sample 24: 1.200 epochs"]
    assert epochs.at(48).tolist() == [(20 * 16 + 4 * 32) / 160, (20 * 16 + 4 * 32) / 10_000]
    assert epochs.at(24).tolist() == [1.2, 192 / 10_000], "a resumed run counts from its beginning"


def test_a_plan_prints_each_phase(tmp_path: Path) -> None:
    description = pytest.importorskip("megatron.extensions.plan.planner.dry_run")
    cache = pytest.importorskip("megatron.extensions.plan.planner.fake_stage").PlannerCache()
    for name in ("web", "code"):
        write_documents(tmp_path / name, [np.arange(1000)])
    (tmp_path / "book.txt").write_text("a text")
    web, code, book = (tmp_path / name for name in ("web", "code", "book.txt"))
    text = f"""
- {{data-path: 3 {web} 1 {code}}}
- {{name: long, from-samples: 80, seq-length: 64, global-batch-size: 4, data-path: [1, {web}, 1, {book}], lr: 1e-4}}
"""
    more = "--train-iters 20 --tokenizer-type ByteTokenizer --vocab-size 2000 --split 1,0,0"
    plan = made(tmp_path / "s.yaml", text, more)
    dims = ParallelDims.from_config(plan.base.parallel, 1)
    lines = [line for phase in plan.phases for line in description.data_lines(plan, phase, dims)]
    lines += description.batch_lines(plan, dims, cache)
    for part in (
        "phase 0: from sample 0, iteration 1, token 0: 80 samples of 16, 1,280 tokens, 10 iterations; global batch 8",
        f"{web}: 1 documents, 1,000 tokens; 0.96 epochs",
        "phase long: from sample 80, iteration 11, token 1,280: 40 samples of 64, 2,560 tokens, 10 iterations",
        "learning rate, its own (linear): 0.0001, 5.5e-05, 1e-05 at its beginning, middle and end",
        f"{book}: text, 1 files, 0.0 MB, tokenized when the run starts",
        f"{web}: 1 documents, 1,000 tokens; 1.28 epochs",
        "phase long: global batch 4 = micro-batch 1 x 4 micro-batches x 1 replicas; 256 tokens a step",
        "20 iterations, 120 samples, 3,840 tokens,",
    ):
        assert any(part in line for line in lines), (part, lines)


def test_the_phases_of_a_published_recipe_are_valid() -> None:
    path = Path(__file__).parents[3] / "scripts" / "recipes" / "smollm3_phases.yaml"
    more = "--seq-length 4096 --global-batch-size 576 --train-iters 4747000 --vocab-size 128256"
    config = parse_args(flags(path, more))
    assert not validate(config, 1)
    plan = plan_of(resolve(config, 1))
    assert [round(phase.first_token / 1e12, 3) for phase in plan.phases] == [0, 8, 10]
    for phase in plan.phases:
        blend = parse_blend("--data-path", phase.config.data.data_path or ())
        assert blend.weights is not None and sum(blend.weights) == pytest.approx(1)


def test_a_plan_names_missing_data(tmp_path: Path) -> None:
    description = pytest.importorskip("megatron.extensions.plan.planner.dry_run")
    plan = made(tmp_path / "s.yaml", f"- {{data-path: {tmp_path / 'nowhere'}}}\n", "--train-iters 20 --vocab-size 2000")
    lines = list(description.data_lines(plan, plan.phases[0], ParallelDims()))
    assert any(f"there is no file {tmp_path / 'nowhere'}.idx" in line for line in lines), lines
