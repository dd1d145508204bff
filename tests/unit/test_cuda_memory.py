"""The CUDA backend's memory over a stub driver: everything but kernels and torch. ``tests/gpu`` has the real device."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint_executor.workers import cuda_pool
from tests.support import cuda_scenarios as scenarios
from tests.support.cuda_stub import CudaStub, build_stub


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> CudaStub:
    return build_stub(tmp_path_factory.mktemp("stub"))


@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.a_cycle_keeps_bytes_and_addresses,
        scenarios.the_backup_is_exactly_the_bytes_of_the_allocations,
        scenarios.unchanged_weights_are_not_copied_again,
        scenarios.without_a_hasher_everything_is_copied,
        scenarios.a_copy_that_breaks_off_is_never_taken_for_a_backup,
        scenarios.an_update_after_a_partial_wake_comes_back,
        scenarios.two_swapped_tensors_come_back_swapped,
        scenarios.every_single_flipped_byte_comes_back,
        scenarios.a_new_or_freed_or_resized_allocation_is_copied_and_the_rest_with_it,
        scenarios.a_backup_that_is_not_retained_is_given_back_and_copied_anew,
        scenarios.the_arena_is_kept_and_grows_only_when_more_is_needed,
        scenarios.preparing_the_backup_of_sleeping_weights_loses_nothing,
        scenarios.a_wake_without_room_leaves_everything_asleep_and_can_be_repeated,
        scenarios.a_wake_that_breaks_off_leaves_everything_asleep_and_can_be_repeated,
        scenarios.a_sleep_without_host_memory_leaves_everything_resident_and_can_be_repeated,
        scenarios.an_allocation_without_room_takes_nothing,
        scenarios.small_allocations_share_memory_and_give_it_back,
        scenarios.a_sleeping_tag_takes_no_allocation_and_no_access,
        scenarios.release_drops_the_cache_alone,
        scenarios.a_workspace_gives_peer_memory_up_and_comes_back_at_its_addresses,
        scenarios.local_memory_is_given_back_and_got_again_as_large_as_it_was,
        scenarios.local_memory_for_which_there_is_no_room_can_be_asked_for_again,
        scenarios.local_memory_that_the_driver_keeps_costs_no_sleep,
        scenarios.a_device_is_named_as_nvml_names_it,
        scenarios.the_arena_stays_out_of_children_and_is_zero_at_first,
        scenarios.a_failed_call_says_what_it_was,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_over_the_stub(stub: CudaStub, scenario: Callable[[], None]) -> None:
    stub.run(scenario)


@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.the_callbacks_hold_under_threads,
        scenarios.the_callbacks_run_while_another_thread_holds_the_gil,
        scenarios.the_page_of_the_callbacks_is_never_writable_and_executable,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_pool(stub: CudaStub, scenario: Callable[[], None]) -> None:
    stub.run(scenario)


def test_the_pools_source_compiles_to_code_that_behaves_the_same(stub: CudaStub, tmp_path: Path) -> None:
    if not all(shutil.which(tool) for tool in ("gcc", "objcopy", "nm")):
        pytest.skip("binutils are needed to compile the callbacks")
    source, compiled, binary = tmp_path / "callbacks.c", tmp_path / "callbacks.o", tmp_path / "callbacks.bin"
    source.write_text(cuda_pool.SOURCE)
    subprocess.run(["gcc", *cuda_pool.COMPILER_OPTIONS.split(), "-c", source, "-o", compiled], check=True)
    subprocess.run(["objcopy", "-O", "binary", "-j", ".text", compiled, binary], check=True)
    symbols = subprocess.run(["nm", compiled], check=True, capture_output=True, text=True).stdout
    offsets = {name: int(value, 16) for value, _, name in (line.split() for line in symbols.splitlines())}
    stub.run(
        scenarios.the_compiled_source_holds_as_well,
        str(binary),
        str(offsets["pool_alloc"]),
        str(offsets["pool_free"]),
    )
    version = subprocess.run(["gcc", "-dumpfullversion"], check=True, capture_output=True, text=True).stdout.strip()
    if version.startswith("12.2."):
        # The compiler that made them: then they are the same bytes.
        assert binary.read_bytes() == cuda_pool._CODE
        assert (offsets["pool_alloc"], offsets["pool_free"]) == (cuda_pool._ALLOC_OFFSET, cuda_pool._FREE_OFFSET)
