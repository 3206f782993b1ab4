"""Reward functions with TRL's signature, scored in processes that can be killed. No torch here."""

from logra.rl.rewards.pool import RewardPool
from logra.rl.rewards.result import RewardResult
from logra.rl.rewards.spec import RewardSpec, Score, Status

__all__ = ["RewardPool", "RewardResult", "RewardSpec", "Score", "Status"]
