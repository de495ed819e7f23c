"""Drive a trainer from a dump: recorded rollouts in place of sampling, whatever framework recorded them.

    replay = RolloutReplay("dump", end="stop")
    for step in range(steps):
        batch = replay.batch(step)
        ids_BS, rewards_B = batch["input_ids"], batch["reward"]

Values come as torch tensors of the recorded dtype, bit for bit. Nothing is ever made up: a step that was not
recorded, or a task without a trajectory, is an error that says what there is.
"""

from replay_core.rollouts.batch import RolloutBatch
from replay_core.rollouts.replay import RolloutReplay
from replay_core.rollouts.worker import MockRolloutWorker

__all__ = ["MockRolloutWorker", "RolloutBatch", "RolloutReplay"]
