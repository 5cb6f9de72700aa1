"""Structured schemas of every config group: keys, types and defaults.

Hydra composes the YAML files of ``configs/``; ``compose`` merges the result into these classes, so
that a misspelt key or a wrong type is one ConfigError. Nothing here imports torch.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class SplitConfig:
    """Shares (each <= 1) or row counts (> 1) of the prepared rows, cut by position: train first."""

    train: float = 0.8
    validation: float = 0.1
    test: float = 0.1


@dataclass
class SampleConfig:
    """The generated data set: Criteo's shape, skewed ids, labels drawn from a hidden model."""

    rows: int = 200_000  # of all splits together
    dense: int = 13  # columns of numbers
    cardinalities: list[int] = field(default_factory=list)  # empty: 26 columns of a small Criteo
    zipf: float = 1.1  # skew of the ids; 0: even
    base_rate: float = 0.25  # share of positive labels
    seed: int = 1  # of the data, not of training


@dataclass
class DataConfig:
    """Which prepared Parquet data set to read, and how ``hetrain prepare`` makes it."""

    name: str = "sample"  # what the set is: sample is made on first use
    path: str = "data/sample"  # folder of the prepared set
    raw: str | None = None  # file or glob of raw logs, read by `prepare` alone
    min_count: int = 1  # ids seen less often share id 0 (unseen or missing)
    split: SplitConfig = field(default_factory=SplitConfig)
    on_bad_row: str = "error"  # error | skip (left out and counted)
    shuffle: bool = True  # anew for every epoch
    shuffle_window: int = 65_536  # rows permuted together, per rank
    prefetch: int | None = None  # batches read ahead by threads, per rank; null: 4 for a GPU, 0 where the CPU computes
    sample: SampleConfig = field(default_factory=SampleConfig)


@dataclass
class DenseOptimizerConfig:
    """Optimizer of the dense part: sgd | adagrad | adam | adamw."""

    name: str = "adam"  # sgd | adagrad | adam | adamw
    lr: float = 0.001  # learning rate
    weight_decay: float = 0.0
    eps: float = 1e-8


@dataclass
class RowOptimizerConfig:
    """Optimizer of the embedding rows: sgd | adagrad | rowwise_adagrad."""

    name: str = "rowwise_adagrad"  # sgd | adagrad | rowwise_adagrad
    lr: float = 0.02  # learning rate
    eps: float = 1e-8


@dataclass
class ScheduleConfig:
    """Learning-rate factor of both optimizers: linear warm-up, then decay to ``final`` at ``decay_steps``."""

    warmup_steps: int = 0  # 0: none
    decay: str = "none"  # none | linear | cosine
    decay_steps: int = 0  # the step at which decay ends
    final: float = 0.0  # factor from then on


@dataclass
class OptimizerConfig:
    """Both optimizers and the schedule they share."""

    dense: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)
    rows: RowOptimizerConfig = field(default_factory=RowOptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)


@dataclass
class ConstraintConfig:
    """What one table may become; null and an empty list leave it to the planner."""

    sharding_types: list[str] = field(default_factory=list)  # one of them, as in planner.sharding_types
    tiers: list[str] = field(default_factory=list)  # hbm | cached | ddr
    columns: int | None = None  # of each column piece


@dataclass
class PlannerConfig:
    """Where rows live. ``sharding_types`` limits what the planner may choose from."""

    name: str = "torchrec"  # torchrec | hierarchical | round_robin | memory_balanced | memory_optimized
    # null: all that the engine and the row optimizer can train
    sharding_types: list[str] | None = field(default_factory=lambda: ["data_parallel", "table_wise", "row_wise"])
    memory_gib: float | None = None  # GiB per rank for tables; null: the device's own, less what else is needed
    data_parallel_threshold: int | None = None  # elements (rows x dim): bsp, het: tables up to it are replicated
    column_slice_threshold: int | None = None  # elements: tables above it are cut by columns
    row_slice_threshold: int | None = None  # elements: tables from it on are cut by rows over all ranks
    tiers: list[str] | None = None  # memories that may hold rows: hbm | cached (ddr, with a cache in hbm) | ddr
    constraints: dict[str, ConstraintConfig] = field(default_factory=dict)  # '{C3: {sharding_types: [row_wise]}}'
    effort: float = 1.0  # hierarchical: work of the search and its bound, of some 10 s at most; 10 is ten times as much
    plan: str | None = None  # a plan.json, or the folder of one, to train by; null: one is made, as the other keys say


@dataclass
class CacheConfig:
    """A worker's cache of rows."""

    # share of all rows (<= 1), rows (> 1) or memory of a worker (512MiB); 0: no row is kept between steps
    capacity: int | float | str = 0.1
    policy: str = "lru"  # lru | lfu | light_lfu (rows used in 64 steps stay for good)


@dataclass
class ConsistencyConfig:
    """How fresh a row must be when it is read."""

    mode: str = "bsp"  # bsp | het | ssp | asp
    staleness: float = 100  # updates (het), steps (ssp); inf: a row kept is never asked about; 0 is not bsp
    clock: str = "max"  # max (the paper) | sum (a count of updates)
    validation: str = "directory"  # directory (owners say which copies are too old) | clock (the paper)
    prefetch: bool = True  # the next batch's round beside this one's computation; with a cache and staleness >= 1
    late_leg: bool = False  # het: without these too, in two legs; pays where the link, not the CPU, is the limit
    cache: CacheConfig = field(default_factory=CacheConfig)


