"""The communication configurations: what is accepted, what is refused, and that everything is said at once."""

from __future__ import annotations

import pytest

from checkpoint_executor.communication import (
    SOCKET,
    SUSPEND,
    check_environment,
    detect_communication,
    required_settings,
    worker_environment,
)

#: The two environments of the sleep-mode page, verbatim.
SEED_SUSPEND = {
    "NCCL_IB_DISABLE": "1",
    "NCCL_CUMEM_ENABLE": "1",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "1",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
}
SEED_SOCKET = {
    **SEED_SUSPEND,
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}


@pytest.mark.parametrize("vllm", [False, True])
@pytest.mark.parametrize(("communication", "environ"), [(SUSPEND, SEED_SUSPEND), (SOCKET, SEED_SOCKET)])
def test_both_environments_of_the_seed_pass_verbatim(communication: str, environ: dict[str, str], vllm: bool) -> None:
    assert check_environment(communication, 2, environ, vllm=vllm) == ((), ())
    assert detect_communication(environ) == communication


@pytest.mark.parametrize("communication", [SUSPEND, SOCKET])
def test_one_rank_needs_nothing(communication: str) -> None:
    assert check_environment(communication, 1, {}, vllm=True) == ((), ())
    assert worker_environment(communication, 1, {}) == {}
    assert required_settings(communication, 1) == ()


@pytest.mark.parametrize("communication", [SUSPEND, SOCKET])
def test_our_own_workers_get_an_environment_that_is_accepted(communication: str) -> None:
    added = worker_environment(communication, 4, {})
    assert check_environment(communication, 4, added) == ((), ())
    assert detect_communication(added) == communication
    # Unset is not the default, so what they get is complete.
    assert {setting.name for setting in required_settings(communication, 4)} <= set(added)
    assert added["NCCL_GRAPH_REGISTER"] == "0"


def test_the_two_configurations_exclude_each_other() -> None:
    assert check_environment(SUSPEND, 2, worker_environment(SOCKET, 2, {}))[0]
    assert check_environment(SOCKET, 2, worker_environment(SUSPEND, 2, {}))[0]
    assert detect_communication({}) is None


def test_all_conflicts_are_reported_at_once() -> None:
    environ = {
        "NCCL_NVLS_ENABLE": "2",
        "NCCL_CUMEM_HOST_ENABLE": "1",
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_DISABLE_MEM_MANAGER": "1",
        "NCCL_IB_DISABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "0",
        "NVSHMEM_DISABLE_NVLS": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:1",
    }
    problems, _ = check_environment(SUSPEND, 2, environ)
    assert len(problems) == len(environ)
    for name in environ:
        assert any(name in problem for problem in problems)


def test_expandable_segments_are_refused_for_one_rank_too() -> None:
    assert check_environment(SUSPEND, 1, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})[0]
    assert not check_environment(SUSPEND, 1, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"})[0]


def test_an_explicit_graph_register_is_kept_with_a_warning() -> None:
    environ = {"NCCL_GRAPH_REGISTER": "1"}
    problems, warnings = check_environment(SUSPEND, 2, environ)
    assert not problems
    assert "NCCL_GRAPH_REGISTER=1" in warnings[0]
    assert "NCCL_GRAPH_REGISTER" not in worker_environment(SUSPEND, 2, environ)
    assert check_environment(SUSPEND, 2, {"NCCL_GRAPH_REGISTER": "0"}) == ((), ())


def test_the_memory_manager_matters_only_where_something_is_suspended() -> None:
    assert check_environment(SUSPEND, 2, {"NCCL_DISABLE_MEM_MANAGER": "1"})[0]
    assert not check_environment(SUSPEND, 2, {"NCCL_DISABLE_MEM_MANAGER": "0"})[0]
    assert not check_environment(SOCKET, 2, {"NCCL_DISABLE_MEM_MANAGER": "1"})[0]


@pytest.mark.parametrize("name", ["NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"])
@pytest.mark.parametrize("value", ["0", "1"])
def test_suspend_leaves_the_transport_to_nccl(name: str, value: str) -> None:
    assert check_environment(SUSPEND, 2, {name: value}) == ((), ())


def test_numbers_are_read_as_nccl_reads_them() -> None:
    assert not check_environment(SUSPEND, 2, {"NCCL_CUMEM_ENABLE": " 01 "})[0]
    # -2 is NCCL's "automatic", and so not a choice.
    assert check_environment(SUSPEND, 2, {"NCCL_CUMEM_ENABLE": "-2"})[0]
    assert not check_environment(SUSPEND, 2, {"NCCL_CUMEM_ENABLE": ""})[0]


def test_vllm_must_have_everything_set_since_its_defaults_are_others() -> None:
    problems, _ = check_environment(SUSPEND, 2, {}, vllm=True)
    for name in SEED_SUSPEND:
        assert any(name in problem for problem in problems) or name == "VLLM_FLASHINFER_ALLREDUCE_BACKEND"
    for name in SEED_SUSPEND:
        environ = {key: value for key, value in SEED_SUSPEND.items() if key != name}
        assert len(check_environment(SUSPEND, 2, environ, vllm=True)[0]) == 1


@pytest.mark.parametrize(
    ("communication", "changes"),
    [
        (SUSPEND, {"VLLM_FLASHINFER_ALLREDUCE_BACKEND": "mnnvl"}),
        (SUSPEND, {"VLLM_FLASHINFER_ALLREDUCE_BACKEND": "auto"}),
        # The compile pass uses the backend even then.
        (SUSPEND, {"VLLM_ALLREDUCE_USE_FLASHINFER": "0", "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "mnnvl"}),
        (SOCKET, {"VLLM_ALLREDUCE_USE_FLASHINFER": "1"}),
    ],
)
def test_flashinfer_is_refused_where_it_multicasts_or_shares(communication: str, changes: dict[str, str]) -> None:
    environ = {**(SEED_SUSPEND if communication == SUSPEND else SEED_SOCKET), **changes}
    assert len(check_environment(communication, 2, environ, vllm=True)[0]) == 1


def test_vllm_may_run_without_flashinfer() -> None:
    environ = {**SEED_SUSPEND, "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
    assert check_environment(SUSPEND, 2, environ, vllm=True) == ((), ())


def test_an_unknown_configuration_is_a_problem_and_not_an_exception() -> None:
    problems, _ = check_environment("multicast", 2, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert len(problems) == 2
    with pytest.raises(ValueError, match="multicast"):
        worker_environment("multicast", 2, {})
