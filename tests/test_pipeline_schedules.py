"""Schedules as data: valid for every p, m, v; published numbers; torch's own orders; deadlocks."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab import ranks
from shardlab.pipeline import (
    SCHEDULE_NAMES,
    Schedule,
    Timeline,
    add_messages,
    count_peak_activations,
    find_peer,
    make_schedule,
    parse_schedule,
    schedule_1f1b,
    schedule_interleaved,
    simulate,
    validate,
)

QUICK = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def draw_schedules(draw, stages: int = 8, microbatches: int = 20) -> Schedule:
    name = draw(st.sampled_from(SCHEDULE_NAMES))
    p, m = draw(st.integers(1, stages)), draw(st.integers(1, microbatches))
    return make_schedule(name, p, m, draw(st.integers(1, 4)) if name == "interleaved" else None)


# --- every schedule, any p, m, v ----------------------------------------------------------------


@QUICK
@given(draw_schedules())
def test_every_schedule_is_valid_and_adds_up_in_one_process_order(made: Schedule) -> None:
    validate(made)
    for order in made.orders:
        kinds = "FIW" if made.has_split_backward else "FB"
        assert len(order) == len(kinds) * made.microbatches * made.chunks
        for kind in kinds:
            for chunk in range(made.chunks):
                row = [a.microbatch for a in order if (a.kind, a.chunk) == (kind, chunk)]
                assert row == list(range(made.microbatches))  # so sums are those of one process


@QUICK
@given(draw_schedules())
def test_messages_have_two_ends(made: Schedule) -> None:
    crossings = sum(
        made.find_owner(part)[0] != made.find_owner(part + 1)[0] for part in range(made.parts - 1)
    )
    messages = [
        (stage, action)
        for stage, actions in enumerate(made.actions)
        for action in actions
        if len(action.kind) == 2
    ]
    assert len(messages) == len(set(messages)) == 4 * made.microbatches * crossings
    for stage, message in messages:
        peer, there = find_peer(made, stage, message)
        assert peer != stage and (peer, there) in messages
        assert find_peer(made, peer, there) == (stage, message)


# --- compared with torch ------------------------------------------------------------------------


def torch_orders() -> tuple[list[tuple], int]:
    """Return (schedule, p, m, v, torch's order by stage), and how many torch refuses."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, schedules

    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    found, refused = [], 0
    for p in (1, 2, 3, 4, 8):
        group = dist.new_group(list(range(p)))
        for name, v in (("interleaved", 1), ("interleaved", 2), ("interleaved", 3), ("zb-v", 2)):
            zbv = name == "zb-v"
            cls = schedules.ScheduleZBVZeroBubble if zbv else ScheduleInterleaved1F1B
            parts = (0, 2 * p - 1) if zbv else [chunk * p for chunk in range(v)]
            module = torch.nn.Linear(1, 1, device="meta")
            stages = [
                PipelineStage(module, part, p * v, torch.device("cpu"), group=group)
                for part in parts
            ]
            for m in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17):
                try:
                    order = cls(stages, m, loss_fn=lambda out, target: out).pipeline_order
                except ValueError:
                    refused += 1
                    continue
                rows = [
                    [
                        (kinds[a.computation_type.name], a.microbatch_index, a.stage_index)
                        for a in order[stage]
                        if a is not None
                    ]
                    for stage in range(p)
                ]
                found.append((name, p, m, v, rows))
    return found, refused


def test_interleaved_and_zb_v_are_torchs_own_orders() -> None:
    found, refused = ranks.run_with_fake_group(torch_orders, 8)
    assert len(found) > 200 and refused > 30  # torch refuses m that give no equal groups
    for name, p, m, v, theirs in found:
        made = make_schedule(name, p, m, v)
        ours = [
            [(a.kind, a.microbatch, made.placement[stage][a.chunk]) for a in order]
            for stage, order in enumerate(made.orders)
        ]
        assert ours == theirs, (name, p, m, v)


# --- published numbers --------------------------------------------------------------------------

