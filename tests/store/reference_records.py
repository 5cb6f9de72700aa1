"""What the per-key reference keeps and says: rows, messages, plans, and the optimizer of a row."""

from dataclasses import dataclass, field

import numpy as np

NO_STATE = np.zeros(0, np.float32)


@dataclass
class Optimizer:
    name: str
    lr: float
    eps: float

    def update(self, value, state, gradient):
        """The new (value [D], state [S])."""
        if self.name == "sgd":
            return value - self.lr * gradient, state
        squares = gradient * gradient
        state = state + (squares.mean(keepdims=True) if self.name == "rowwise_adagrad" else squares)
        return value - self.lr * gradient / (np.sqrt(state) + self.eps), state

    def denominator(self, state):
        return 1.0 if self.name == "sgd" else np.sqrt(state) + self.eps


@dataclass(frozen=True)
class Master:
    """A row at its owner."""

    value: np.ndarray
    state: np.ndarray
    clock: int = 0
    updates: frozenset = frozenset()  # every update applied
    touched: bool = False  # a push reached it


@dataclass
class Copy:
    """A row at a worker. What is pending is `value - base`, c_c - c_s updates."""

    value: np.ndarray
    state: np.ndarray
    base_value: np.ndarray
    base_state: np.ndarray
    c_s: int
    c_c: int
    base_updates: frozenset  # in the base
    pending: list = field(default_factory=list)
    used: tuple = ()  # (step, position of the last lookup)
    count: int = 0
    reached: tuple = ()  # `used` of the step in which `count` took its value


@dataclass(frozen=True)
class Push:
    row: int
    value: np.ndarray  # gradient or difference
    state: np.ndarray
    denominator: object  # of the worker's own state
    clock: int
    updates: tuple


@dataclass
class Message:
    """What one worker sends in a round, to all owners."""

    pushes: list = field(default_factory=list)
    fetches: list = field(default_factory=list)
    again: dict = field(default_factory=dict)  # fetched row whose copy is kept and was pushed: the updates in it
    checks: list = field(default_factory=list)  # (row, the clock it will be read with)


@dataclass
class Answer:
    """What one worker gets in a round, from all owners."""

    fetched: dict = field(default_factory=dict)  # row: Master
    sent: dict = field(default_factory=dict)  # row: whether it has to travel
    invalid: dict = field(default_factory=dict)  # row: Master
    notices: dict = field(default_factory=dict)  # row: c_g


@dataclass
class Plan:
    """One batch at one worker."""

    last: dict  # row: position of its last lookup
    reading: list  # distinct rows in the order of their last lookups
    message: Message
    missing: list = field(default_factory=list)
    own_invalid: list = field(default_factory=list)
    noticed: list = field(default_factory=list)
    silent: int = 0  # held rows about which nothing is said
    late: list = field(default_factory=list)  # rows that wait for the batch in flight
