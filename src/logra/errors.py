"""Exceptions. Each message says what is wrong and how to mend it.

The command line ends with exit code 2 for a `UserError` (the user can mend it) and with 1 for anything else.
"""


class LograError(Exception):
    """Base class of everything logra raises on purpose."""


class UserError(LograError, ValueError):
    """Something the user can mend: configuration, data, a reward function, a path."""


class ConfigError(UserError):
    """The configuration is wrong: unknown key, wrong type, impossible combination."""


class DataError(UserError):
    """The data set cannot be used as asked: missing column, no usable prompt, unreadable file."""


class RewardError(UserError):
    """A reward function broke its contract or failed too often."""


class ModelError(UserError):
    """The model or tokenizer cannot be used as asked: no target, no pad token, no chat template, dtype."""


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete, damaged, or belongs to another run."""


class UpdateError(UserError):
    """An Update cannot be made, read or applied as asked. Nothing was applied."""


class DamagedUpdateError(UpdateError):
    """Bytes are no whole, unharmed Update: corrupted, truncated, of another format."""


class UpdateOrderError(UpdateError):
    """An Update does not follow on the version in place: a gap, a replay, a reordering, or history that was compacted."""


class WrongBaseError(UpdateError):
    """An Update belongs to another run, other starting weights or another model."""


class MissingBasisError(WrongBaseError):
    """An Update goes on with an aligned basis that travelled in an earlier one, which this holder has not seen."""


class MismatchError(UserError):
    """Rollout engine and trainer do not hold the same policy, or compute it too differently. Nothing was applied."""


class NonFiniteError(LograError, ArithmeticError):
    """A loss, sketch or predicted KL is NaN or infinite. Nothing was applied."""
