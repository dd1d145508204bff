"""What a user may set for the executor under vLLM, and which versions it takes. Needs no vLLM."""

from __future__ import annotations

import pytest

from checkpoint_executor import ConfigError, process_tree
from checkpoint_executor.vllm.settings import parse_settings
from checkpoint_executor.vllm.versions import require_supported, version_note


def test_the_defaults_are_the_seeds() -> None:
    settings, problems = parse_settings({"PATH": "/bin", "VLLM_X": "1"})
    assert problems == []
    deadlines = settings.deadlines
    assert (deadlines.driver_s, deadlines.driver_lock_s) == (30, 10)
    assert (deadlines.worker_sleep_s, deadlines.worker_wake_s, deadlines.hook_s) == (120, 120, 120)
    assert settings.undo_before_checkpoint
    assert settings.release_local_memory
    assert not settings.attribution


def test_every_setting_is_taken() -> None:
    settings, problems = parse_settings(
        {
            "CHECKPOINT_EXECUTOR_LOG": "/tmp/log",
            "CHECKPOINT_EXECUTOR_RUNTIME_DIR": "/run/x",
            "CHECKPOINT_EXECUTOR_HOST_ARENA": "1",
            "CHECKPOINT_EXECUTOR_UNDO_BEFORE_CHECKPOINT": "0",
            "CHECKPOINT_EXECUTOR_RELEASE_LOCAL_MEMORY": "0",
            "CHECKPOINT_EXECUTOR_ATTRIBUTION": "1",
            "CHECKPOINT_EXECUTOR_WAKE_MARGIN_MIB": "7",
            "CHECKPOINT_EXECUTOR_DRIVER_S": "60",
            "CHECKPOINT_EXECUTOR_HOOK_S": "2.5",
        }
    )
    assert problems == []
    assert (settings.log, settings.runtime_dir, settings.host_arena) == ("/tmp/log", "/run/x", True)
    assert (settings.undo_before_checkpoint, settings.wake_margin_mib) == (False, 7)
    assert not settings.release_local_memory
    assert settings.attribution
    assert (settings.deadlines.driver_s, settings.deadlines.hook_s) == (60, 2.5)


def test_everything_that_is_wrong_is_named() -> None:
    _, problems = parse_settings(
        {
            "CHECKPOINT_EXECUTOR_DRIVER_S": "soon",
            "CHECKPOINT_EXECUTOR_HOOK_S": "-1",
            "CHECKPOINT_EXECUTOR_HOST_ARENA": "yes",
            "CHECKPOINT_EXECUTOR_WAKE_MARGIN_MIB": "-3",
            "CHECKPOINT_EXECUTOR_HOOKS_S": "1",
            "CHECKPOINT_EXECUTOR_COLOUR": "red",
        }
    )
    text = "\n".join(problems)
    assert len(problems) == 6
    assert "CHECKPOINT_EXECUTOR_HOOKS_S is not a setting; did you mean CHECKPOINT_EXECUTOR_HOOK_S?" in text
    assert "CHECKPOINT_EXECUTOR_COLOUR is not a setting; known are" in text


def test_a_deadline_that_is_vllms_is_not_silently_ignored() -> None:
    _, problems = parse_settings({"CHECKPOINT_EXECUTOR_SHUTDOWN_S": "1"})
    assert problems == [
        "CHECKPOINT_EXECUTOR_SHUTDOWN_S has no effect under vLLM; set VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"
    ]


def test_a_lock_timeout_beyond_its_stage_is_refused() -> None:
    _, problems = parse_settings({"CHECKPOINT_EXECUTOR_DRIVER_LOCK_S": "40"})
    assert len(problems) == 1
    assert "must be below" in problems[0]


def test_variables_of_other_parts_of_the_project_pass() -> None:
    others = ("CHECKPOINT_EXECUTOR_SOFTGPU_ROOT", "CHECKPOINT_EXECUTOR_VENV", process_tree.MARKER)
    assert parse_settings(dict.fromkeys(others, "x"))[1] == []


@pytest.mark.parametrize("version", ["0.30.0", "0.27.1", "0.9.2"])
def test_an_old_vllm_is_refused_by_name(version: str) -> None:
    with pytest.raises(ConfigError, match=f"vLLM {version} is not supported .* needs 0.31 or later"):
        require_supported(version)


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0", "0.34.0rc1", "1.0.0", "0.1.dev1+g12", "dev"])
def test_others_are_accepted(version: str) -> None:
    require_supported(version)


def test_what_was_not_tested_is_said() -> None:
    assert version_note("0.33.0") is None
    assert "newer" in str(version_note("0.35.0"))
    assert "not a release" in str(version_note("dev"))
