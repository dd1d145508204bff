"""The rules of the executor, one test each, in the order of the seed's section and of ``design.md`` 4 and 5.

Each machine is checked against the invariants after every step, and once more when its test is over.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpoint_executor.config import Deadlines
from checkpoint_executor.coordinator import OWN_STAGES, VLLM_STAGES, Coordinator, Phase, StageLists
from checkpoint_executor.driver_states import ProcessState
from checkpoint_executor.messages import (
    HELPER,
    Answer,
    ArmDeadline,
    Cause,
    CauseKind,
    DeadlineClass,
    DeadlinePassed,
    DisarmDeadline,
    ErrorInfo,
    Fail,
    Ignored,
    KillEverything,
    Proceed,
    Refusal,
    Refuse,
    Replied,
    Role,
    Send,
    StartRequested,
    WakeRequested,
)
from checkpoint_executor.tags import ALL_TAGS, KV_CACHE, WEIGHTS
from tests.support.coordinator_machine import Machine, sent

ROOT = Path(__file__).parents[2]

RUNNING, LOCKED = ProcessState.RUNNING, ProcessState.LOCKED
DRIVER, HOOK = DeadlineClass.DRIVER, DeadlineClass.HOOK
WORKER_SLEEP, WORKER_WAKE = DeadlineClass.WORKER_SLEEP, DeadlineClass.WORKER_WAKE

NOT_READY = ErrorInfo("driver", "CUDA_ERROR_NOT_READY (600)", code=600, code_name="CUDA_ERROR_NOT_READY")
NO_ROOM = ErrorInfo("refused", "1 GiB is missing on gpu-0", missing_bytes=1 << 30, device="gpu-0")
BOOM = ErrorInfo("exception", "ValueError: boom", error_type="ValueError")

EVERYTHING = frozenset(ALL_TAGS)
ONLY_WEIGHTS, ONLY_KV_CACHE = frozenset({WEIGHTS}), frozenset({KV_CACHE})

BOTH_DOORS = pytest.mark.parametrize("stages", [OWN_STAGES, VLLM_STAGES], ids=["own", "vllm"])

Make = Callable[..., Machine]


@pytest.fixture
def make() -> Iterator[Make]:
    """Builds machines; whatever a test did to them, their final states must be sound."""
    machines: list[Machine] = []

    def build(ranks: int = 2, stages: StageLists = OWN_STAGES, *, undo: bool = True) -> Machine:
        machines.append(Machine(ranks, stages, undo=undo))
        return machines[-1]

    yield build
    for machine in machines:
        machine.validate()


def to_workers(cycle: int, index: int, stage: str, tags: tuple[str, ...] = ALL_TAGS, restoring: bool = False) -> Send:
    return Send(cycle, index, stage, to_helper=False, ranks=(0, 1), tags=tags, restoring=restoring)


def to_helper(
    cycle: int,
    index: int,
    stage: str,
    tags: tuple[str, ...] = ALL_TAGS,
    restoring: bool = False,
    ranks: tuple[int, ...] = (0, 1),
) -> Send:
    return Send(cycle, index, stage, to_helper=True, ranks=ranks, tags=tags, restoring=restoring)


# -- starting ----------------------------------------------------------------------------------------


def test_a_start_waits_for_every_process_then_builds_then_registers(make: Make) -> None:
    m = make()
    assert m.start() == [ArmDeadline(1, 0, DeadlineClass.START)]
    assert m.state.pending == {0, 1, HELPER}
    assert m.finish() == [
        to_workers(1, 1, "build"),
        to_helper(1, 2, "register"),
        DisarmDeadline(),
        Answer(m.request),
    ]
    assert m.phase is Phase.AWAKE


def test_under_vllm_the_workers_run_already_and_only_the_helper_connects(make: Make) -> None:
    m = make(stages=VLLM_STAGES)
    assert m.start() == [ArmDeadline(1, 0, DeadlineClass.START)]
    assert m.state.pending == {HELPER}
    assert m.finish() == [
        to_workers(1, 1, "introduce"),
        to_helper(1, 2, "register"),
        DisarmDeadline(),
        Answer(m.request),
    ]


def test_one_deadline_covers_the_whole_start(make: Make) -> None:
    m = make().awake()
    assert [i for i in m.done if isinstance(i, ArmDeadline)] == [ArmDeadline(1, 0, DeadlineClass.START)]


def test_a_second_start_is_refused(make: Make) -> None:
    m = make().awake()
    assert m.start() == [Refuse(m.request, Refusal.INVALID, "the executor was started already")]


def test_a_failed_start_kills_what_had_been_started(make: Make) -> None:
    m = make()
    m.start()
    m.run_to("build")
    cause = Cause(CauseKind.STAGE_ERROR, starting=True, stage="build", role=Role.WORKER, rank=1, error=BOOM)
    assert m.reply(1, BOOM) == [DisarmDeadline(), KillEverything(cause), Fail(m.request)]
    assert m.phase is Phase.FAILED


def test_requests_before_the_start_are_refused(make: Make) -> None:
    m = make()
    for ask in m.asks:
        (refuse,) = ask()
        assert isinstance(refuse, Refuse)
        assert refuse.refusal is Refusal.BUSY


# -- sleep and wake: the order -----------------------------------------------------------------------


def test_a_sleep_goes_down_stage_by_stage(make: Make) -> None:
    m = make().awake()
    assert m.sleep() == [ArmDeadline(2, 0, DRIVER), to_helper(2, 0, "measure_awake")]
    assert m.finish() == [
        ArmDeadline(2, 1, WORKER_SLEEP),
        to_workers(2, 1, "sleep_allocator"),
        to_workers(2, 2, "suspend_communicators"),
        to_workers(2, 3, "confirm_suspended"),
        ArmDeadline(2, 4, HOOK),
        to_workers(2, 4, "prepare_workspaces"),
        ArmDeadline(2, 5, DRIVER),
        to_helper(2, 5, "admit_sleep"),
        ArmDeadline(2, 6, DRIVER),
        to_helper(2, 6, "lock"),
        ArmDeadline(2, 7, DRIVER),
        to_helper(2, 7, "checkpoint"),
        ArmDeadline(2, 8, DRIVER),
        to_helper(2, 8, "measure_asleep"),
        DisarmDeadline(),
        Answer(m.request),
    ]
    assert m.phase is Phase.CHECKPOINTED
    assert m.state.sleeping == EVERYTHING


def test_a_wake_is_the_mirror_image(make: Make) -> None:
    m = make().asleep()
    assert m.wake() == [ArmDeadline(3, 0, DRIVER), to_helper(3, 0, "admit_wake", restoring=True)]
    assert m.finish() == [
        ArmDeadline(3, 1, DRIVER),
        to_helper(3, 1, "restore", restoring=True),
        ArmDeadline(3, 2, DRIVER),
        to_helper(3, 2, "unlock", restoring=True),
        ArmDeadline(3, 3, HOOK),
        to_workers(3, 3, "restore_workspaces", restoring=True),
        ArmDeadline(3, 4, WORKER_WAKE),
        to_workers(3, 4, "resume_communicators", restoring=True),
        to_workers(3, 5, "confirm_resumed", restoring=True),
        to_workers(3, 6, "wake_allocator", restoring=True),
        ArmDeadline(3, 7, DRIVER),
        to_helper(3, 7, "measure_woken", restoring=True),
        DisarmDeadline(),
        Answer(m.request),
    ]
    assert m.phase is Phase.AWAKE
    assert not m.state.is_sleeping


def test_under_vllm_the_workers_own_sleep_is_one_stage(make: Make) -> None:
    m = make(stages=VLLM_STAGES).awake()
    assert sent([*m.sleep(), *m.finish()]) == [
        "measure_awake",
        "worker_sleep",
        "confirm_suspended",
        "prepare_workspaces",
        "admit_sleep",
        "lock",
        "checkpoint",
        "measure_asleep",
    ]
    assert sent([*m.wake(), *m.finish()]) == [
        "admit_wake",
        "restore",
        "unlock",
        "restore_workspaces",
        "worker_wake",
        "measure_woken",
    ]


@BOTH_DOORS
def test_all_ranks_are_locked_before_any_is_checkpointed(make: Make, stages: StageLists) -> None:
    m = make(4, stages).locking()
    assert [m.reply(rank) for rank in (2, 0, 3)] == [[], [], []]
    assert sent(m.reply(1)) == ["checkpoint"]


@BOTH_DOORS
def test_all_ranks_are_restored_before_any_is_unlocked(make: Make, stages: StageLists) -> None:
    m = make(4, stages).asleep()
    m.wake()
    m.run_to("restore")
    assert [m.reply(rank) for rank in (3, 1, 0)] == [[], [], []]
    assert sent(m.reply(2)) == ["unlock"]


@BOTH_DOORS
def test_the_suspension_of_every_rank_is_confirmed_before_the_lock(make: Make, stages: StageLists) -> None:
    m = make(2, stages).awake()
    m.sleep()
    m.run_to("confirm_suspended")
    assert m.reply(0) == []
    assert sent(m.reply(1)) == ["prepare_workspaces"]


def test_a_rank_that_cannot_confirm_its_suspension_is_fatal(make: Make) -> None:
    # Seen on H200: without it lock and checkpoint succeed, and restore is NOT_SUPPORTED for ever.
    m = make().awake()
    m.sleep()
    m.run_to("confirm_suspended")
    cause = Cause(CauseKind.STAGE_ERROR, stage="confirm_suspended", role=Role.WORKER, rank=0, error=BOOM)
    assert m.reply(0, BOOM) == [DisarmDeadline(), KillEverything(cause), Fail(m.request)]


def test_workspaces_are_prepared_right_before_and_restored_right_after_the_driver() -> None:
    for stages in (OWN_STAGES, VLLM_STAGES):
        down, up = ([stage.name for stage in plan] for plan in (stages.down, stages.up))
        # Admission looks at what is left to move, and touches nothing.
        assert down[down.index("lock") - 2 : down.index("lock")] == ["prepare_workspaces", "admit_sleep"]
        assert up[up.index("unlock") + 1] == "restore_workspaces"


# -- sleep levels ------------------------------------------------------------------------------------


def test_level_0_is_a_pause_and_touches_no_device(make: Make) -> None:
    m = make().awake()
    assert m.sleep(0) == [Answer(m.request)]
    assert (m.phase, m.state.paused, m.state.is_sleeping) == (Phase.AWAKE, True, False)
    assert m.sleep(0) == [Answer(m.request, performed=False)]


def test_level_0_of_a_sleeping_executor_pauses_without_waking_it(make: Make) -> None:
    m = make().asleep()
    assert m.sleep(0) == [Answer(m.request)]
    assert (m.phase, m.state.paused) == (Phase.CHECKPOINTED, True)


@pytest.mark.parametrize("place", [Machine.new, Machine.awake, Machine.asleep, Machine.locking])
def test_level_2_is_rejected_when_requested_before_anything_is_touched(
    make: Make, place: Callable[[Machine], Machine]
) -> None:
    m = place(make())
    before = m.state
    assert m.sleep(2) == [
        Refuse(
            m.request,
            Refusal.INVALID,
            "sleep(level=2) is not supported by the checkpoint executor, which brings weights back as they were; "
            "use level 1. Nothing was touched",
        )
    ]
    assert m.state == before


@pytest.mark.parametrize("level", [-1, 3])
def test_an_unknown_level_is_rejected(make: Make, level: int) -> None:
    m = make().awake()
    assert m.sleep(level) == [
        Refuse(m.request, Refusal.INVALID, f"sleep level must be 0 or 1, not {level}. Nothing was touched")
    ]


def test_repeated_level_1_sleep_is_idempotent(make: Make) -> None:
    m = make().asleep()
    before = m.state
    assert m.sleep() == [
        Answer(m.request, performed=False, warnings=("the executor is already asleep",)),
    ]
    assert m.state == before


def test_sleep_is_a_no_op_while_weights_sleep(make: Make) -> None:
    m = make().asleep()
    m.wake(KV_CACHE)
    m.finish()
    assert (m.phase, m.state.sleeping) == (Phase.AWAKE, ONLY_WEIGHTS)
    assert m.sleep() == [
        Answer(
            m.request,
            performed=False,
            warnings=("sleep has no effect while weights are asleep: wake the remaining weights first",),
        )
    ]


def test_sleep_after_the_weights_woke_runs_a_full_cycle(make: Make) -> None:
    m = make().asleep()
    m.wake(WEIGHTS)
    m.finish()
    assert m.state.sleeping == ONLY_KV_CACHE
    assert m.sleep() == [ArmDeadline(4, 0, DRIVER), to_helper(4, 0, "measure_awake", (WEIGHTS,))]
    assert to_workers(4, 1, "sleep_allocator", (WEIGHTS,)) in m.finish()
    assert m.phase is Phase.CHECKPOINTED
    assert m.state.sleeping == EVERYTHING


# -- waking by tag -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("tag", "left"), [(WEIGHTS, KV_CACHE), (KV_CACHE, WEIGHTS)])
def test_first_partial_wake_restores_the_whole_process(make: Make, tag: str, left: str) -> None:
    m = make().asleep()
    instructions = [*m.wake(tag), *m.finish()]
    assert sent(instructions) == [stage.name for stage in OWN_STAGES.up]
    assert to_workers(3, 6, "wake_allocator", (tag,), restoring=True) in instructions
    assert (m.phase, m.state.sleeping) == (Phase.AWAKE, frozenset({left}))


def test_a_second_partial_wake_only_wakes_memory(make: Make) -> None:
    m = make().asleep()
    m.wake(WEIGHTS)
    m.finish()
    tags = (KV_CACHE,)
    assert [*m.wake(KV_CACHE), *m.finish()] == [
        ArmDeadline(4, 0, DRIVER),
        to_helper(4, 0, "admit_wake", tags),
        ArmDeadline(4, 1, WORKER_WAKE),
        to_workers(4, 1, "wake_allocator", tags),
        ArmDeadline(4, 2, DRIVER),
        to_helper(4, 2, "measure_woken", tags),
        DisarmDeadline(),
        Answer(m.request),
    ]


def test_it_is_sleeping_until_all_tags_are_awake(make: Make) -> None:
    m = make().awake()
    seen = [m.state.is_sleeping]
    asks: list[Callable[[], object]] = [m.sleep, lambda: m.wake(KV_CACHE), lambda: m.wake(WEIGHTS)]
    for ask in asks:
        ask()
        m.finish()
        seen.append(m.state.is_sleeping)
    assert seen == [False, True, True, False]


def test_waking_everything_wakes_what_still_sleeps(make: Make) -> None:
    m = make().asleep()
    m.wake(WEIGHTS)
    m.finish()
    assert m.wake() == [ArmDeadline(4, 0, DRIVER), to_helper(4, 0, "admit_wake", (KV_CACHE,))]
    assert m.finish()[-1] == Answer(m.request)


@pytest.mark.parametrize("tags", [("bogus",), (WEIGHTS, "bogus")])
@pytest.mark.parametrize("place", [Machine.awake, Machine.asleep, Machine.locking])
def test_unknown_tag_is_refused_before_anything_is_touched(
    make: Make, place: Callable[[Machine], Machine], tags: tuple[str, ...]
) -> None:
    m = place(make())
    before = m.state
    assert m.wake(*tags) == [
        Refuse(
            m.request,
            Refusal.INVALID,
            "unknown tag(s) 'bogus': known are 'weights', 'kv_cache'. Nothing was touched",
        )
    ]
    assert m.state == before


def test_an_empty_list_of_tags_is_refused(make: Make) -> None:
    m = make().asleep()
    (refuse,) = m.handle(WakeRequested(7, ()))
    assert isinstance(refuse, Refuse)
    assert refuse.refusal is Refusal.INVALID
    assert "tags is empty" in refuse.message


def test_duplicate_tags_count_once(make: Make) -> None:
    m = make().asleep()
    m.wake(WEIGHTS, WEIGHTS)
    assert m.finish()[-1] == Answer(m.request)
    assert m.state.sleeping == ONLY_KV_CACHE
    assert m.wake(WEIGHTS, WEIGHTS) == [
        Answer(m.request, performed=False, warnings=("tag 'weights' is already awake",))
    ]


def test_a_tag_that_is_awake_warns_and_the_others_wake(make: Make) -> None:
    m = make().asleep()
    m.wake(WEIGHTS)
    m.finish()
    m.wake(WEIGHTS, KV_CACHE)
    assert m.finish()[-1] == Answer(m.request, warnings=("tag 'weights' is already awake",))
    assert not m.state.is_sleeping


def test_waking_an_executor_that_is_awake_is_a_no_op(make: Make) -> None:
    m = make().awake()
    assert m.wake() == [Answer(m.request, performed=False, warnings=("the executor is not asleep",))]
    assert m.wake(KV_CACHE) == [Answer(m.request, performed=False, warnings=("tag 'kv_cache' is already awake",))]


def test_wake_up_ends_a_pause(make: Make) -> None:
    m = make().awake()
    m.sleep(0)
    assert m.wake() == [Answer(m.request)]
    assert not m.state.paused


def test_a_partial_wake_does_not_resume(make: Make) -> None:
    m = make().awake()
    m.sleep(0)
    m.sleep()
    m.finish()
    m.wake(WEIGHTS)
    m.finish()
    assert m.state.paused
    m.wake(KV_CACHE)
    m.finish()
    assert not m.state.paused


# -- release_kv_cache_memory -------------------------------------------------------------------------


def test_release_requires_a_completed_pause(make: Make) -> None:
    m = make().awake()
    assert m.release() == [
        Refuse(
            m.request,
            Refusal.ASLEEP,
            "release_kv_cache_memory needs a completed pause; call sleep(level=0) first",
        )
    ]


def test_release_discards_the_kv_cache_and_keeps_the_processes(make: Make) -> None:
    m = make().awake()
    m.sleep(0)
    tags = (KV_CACHE,)
    assert [*m.release(), *m.finish()] == [
        ArmDeadline(2, 0, DRIVER),
        to_helper(2, 0, "measure_awake", tags),
        ArmDeadline(2, 1, WORKER_SLEEP),
        to_workers(2, 1, "release_kv_cache", tags),
        ArmDeadline(2, 2, DRIVER),
        to_helper(2, 2, "measure_asleep", tags),
        DisarmDeadline(),
        Answer(m.request),
    ]
    assert (m.phase, m.state.sleeping, m.state.paused) == (Phase.AWAKE, ONLY_KV_CACHE, True)


def test_release_is_rejected_on_repeat(make: Make) -> None:
    m = make().awake()
    m.sleep(0)
    m.release()
    m.finish()
    assert m.release() == [
        Refuse(
            m.request,
            Refusal.ASLEEP,
            "release_kv_cache_memory needs all memory resident, but kv_cache sleeps; call wake_up() first",
        )
    ]


@pytest.mark.parametrize("woken", [None, WEIGHTS, KV_CACHE])
def test_release_is_rejected_in_full_sleep_and_after_a_partial_wake(make: Make, woken: str | None) -> None:
    m = make().awake()
    m.sleep(0)
    m.sleep()
    m.finish()
    if woken:
        m.wake(woken)
        m.finish()
    (refuse,) = m.release()
    assert isinstance(refuse, Refuse)
    assert refuse.refusal is Refusal.ASLEEP
    assert "needs all memory resident" in refuse.message


def test_waking_the_kv_cache_after_a_release_restores_and_resumes(make: Make) -> None:
    m = make().awake()
    m.sleep(0)
    m.release()
    m.finish()
    assert sent([*m.wake(KV_CACHE), *m.finish()]) == ["admit_wake", "wake_allocator", "measure_woken"]
    assert (m.state.sleeping, m.state.paused) == (frozenset(), False)


def test_sleep_after_a_release_runs_a_full_cycle(make: Make) -> None:
    m = make().awake()
    m.sleep(0)
    m.release()
    m.finish()
    assert sent([*m.sleep(), *m.finish()]) == [stage.name for stage in OWN_STAGES.down]
    assert m.phase is Phase.CHECKPOINTED


# -- worker calls ------------------------------------------------------------------------------------


def test_a_call_is_answered_when_its_last_rank_has(make: Make) -> None:
    m = make().awake()
    assert m.rpc() == [Proceed(m.request)]
    assert m.rpc_reply(m.request, 1) == []
    assert m.rpc_reply(m.request, 0) == [Answer(m.request)]


@pytest.mark.parametrize("execution", [False, True])
def test_calls_are_rejected_while_checkpointed(make: Make, execution: bool) -> None:
    m = make().asleep()
    assert m.rpc(execution=execution) == [
        Refuse(m.request, Refusal.ASLEEP, "the workers are checkpointed; call wake_up() first")
    ]


def test_after_a_partial_wake_only_calls_that_need_all_memory_are_rejected(make: Make) -> None:
    m = make().asleep()
    m.wake(WEIGHTS)
    m.finish()
    assert m.rpc(execution=True) == [
        Refuse(m.request, Refusal.ASLEEP, "the call needs memory that is asleep (kv_cache); call wake_up() first")
    ]
    assert m.rpc() == [Proceed(m.request)]


def test_while_paused_only_execution_is_rejected(make: Make) -> None:
    m = make().awake()
    m.sleep(0)
    assert m.rpc(execution=True) == [
        Refuse(m.request, Refusal.ASLEEP, "the executor is paused by sleep(level=0); call wake_up() first")
    ]
    assert m.rpc() == [Proceed(m.request)]


def test_nothing_else_begins_while_a_call_runs(make: Make) -> None:
    m = make().awake()
    m.rpc()
    m.rpc_reply(m.request, 0)
    for ask in m.asks:
        assert ask() == [
            Refuse(
                m.request,
                Refusal.BUSY,
                "a worker call is still running on rank(s) 1; call again when it has ended",
            )
        ]


def test_an_abandoned_call_keeps_the_executor_busy_until_its_last_rank_answers(make: Make) -> None:
    m = make().awake()
    m.rpc()
    late = m.request
    assert m.abandon(late) == []
    assert m.sleep() == [
        Refuse(
            m.request,
            Refusal.BUSY,
            "a worker call whose caller stopped waiting is still running on rank(s) 0, 1; call again when it has ended",
        )
    ]
    assert m.rpc_reply(late, 0) == []
    assert m.rpc_reply(late, 1) == []  # its caller is gone: nobody is answered
    assert sent(m.sleep()) == ["measure_awake"]


def test_abandoning_twice_or_what_does_not_run_means_nothing(make: Make) -> None:
    m = make().awake()
    assert m.abandon(7) == [Ignored("no such call in progress")]
    m.rpc()
    m.abandon(m.request)
    assert m.abandon(m.request) == [Ignored("no such call in progress")]


# -- one call at a time ------------------------------------------------------------------------------


def test_control_calls_are_serialised(make: Make) -> None:
    m = make().locking()
    before = m.state
    for ask in m.asks:
        assert ask() == [
            Refuse(
                m.request,
                Refusal.BUSY,
                "a call is in progress (sleep, stage 'lock'); wait for it, then call again",
            )
        ]
    assert m.state == before


@pytest.mark.parametrize(("cycle", "index", "rank"), [(-1, 0, 0), (1, 0, 0), (0, -1, 0), (0, 1, 0), (0, 0, 9)])
def test_a_reply_of_another_cycle_stage_or_rank_changes_nothing(make: Make, cycle: int, index: int, rank: int) -> None:
    m = make().locking()
    before = m.state
    (ignored,) = m.handle(Replied(before.cycle + cycle, before.index + index, rank, state_after=LOCKED))
    assert isinstance(ignored, Ignored)
    assert m.state == before


def test_a_repeated_reply_changes_nothing(make: Make) -> None:
    m = make().locking()
    m.reply(0)
    before = m.state
    (ignored,) = m.reply(0)
    assert isinstance(ignored, Ignored)
    assert m.state == before


# -- deadlines ---------------------------------------------------------------------------------------


def armed(m: Machine) -> list[tuple[str, DeadlineClass]]:
    """Each deadline of the last cycle and the stage with which it began."""
    names = {i.index: i.stage for i in m.done if isinstance(i, Send) and i.cycle == m.state.cycle}
    return [(names[i.index], i.deadline) for i in m.done if isinstance(i, ArmDeadline) and i.cycle == m.state.cycle]


def test_the_deadlines_are_the_seeds() -> None:
    seconds = Deadlines().seconds
    assert seconds(DRIVER) == 30.0
    assert Deadlines().driver_lock_s == 10.0
    assert [seconds(deadline) for deadline in (WORKER_SLEEP, WORKER_WAKE, HOOK)] == [120.0] * 3


@BOTH_DOORS
def test_driver_stages_have_30_s_each(make: Make, stages: StageLists) -> None:
    m = make(2, stages).asleep()
    assert [stage for stage in armed(m) if stage[1] is DRIVER] == [
        ("measure_awake", DRIVER),
        ("admit_sleep", DRIVER),
        ("lock", DRIVER),
        ("checkpoint", DRIVER),
        ("measure_asleep", DRIVER),
    ]
    m.wake()
    m.finish()
    assert [stage for stage in armed(m) if stage[1] is DRIVER] == [
        ("admit_wake", DRIVER),
        ("restore", DRIVER),
        ("unlock", DRIVER),
        ("measure_woken", DRIVER),
    ]


def test_the_120_s_cover_the_whole_worker_sleep(make: Make) -> None:
    m = make().asleep()
    assert [stage for stage in armed(m) if stage[1] is WORKER_SLEEP] == [("sleep_allocator", WORKER_SLEEP)]
    m = make(stages=VLLM_STAGES).asleep()
    assert [stage for stage in armed(m) if stage[1] is WORKER_SLEEP] == [("worker_sleep", WORKER_SLEEP)]


def test_the_120_s_cover_the_whole_worker_wake(make: Make) -> None:
    m = make().asleep()
    m.wake()
    m.finish()
    assert [stage for stage in armed(m) if stage[1] is WORKER_WAKE] == [("resume_communicators", WORKER_WAKE)]


@BOTH_DOORS
def test_workspace_hooks_have_a_deadline_of_their_own(make: Make, stages: StageLists) -> None:
    m = make(2, stages).asleep()
    assert [stage for stage in armed(m) if stage[1] is HOOK] == [("prepare_workspaces", HOOK)]
    m.wake()
    m.finish()
    assert [stage for stage in armed(m) if stage[1] is HOOK] == [("restore_workspaces", HOOK)]


def test_a_deadline_holds_against_partial_answers(make: Make) -> None:
    m = make(4).locking()
    for rank in (0, 2, 3):
        m.reply(rank)
    cause = Cause(CauseKind.DEADLINE, stage="lock", deadline=DRIVER, pending=(1,))
    assert m.deadline() == [DisarmDeadline(), KillEverything(cause), Fail(m.request)]
    assert m.phase is Phase.FAILED


def test_a_shared_deadline_names_the_stage_that_was_late(make: Make) -> None:
    m = make().awake()
    m.sleep()
    m.run_to("confirm_suspended")
    cause = Cause(CauseKind.DEADLINE, stage="confirm_suspended", deadline=WORKER_SLEEP, pending=(0, 1))
    assert m.deadline() == [DisarmDeadline(), KillEverything(cause), Fail(m.request)]


def test_a_deadline_of_a_stage_that_is_over_changes_nothing(make: Make) -> None:
    m = make().locking()
    before = m.state
    (ignored,) = m.handle(DeadlinePassed(before.cycle, before.armed - 1))
    assert isinstance(ignored, Ignored)
    assert m.state == before


# -- failures before the point of no return ----------------------------------------------------------


def test_failed_lock_is_undone_in_mirror_order(make: Make) -> None:
    m = make().locking()
    assert m.reply(1, NOT_READY, RUNNING) == []  # every rank is heard first
    assert m.reply(0) == [ArmDeadline(3, 0, DRIVER), to_helper(3, 0, "unlock", ranks=(0,))]
    assert m.phase is Phase.UNDOING
    assert m.finish() == [
        ArmDeadline(3, 1, HOOK),
        to_workers(3, 1, "restore_workspaces"),
        ArmDeadline(3, 2, WORKER_WAKE),
        to_workers(3, 2, "resume_communicators"),
        to_workers(3, 3, "confirm_resumed"),
        to_workers(3, 4, "wake_allocator"),
        DisarmDeadline(),
        Refuse(
            m.request,
            Refusal.UNDONE,
            "the driver could not lock every rank (rank 1: CUDA_ERROR_NOT_READY (600)). The sleep was undone: the "
            "executor is awake and serves on; the KV cache's contents are lost, as in any sleep",
            errors=((1, NOT_READY),),
            stage="lock",
        ),
    ]
    assert (m.phase, m.state.is_sleeping) == (Phase.AWAKE, False)
    assert m.rpc(execution=True) == [Proceed(m.request)]


@pytest.mark.parametrize("undo", [True, False])
def test_a_sleep_that_is_not_admitted_is_undone_before_any_lock(make: Make, undo: bool) -> None:
    """Also where a failed lock is fatal: admission looks and touches nothing."""
    m = make(undo=undo).awake()
    m.sleep()
    m.run_to("admit_sleep")
    refused = ErrorInfo("refused", "host memory lacks 7 bytes", missing_bytes=7, device="host")
    assert m.reply(1, refused) == []  # every rank is heard first
    assert m.reply(0) == [ArmDeadline(3, 0, HOOK), to_workers(3, 0, "restore_workspaces")]
    assert sent(m.finish()) == ["resume_communicators", "confirm_resumed", "wake_allocator"]
    assert (m.phase, m.state.is_sleeping) == (Phase.AWAKE, False)


def test_an_undo_with_no_rank_locked_unlocks_nobody(make: Make) -> None:
    m = make().locking()
    m.reply(0, NOT_READY, RUNNING)
    assert m.reply(1, NOT_READY, RUNNING) == [ArmDeadline(3, 1, HOOK), to_workers(3, 1, "restore_workspaces")]


def test_a_rank_that_failed_but_reads_as_locked_is_unlocked_too(make: Make) -> None:
    m = make().locking()
    m.reply(0, NOT_READY, LOCKED)
    assert m.reply(1) == [ArmDeadline(3, 0, DRIVER), to_helper(3, 0, "unlock", ranks=(0, 1))]


def test_an_undo_wakes_only_what_the_sleep_had_put_to_sleep(make: Make) -> None:
    m = make().awake()
    m.sleep(0)
    m.release()
    m.finish()
    m.sleep()
    m.run_to("lock")
    m.reply(0, NOT_READY, RUNNING)
    m.reply(1, NOT_READY, RUNNING)
    assert to_workers(4, 4, "wake_allocator", (WEIGHTS,)) in m.finish()
    assert (m.state.sleeping, m.state.paused) == (ONLY_KV_CACHE, True)


def test_under_vllm_an_undone_sleep_stays_an_ordinary_sleep_until_wake_up(make: Make) -> None:
    m = make(stages=VLLM_STAGES).locking()
    m.reply(0)
    assert sent([*m.reply(1, NOT_READY, RUNNING), *m.finish()]) == ["unlock", "restore_workspaces"]
    refuse = m.done[-1]
    assert isinstance(refuse, Refuse)
    assert refuse.refusal is Refusal.UNDONE
    assert "in ordinary level-1 sleep, and its scheduler is paused: call wake_up()" in refuse.message
    assert (m.phase, m.state.sleeping) == (Phase.AWAKE, EVERYTHING)
    # A success would say that the device is empty, and it is not.
    m.sleep()
    again = m.done[-1]
    assert isinstance(again, Refuse)
    assert again.refusal is Refusal.UNDONE
    assert "the last sleep was undone" in again.message
    assert (m.phase, m.state.sleeping) == (Phase.AWAKE, EVERYTHING)
    assert sent([*m.wake(), *m.finish()]) == ["admit_wake", "worker_wake", "measure_woken"]
    assert not m.state.is_sleeping


def test_undo_is_the_default() -> None:
    assert Coordinator(1).undo_before_checkpoint


def test_without_undo_a_failed_lock_kills(make: Make) -> None:
    m = make(undo=False).locking()
    cause = Cause(CauseKind.STAGE_ERROR, stage="lock", role=Role.HELPER, rank=0, error=NOT_READY, state_after=RUNNING)
    assert m.reply(0, NOT_READY, RUNNING) == [DisarmDeadline(), KillEverything(cause), Fail(m.request)]


@pytest.mark.parametrize("state", [None, ProcessState.CHECKPOINTED, ProcessState.FAILED])
def test_a_failed_lock_with_an_unknown_state_kills(make: Make, state: ProcessState | None) -> None:
    m = make().locking()
    cause = Cause(CauseKind.STAGE_ERROR, stage="lock", role=Role.HELPER, rank=0, error=NOT_READY, state_after=state)
    assert m.reply(0, NOT_READY, state) == [DisarmDeadline(), KillEverything(cause), Fail(m.request)]


def test_an_error_in_an_undo_kills_and_names_what_was_being_undone(make: Make) -> None:
    m = make().locking()
    m.reply(0, NOT_READY, RUNNING)
    m.reply(1)
    m.run_to("restore_workspaces")
    cause = Cause(
        CauseKind.STAGE_ERROR, stage="restore_workspaces", role=Role.WORKER, rank=1, error=BOOM, undoing=NOT_READY
    )
    assert m.reply(1, BOOM) == [DisarmDeadline(), KillEverything(cause), Fail(m.request)]


def test_a_deadline_in_an_undo_kills(make: Make) -> None:
    m = make().locking()
    m.reply(0, NOT_READY, RUNNING)
    m.reply(1)
    cause = Cause(CauseKind.DEADLINE, stage="unlock", deadline=DRIVER, pending=(1,), undoing=NOT_READY)
    assert m.deadline() == [DisarmDeadline(), KillEverything(cause), Fail(m.request)]


def test_an_executor_can_sleep_after_an_undone_sleep(make: Make) -> None:
    m = make().locking()
    m.reply(0, NOT_READY, RUNNING)
    m.reply(1)
    m.finish()
    m.sleep()
    assert m.finish()[-1] == Answer(m.request)
    assert m.phase is Phase.CHECKPOINTED


# -- failures from the point of no return on ---------------------------------------------------------


@BOTH_DOORS
def test_a_failed_checkpoint_kills(make: Make, stages: StageLists) -> None:
    m = make(2, stages).locking()
    m.finish_stage()
    assert m.stage == "checkpoint"
    error = ErrorInfo("driver", "CUDA_ERROR_NOT_SUPPORTED (801)", code=801)
    cause = Cause(CauseKind.STAGE_ERROR, stage="checkpoint", role=Role.HELPER, rank=0, error=error, state_after=LOCKED)
    assert m.reply(0, error, LOCKED) == [DisarmDeadline(), KillEverything(cause), Fail(m.request)]
    assert m.phase is Phase.FAILED


@pytest.mark.parametrize("stage", ["restore", "unlock", "restore_workspaces", "resume_communicators", "wake_allocator"])
def test_a_failed_wake_kills_rather_than_serving_with_a_partial_set(make: Make, stage: str) -> None:
    m = make().asleep()
    m.wake()
    m.run_to(stage)
    m.reply(0)
    disarm, kill, fail = m.reply(1, BOOM)
    assert (disarm, fail) == (DisarmDeadline(), Fail(m.request))
    assert isinstance(kill, KillEverything)
    assert (kill.cause.stage, kill.cause.rank) == (stage, 1)


@pytest.mark.parametrize("verb", ["lock", "checkpoint", "restore", "unlock"])
def test_a_verb_whose_state_could_not_be_read_back_did_not_succeed(make: Make, verb: str) -> None:
    m = make().awake()
    m.sleep()
    if verb in ("restore", "unlock"):
        m.finish()
        m.wake()
    m.run_to(verb)
    _, kill, _ = m.handle(Replied(m.state.cycle, m.state.index, 0))
    assert isinstance(kill, KillEverything)
    assert kill.cause.error == ErrorInfo(
        "driver", f"{verb} reported success, but the state of the process could not be read"
    )


def test_a_lock_that_succeeded_but_reads_as_running_is_an_error_that_can_be_undone(make: Make) -> None:
    m = make().locking()
    assert m.reply(0, state=RUNNING) == []
    assert m.reply(1) == [ArmDeadline(3, 0, DRIVER), to_helper(3, 0, "unlock", ranks=(1,))]
    refuse = m.finish()[-1]
    assert isinstance(refuse, Refuse)
    assert refuse.errors == (
        (0, ErrorInfo("driver", "lock reported success, but the state of the process is running")),
    )


@pytest.mark.parametrize("rank", [0, HELPER])
@pytest.mark.parametrize("place", [Machine.awake, Machine.asleep, Machine.locking])
def test_a_death_kills_at_once_whatever_is_going_on(make: Make, place: Callable[[Machine], Machine], rank: int) -> None:
    m = place(make())
    working = m.stage is not None
    cause = Cause(
        CauseKind.PROCESS_EXIT,
        stage=m.stage,
        role=Role.HELPER if rank == HELPER else Role.WORKER,
        rank=rank,
        exit_status=-9,
    )
    assert m.exit(rank, -9) == [
        *([DisarmDeadline()] if working else []),
        KillEverything(cause),
        *([Fail(m.request)] if working else []),
    ]
    assert m.phase is Phase.FAILED


def test_a_death_fails_the_call_that_was_running(make: Make) -> None:
    m = make().awake()
    m.rpc()
    _, fail = m.exit(0, 1)
    assert fail == Fail(m.request)


def test_a_death_fails_no_call_that_was_abandoned(make: Make) -> None:
    m = make().awake()
    m.rpc()
    m.abandon(m.request)
    (kill,) = m.exit(0, 1)
    assert isinstance(kill, KillEverything)


def test_after_a_fatal_error_every_call_fails_and_nothing_is_retried(make: Make) -> None:
    m = make().asleep()
    m.exit(0, -9)
    before = m.state
    for ask in m.asks:
        assert ask() == [Fail(m.request)]
    assert m.sleep(2) == [Fail(m.request)]
    assert m.wake("bogus") == [Fail(m.request)]
    assert m.shutdown() == [Answer(m.request, performed=False)]
    assert m.exit(1, -9) == [Ignored("expected after SIGKILL")]
    assert m.state == before


def test_a_reading_for_the_report_may_fail(make: Make) -> None:
    m = make().awake()
    m.sleep()
    assert m.reply(0, BOOM) == []
    assert sent(m.reply(1)) == ["sleep_allocator"]


# -- admission ---------------------------------------------------------------------------------------


def test_a_restore_that_would_not_fit_is_refused_before_any_rank_is_touched(make: Make) -> None:
    m = make().asleep()
    m.wake()
    assert m.reply(0, NO_ROOM) == []
    assert m.reply(1) == [
        DisarmDeadline(),
        Refuse(
            m.request,
            Refusal.NO_MEMORY,
            "rank 0: 1 GiB is missing on gpu-0",
            errors=((0, NO_ROOM),),
            stage="admit_wake",
        ),
    ]
    assert (m.phase, m.state.sleeping) == (Phase.CHECKPOINTED, EVERYTHING)


def test_a_refused_wake_can_be_tried_again(make: Make) -> None:
    m = make().asleep()
    m.wake()
    m.reply(0, NO_ROOM)
    m.reply(1, NO_ROOM)
    m.wake()
    assert m.finish()[-1] == Answer(m.request)
    assert m.phase is Phase.AWAKE


def test_a_refused_second_partial_wake_leaves_the_processes_running(make: Make) -> None:
    m = make().asleep()
    m.wake(WEIGHTS)
    m.finish()
    m.wake(KV_CACHE)
    m.reply(0)
    m.reply(1, NO_ROOM)
    assert (m.phase, m.state.sleeping) == (Phase.AWAKE, ONLY_KV_CACHE)


# -- shutdown ----------------------------------------------------------------------------------------


def test_shutdown_of_an_awake_executor_is_an_orderly_exit(make: Make) -> None:
    m = make().awake()
    assert m.shutdown() == [
        Send(2, 0, "exit", to_helper=False, ranks=(0, 1)),
        Send(2, 0, "exit", to_helper=True, ranks=(HELPER,)),
        ArmDeadline(2, 0, DeadlineClass.SHUTDOWN),
    ]
    assert [m.exit(rank) for rank in (1, HELPER)] == [[], []]
    assert m.exit(0) == [DisarmDeadline(), Answer(m.request)]
    assert m.phase is Phase.CLOSED


def test_an_orderly_exit_that_takes_too_long_ends_in_a_kill(make: Make) -> None:
    m = make().awake()
    m.shutdown()
    m.exit(0)
    assert m.deadline() == [DisarmDeadline(), KillEverything(Cause(CauseKind.SHUTDOWN)), Answer(m.request)]
    assert m.phase is Phase.CLOSED


def test_shutdown_of_a_sleeping_executor_kills_without_restore(make: Make) -> None:
    m = make().asleep()
    assert m.shutdown() == [KillEverything(Cause(CauseKind.SHUTDOWN)), Answer(m.request)]
    assert m.phase is Phase.CLOSED


def test_shutdown_in_the_middle_of_a_call_kills_and_fails_it(make: Make) -> None:
    m = make().locking()
    sleeping = m.request
    assert m.shutdown() == [
        DisarmDeadline(),
        KillEverything(Cause(CauseKind.SHUTDOWN, stage="lock")),
        Fail(sleeping),
        Answer(m.request),
    ]


def test_shutdown_while_a_worker_call_runs_kills_and_fails_it(make: Make) -> None:
    m = make().awake()
    m.rpc()
    call = m.request
    assert m.shutdown() == [KillEverything(Cause(CauseKind.SHUTDOWN)), Fail(call), Answer(m.request)]


def test_shutdown_before_the_start_and_after_the_end_has_nothing_to_do(make: Make) -> None:
    m = make()
    assert m.shutdown() == [Answer(m.request, performed=False)]
    assert m.phase is Phase.CLOSED
    assert m.shutdown() == [Answer(m.request, performed=False)]


def test_a_second_shutdown_is_refused_while_the_first_runs(make: Make) -> None:
    m = make().awake()
    m.shutdown()
    assert m.shutdown() == [Refuse(m.request, Refusal.BUSY, "the executor is already shutting down")]


def test_a_process_that_exits_twice_is_counted_once(make: Make) -> None:
    m = make().awake()
    m.shutdown()
    m.exit(0)
    before = m.state
    (ignored,) = m.exit(0)
    assert isinstance(ignored, Ignored)
    assert m.state == before


def test_after_shutdown_every_call_is_refused(make: Make) -> None:
    m = make().asleep()
    m.shutdown()
    for ask in m.asks:
        assert ask() == [Refuse(m.request, Refusal.CLOSED, "the executor was shut down; build a new one")]


# -- the story ---------------------------------------------------------------------------------------


def test_the_story_tells_what_happened_and_not_what_was_ignored(make: Make) -> None:
    m = make(1)
    m.start()
    m.handle(Replied(9, 9, 9))
    m.reply(0)
    m.exit(HELPER, -9)
    assert list(m.coordinator.story) == [
        f"{StartRequested(1)!r} [new -> starting]",
        "Replied(cycle=1, index=0, rank=0, ok) [starting]",
        "ProcessExited(role=<Role.HELPER: 'helper'>, rank=-1, exit_status=-9) [starting -> failed]",
    ]


def test_the_story_has_a_bound(make: Make) -> None:
    m = make().awake()
    for _ in range(50):
        m.sleep(0)
        m.wake()
    assert len(m.coordinator.story) == 64


# -- the drawings ------------------------------------------------------------------------------------


def _diagrams(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "scripts" / "make_state_diagrams.py"
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_the_state_diagrams_are_those_of_the_tables() -> None:
    result = _diagrams("--check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_stale_state_diagrams_are_noticed(tmp_path: Path) -> None:
    page = tmp_path / "state-diagrams.md"
    assert _diagrams("--check", "--output", str(page)).returncode == 1
    assert _diagrams("--output", str(page)).returncode == 0
    assert _diagrams("--check", "--output", str(page)).returncode == 0
    page.write_text(page.read_text() + "edited by hand\n")
    assert _diagrams("--check", "--output", str(page)).returncode == 1