@dataclass
class DctConfig:
    """Dynamic communication thresholding: what is small waits (KDD 2021)."""

    dense_sparsity: float = 0.99  # share of every dense gradient that waits
    pooled_sparsity: float = 0.95  # share of a sample's values in every pooled column that is left out
    rows_sparsity: float = 0.9  # share of the values of the rows pushed that waits
    refresh_steps: int = 1000  # steps after which thresholds are found anew
    dense_warmup_steps: int = 0  # steps at the start in which dense gradients travel whole
    pooled_warmup_steps: int = 0  # the same of pooled embeddings: the model learns without thinning, then with it
    rows_warmup_steps: int = 0  # the same of rows pushed
    smallest: int = 128  # values; smaller dense tensors travel whole
    max_age: int | None = None  # pushes of a row after which what waited is sent whole; null: 16, with het's cache 1


@dataclass
class CommsConfig:
    """What travels, in which form: none | fp16 | bf16 | int8 | dct on every path, or path by path."""

    name: str = "none"  # int8 sends dense gradients as bf16
    rows: str | None = None  # fetches and pushes of the store; null: as name says
    pooled_forward: str | None = None  # pooled embeddings of bsp; null: as name says
    pooled_backward: str | None = None  # their gradients; null: as name says
    dense: str | None = None  # dense gradients; null: as name says
    dct: DctConfig = field(default_factory=DctConfig)


@dataclass
class ClusterConfig:
    """The machines that a plan is for, which need not exist; and a run's processes that only own embedding rows.

    What is null is taken from ``profile``, where there is one, or from this machine.
    """

    servers: int = 0  # het, ssp, asp: the run's last processes, which compute nothing; 0: rows live on the workers
    device: str | None = None  # cuda | cpu; null: what this machine has
    nodes: int | None = None  # machines; null: 1. `train` groups its workers in so many, on any hosts
    gpus_per_node: int | None = None  # ranks of each, also without GPUs; null: launch.nproc, or one per GPU, else 2
    hbm_gib: float | None = None  # GiB of one GPU's memory
    ddr_gib: float | None = None  # GiB of one machine's memory, which its ranks share
    reserve: float = 0.15  # share of both that tables must leave: dense part, libraries, activations
    hbm_gb_s: float | None = None  # GB/s that one rank reads of its GPU's memory
    ddr_gb_s: float | None = None  # GB/s that one rank reads of its machine's memory
    host_link_gb_s: float | None = None  # GB/s between a GPU and its machine's memory
    intra_gb_s: float | None = None  # GB/s that one rank sends to others of its machine
    inter_gb_s: float | None = None  # GB/s that one rank sends to other machines
    latency_us: float | None = None  # microseconds of one message: a profile's figure, in no price
    profile: str | None = None  # measured speeds and costs: the file that `hetrain plan --calibrate` wrote


@dataclass
class PlanConfig:
    """What ``hetrain plan`` plans and where it writes."""

    # .json, .csv or .yaml with name, rows, dim, pooling of every table, or the name of a shipped list (merlin_tiny);
    # null: the tables of the data and the model
    tables: str | None = None
    out: str | None = None  # folder for plan.json and plan.html; null: plans/WHAT_TIME


@dataclass
class SlowRandomConfig:
    """For experiments on stragglers: some steps of every worker take longer, chosen by ``seed``, rank and step."""

    share: float = 0.0  # of a worker's steps, at random; 0: none
    factor: float = 5.0  # such a step takes so many times as long


@dataclass
class LaunchConfig:
    """Processes of a run."""

    nproc: int | None = None  # workers, to which cluster.servers adds; null: one per GPU, else 2
    device: str = "auto"  # auto | cpu | cuda
    threads: int | None = None  # compute threads per process; null: cores / processes
    timeout_s: float = 300.0  # seconds; every collective and every wait
    max_restarts: int = 0  # times a training whose rank died or waited in vain goes on from its last checkpoint
    slow_ranks: dict[int, float] = field(default_factory=dict)  # experiments: {1: 3.0}: rank 1 takes 3 times as long
    slow_random: SlowRandomConfig = field(default_factory=SlowRandomConfig)


@dataclass
class TrainConfig:
    """The loop: batch size per rank, length, evaluation, early stopping."""

    batch_size: int = 512  # examples per process and step
    epochs: int = 1
    max_steps: int | None = None  # ends training earlier; null: epochs alone
    eval_every: int | None = None  # steps; null: at the end of each epoch
    eval_batch_size: int = 4096  # examples per process
    patience: int | None = None  # evaluations without a better validation AUC; null: no early stop


@dataclass
class CheckpointConfig:
    """When weights are saved, how many are kept, and what a run starts from."""

    every: int | None = None  # steps; null: at evaluations and at the end
    keep: int = 2  # newest ones; the best on validation stays as well
    resume: str = "auto"  # auto | never | a checkpoint folder


@dataclass
class TelemetryConfig:
    """What is measured while training."""

    log_every: int = 50  # steps between lines of metrics.jsonl
    audit_every: int = 0  # steps between audit rounds; 0: none
    tensorboard: bool = True  # write tb/ in the run's folder


@dataclass
class StoreConfig:
    """The embedding store of `het`, `ssp` and `asp`."""

    device: str = "cpu"  # where owners keep their rows
    index: str = "array"  # array (all rows) | hash (rows seen: tables far larger than memory)
    init_bound: float = 0.01  # rows start uniform in [-init_bound, init_bound)


@dataclass
class RunConfig:
    """One training run."""

    seed: int = 1  # of initial weights, shuffling and launch.slow_random
    name: str | None = None  # folder under `runs`; null: experiment and time
    runs: str = "runs"  # folder of the run folders
    data: DataConfig = field(default_factory=DataConfig)
    model: dict[str, Any] = field(default_factory=dict)  # _target_ and its keyword arguments
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    consistency: ConsistencyConfig = field(default_factory=ConsistencyConfig)
    comms: CommsConfig = field(default_factory=CommsConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
