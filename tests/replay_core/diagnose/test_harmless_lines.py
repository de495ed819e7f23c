"""What stands in logs of runs that are well and was taken for a fault, each beside what is one."""

from __future__ import annotations

from pathlib import Path

from tests.replay_core.diagnose.logs import diagnosed, only, part_of, told, trl, verl, worrying


def _skyrl(steps: int, scoring: float) -> str:
    """SkyRL's lines: what an update logs without a number, and then pprint's mapping of the step."""
    prefix = "(skyrl_entrypoint pid=88102) "
    return "".join(
        f"{prefix}2026-04-22 05:45:48.881 | INFO     | trainer:train:497 - {{'final_loss': -0.0024, 'grad_norm': 0.15}}\n"
        f"{prefix}step:{n} - {{'loss/avg_final_rewards': '{0.2 + 0.01 * n}',\n"
        f"{prefix} 'policy/grad_norm': '0.152547',\n"
        f"{prefix} 'timing/fwd_logprobs_values_reward': '{scoring}',\n"
        f"{prefix} 'timing/step': '52.9',\n"
        f"{prefix} 'trainer/global_step': {n}}}\n"
        for n in range(1, steps + 1)
    )


def test_a_mapping_over_several_lines_is_one_step(tmp_path: Path) -> None:
    log = part_of(tmp_path, _skyrl(12, 8.4))
    reward, loss = log.get("reward"), log.get("loss")
    assert reward is not None and [point.step for point in reward.points] == list(range(1, 13))
    assert loss is not None and [point.step for point in loss.points] == list(range(1, 13))
    assert not log.is_counted
    assert not worrying(diagnosed(tmp_path, _skyrl(12, 8.4)))
    assert told(diagnosed(tmp_path, _skyrl(12, 42.0)))[0] == ("D37", "warning")