# Qi et al. 2023 (arXiv 2401.10241): the times of Table 9 (ms; its T_B is our input backward), and
# the bubble rates of Table 5: p, m, v; T_F, T_B, T_W, T_comm; 1F1B, ZB-H1, ZB-H2, 1F1B-I.
TABLES = (
    # 1.5B; v is ours: each layer is a chunk there, embedding and head are one each
    (8, 24, 3, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083, 0.1055)),
    (8, 32, 3, (18.513, 18.086, 9.331, 0.626), (0.1985, 0.1242, 0.0837, 0.0818)),
    (8, 64, 3, (18.546, 18.097, 9.321, 0.762), (0.1240, 0.0674, 0.0444, 0.0443)),
    # 28.3B
    (32, 96, 2, (10.419, 10.207, 7.715, 0.408), (0.2646, 0.1421, 0.0641, 0.1493)),
    (32, 128, 2, (10.408, 10.204, 7.703, 0.408), (0.2168, 0.1106, 0.0490, 0.1164)),
    (32, 256, 2, (10.402, 10.248, 7.698, 0.460), (0.1352, 0.0594, 0.0257, 0.0624)),
)


@pytest.mark.parametrize(("p", "m", "v", "times", "rates"), TABLES, ids=lambda x: str(x))
def test_the_bubble_rates_of_the_zero_bubble_paper(p, m, v, times, rates) -> None:
    for name, rate in zip(("1f1b", "zb-h1", "zb-h2"), rates[:3], strict=True):
        timeline = simulate(make_schedule(name, p, m), *times)
        assert f"{timeline.bubble:.4f}" == f"{rate:.4f}"
        work = m * sum(times[:3])
        assert timeline.bubble == pytest.approx((timeline.step_time - work) / timeline.step_time)
    # The paper's interleaved rate is ours without one message a stage.
    cost = simulate(schedule_interleaved(p, m, v), *times).step_time - p * times[3]
    assert f"{(cost - work) / cost:.4f}" == f"{rates[3]:.4f}"


@QUICK
@given(*[st.integers(1, n) for n in (8, 20, 4, 9, 9, 9)])
def test_closed_forms_of_the_bubble(p, m, v, f, i, w) -> None:
    def run(name: str, chunks: int | None = None) -> Timeline:
        return simulate(make_schedule(name, p, m, chunks), *map(Fraction, (f, i, w, 0)))

    b = i + w
    # Huang et al. 2019 (arXiv 1811.06965); Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.
    assert run("naive").step_time == p * m * (f + b)
    assert run("naive").bubble == Fraction(p - 1, p)
    for name in ("gpipe", "1f1b"):
        assert run(name).step_time == (m + p - 1) * (f + b)
        assert run(name).bubble == Fraction(p - 1, m + p - 1)
    if m >= p:  # stated for multiples of p; groups that are as equal as can be give it for all
        assert run("interleaved", v).bubble == Fraction(p - 1, v * m + p - 1)
        assert run("interleaved", v).step_time / (m * (f + b)) == 1 + Fraction(p - 1, v * m)
    else:
        assert run("interleaved", v).step_time >= (m + Fraction(p - 1, v)) * (f + b)
    # Qi et al. 2023 (arXiv 2401.10241), Table 2. They assume equal times; found here: it holds
    # as long as the weights' part is no longer than what it has to fill.
    work = m * (f + i + w)
    if m >= p and w <= f:
        assert run("zb-h1").step_time == work + (p - 1) * (f + i - w)
    if m >= 2 * p - 1 and w <= f and 2 * w <= f + i:
        assert run("zb-h2").step_time == work + (p - 1) * (f + i - 2 * w)


@QUICK
@given(*[st.integers(1, n) for n in (9, 24, 4)])
def test_closed_forms_of_memory(p, m, v) -> None:
    # One row for each stage; in micro-batches of a whole stage.
    assert count_peak_activations(make_schedule("naive", p, m)) == (1,) * p
    assert count_peak_activations(make_schedule("gpipe", p, m)) == (m,) * p
    assert count_peak_activations(make_schedule("1f1b", p, m)) == tuple(
        min(m, p - stage) for stage in range(p)
    )
    # Qi et al. 2023 (arXiv 2401.10241), Table 2 and section 6: p, 2p-1, p.
    assert count_peak_activations(make_schedule("zb-h1", p, m)) == (min(m, p),) * p
    assert count_peak_activations(make_schedule("zb-h2", p, m)) == (min(m, 2 * p - 1),) * p
    assert max(count_peak_activations(make_schedule("zb-v", p, m))) == min(m, p)
    # Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.3: p (1 + (p-1)/(pv)).
    if m % p == 0 and m >= 2 * p and v > 1:
        assert count_peak_activations(schedule_interleaved(p, m, v))[0] == pytest.approx(
            p + (p - 1) / v
        )


