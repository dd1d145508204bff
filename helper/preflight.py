"""The preflight of an executor that starts: facts about its workers, gathered by their helper, and what they come to.

Part of the ``register`` stage, whose state queries are the proof that each worker can be reached.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from checkpoint_executor import host_facts, preflight
from checkpoint_executor.driver_states import ProcessState
from checkpoint_executor.facts import StateQuery
from checkpoint_executor.messages import ErrorInfo, Target
from checkpoint_executor.preflight import Finding, Severity

__all__ = ["inspect", "query_of", "refusal"]


def query_of(state: ProcessState | None, error: ErrorInfo | None) -> StateQuery:
    """The answer to a state query, as a fact."""
    if state is not None:
        return StateQuery(state=state.value)
    if error is None:
        return StateQuery()
    return StateQuery(code=error.code, code_name=error.code_name, message=error.message)


def inspect(
    asked: Sequence[tuple[Target, StateQuery]],
    *,
    device_kind: str,
    communication: str,
    ranks: int,
    front_door: str,
) -> tuple[Finding, ...]:
    """Every finding about these workers, this helper and the machine."""
    # vLLM forks its workers and gives them titles: the kernel then has the wrong environment for them, or none. The
    # helper was started with that of the process that forked them.
    environ = os.environ if front_door == "vllm" else None
    targets = []
    for target, query in asked:
        device = target.device or None
        try:
            targets.append(
                host_facts.collect_target(target.pid, rank=target.rank, device=device, query=query, environ=environ)
            )
        except ProcessLookupError:
            pass  # it ended: the parent sees that by itself
    facts = host_facts.collect(
        targets, device_kind=device_kind, communication=communication, ranks=ranks, front_door=front_door
    )
    return preflight.check_start(facts)


def refusal(findings: Sequence[Finding], ignored: Collection[str], error: ErrorInfo | None = None) -> ErrorInfo | None:
    """Why the executor must not start.

    Args:
        findings: all of them. ignored: names of checks that do not count. error: what a state query failed with.

    Returns:
        None if no blocker counts; otherwise ``error``, or a new one, with the blockers in its message.
    """
    blockers = [
        finding for finding in findings if finding.severity is Severity.BLOCKER and finding.check not in ignored
    ]
    if not blockers:
        return error
    message = f"the preflight found {len(blockers)} blocker(s):\n{preflight.explain(blockers)}\n"
    if error is None:
        hint = "If you know better, name the checks in ignore_preflight"
        return ErrorInfo("refused", f"{message}{hint}")
    return ErrorInfo(
        error.kind,
        f"{error.message}\n{message}",
        error_type=error.error_type,
        traceback_text=error.traceback_text,
        code=error.code,
        code_name=error.code_name,
    )