def test_zb_v_has_no_bubble_for_equal_times() -> None:
    for p in range(1, 9):
        for m in (2 * p - 1, 2 * p, 3 * p + 1):
            assert simulate(make_schedule("zb-v", p, m), 1, 1, 1, 0).bubble == 0
        if p > 1:
            assert simulate(make_schedule("zb-v", p, 2 * p - 2), 1, 1, 1, 0).bubble > 0


# --- by hand, and wrong -------------------------------------------------------------------------


@QUICK
@given(draw_schedules(4, 6))
def test_text_is_read_back(made: Schedule) -> None:
    rows = str(made).splitlines()
    assert parse_schedule(*rows).orders == made.orders
    rows = [" ".join(map(made.format_action, row)) for row in made.actions]
    assert parse_schedule(*rows).actions == made.actions


WRONG = [
    (["F0 F1 B0", "F0 B0 F1 B1"], "stage 0 runs F1: expected F1 B1, or F1 I1 W1"),
    (["F0 I0 F1 B1", "F0 B0 F1 B1"], "stage 0 runs F0 I0: expected"),
    (["F0 B0", "B0 F0"], "stage 1 runs B0 F0: expected"),
    (["F0 SF0 B0", "RF0 F0 B0 SB0"], "stage 0: RB0 occurs 0 times; expected 1"),
    (["SF0 F0 RB0 B0", "RF0 F0 B0 SB0"], "stage 0: SF0 comes before F0, which produces it"),
    (["F0 SF0 B0 RB0", "RF0 F0 B0 SB0"], "stage 0: RB0 comes after B0, which needs it"),
    (
        ["F0 SF0 F1 SF1 RB0 B0 RB1 B1", "RF1 RF0 F0 B0 SB0 F1 B1 SB1"],
        "stages 0 and 1 order their messages differently: message 1 from stage 0 to stage 1 is "
        "sent by SF0 and received by RF1; expected RF0",
    ),
    (
        ["F0 B0 F1 B1", "F0 F1 B0 B1"],
        r"deadlock: stages 0 and 1 wait for each other\n"
        r"  stage 0 is blocked at B0: it waits for SB0 of stage 1, which is blocked at F1\n"
        r"  stage 1 is blocked at F1: it waits for SF1 of stage 0, which is blocked at B0$",
    ),
    (
        ["F0 F1 I0 W0 I1 W1", "F0 I0 F1 I1 W0 W1", "F1 I1 W1 F0 I0 W0"],
        "deadlock: stages 1 and 2 wait for each other",  # stage 0 could go on if they did
    ),
]


@pytest.mark.parametrize(("rows", "message"), WRONG, ids=lambda x: str(x)[:40])
def test_what_is_wrong_is_named(rows: list[str], message: str) -> None:
    with pytest.raises(ValueError, match="schedule 'custom': " + message):
        validate(parse_schedule(*rows))
    if "message" not in message and not any("SF" in row for row in rows):
        with pytest.raises(ValueError, match=message):
            simulate(parse_schedule(*rows))


def test_blocking_calls_need_another_order() -> None:
    made = schedule_1f1b(2, 2)
    plain = replace(made, explicit_actions=add_messages(made, early=False))
    validate(plain)  # posted and waited for later: valid
    with pytest.raises(ValueError, match="deadlock"):
        validate(plain, blocking=True)  # both stages send, and neither receives
    gpipe = make_schedule("gpipe", 3, 4)
    validate(replace(gpipe, explicit_actions=add_messages(gpipe, early=False)), blocking=True)
