"""The help texts. Read before anything slow is imported: `hetrain --help` answers at once."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from hetrain.cli.evaluated import GROUPS_TAKEN
from hetrain.config.compose import EXPERIMENT, GROUPS, group_options

TOP = """\
usage: hetrain VERB [KEY=VALUE | GROUP=NAME ...] [options]

Trains recommendation models whose embedding tables outgrow a machine.

verbs
  train     train a model; leaves a run folder under runs/
  eval      AUC and logloss of a run's checkpoint on one of its splits
  predict   write a probability for every example of a split to a file
  prepare   turn raw logs into the Parquet data set that training reads
  stats     count a data set's ids: skew, distinct ids per batch, what a cache of rows would answer
  plan      which rank holds what, and what a step costs, for machines that need not exist
  doctor    check this machine: versions, devices, cores, memory, disk

first steps
  hetrain train +experiment=criteo_het                     train on generated sample data
  hetrain train -m +experiment=criteo_het consistency.staleness=0,10,100
  hetrain plan +experiment=merlin_medium cluster.nodes=2
  hetrain VERB --help                                      keys, groups and examples of a verb
"""

OPTIONS = """\
options
  --help             this text
  --keys             all keys of the verb, with types, defaults and meaning
  --cfg job          print the resolved config as YAML and stop
  --config-dir DIR   your own configs, searched before ours: DIR/GROUP/NAME.yaml, DIR/experiment/NAME.yaml
"""

SWEEPS = """\
  -m, --multirun     one job for each value of a swept key: KEY=a,b,c, KEY=choice(a,b), KEY=range(0,3)
"""

EXITS = """\
exit codes
  0 done   1 defect or failed machine check   2 config   3 data   4 training   5 checkpoint
  130, 143 stopped by Ctrl-C or SIGTERM after saving; start again with the same `name` to go on
"""

VERBS = {
    "train": """\
usage: hetrain train [KEY=VALUE | GROUP=NAME ...] [options]

Trains a model and leaves runs/NAME/ with config.yaml, metrics.jsonl, summary.json, tb/ and checkpoints/.
The sample data set is made on first use.

most used keys
  train.batch_size=512           examples per process and step
  train.epochs=1                 train.max_steps=N ends earlier
  train.eval_every=N             steps between evaluations; null: at the end of each epoch
  optimizer.rows.lr=0.02         learning rate of embedding rows; optimizer.dense.lr that of the rest
  consistency=bsp|het|ssp|asp    rows always fresh; cached within a bound; at one's own pace, cached or fetched
  consistency.staleness=100      updates a cached row may hold back, and its owner may be ahead (het); steps a
                                 worker may be ahead of the slowest (ssp); inf: no bound
                                 0: a changed row is sent and fetched before its next read, which is not yet bsp:
                                 what another process holds back is seen once that one sends it
  consistency.cache.capacity=0.1 rows kept per worker: a share (1: all), a number above 1, memory (512MiB); 0: none,
                                 which equals bsp; consistency.cache.policy=lru|lfu|light_lfu says which
  consistency.validation=directory  owners say which copies are too old; clock: workers send the clocks of their hits
  consistency.prefetch=true      the next batch's rows travel while this one is computed (a cache, staleness >= 1)
  store.index=array              all rows in memory; hash: those seen, for tables far larger than memory (het)
  model.embedding_dim=16         width of a row, a multiple of 4
  comms=none|fp16|bf16|int8|dct  in what form values travel; comms.dense, comms.rows, ... path by path
  planner=torchrec|hierarchical  and others: which rank holds which rows; planner.plan=FOLDER: a plan made before
  launch.nproc=2                 workers on this machine; null: one per GPU, else 2; cluster.servers=1 adds a server
  launch.max_restarts=0          times a run whose process died goes on from its last checkpoint (checkpoint.every=N)
  name=NAME                      run folder in runs=DIR; the same name goes on from its last checkpoint
                                 (-m: jobs are named 0, 1, ... in DIR/TIME, or multirun/TIME)

examples
  hetrain train +experiment=criteo_het
  hetrain train +experiment=criteo_bsp data=criteo data.path=data/criteo train.batch_size=4096
  hetrain train model=dlrm consistency=het consistency.staleness=inf name=first
  hetrain train -m +experiment=criteo_het consistency.staleness=0,10,100,10000
  hetrain train model=custom model._target_=my_models.Mine model.width=64
  torchrun --nnodes 2 --nproc-per-node 8 ... -m hetrain train +experiment=criteo_het   (srun works alike)
    torchrun has the last word on exit codes: 1 for every error, and its own traceback after SIGTERM
""",
    "eval": """\
usage: hetrain eval run=runs/NAME [checkpoint=best|last|step_N] [split=test|validation|train] [KEY=VALUE ...]

AUC, logloss and normalized entropy of a run's checkpoint, with the config that the run saved, as JSON. Of it can be
changed what is read (data.path) and where it runs (launch.nproc), not the model, nor what only training reads.

keys
  run=runs/NAME      the folder that a training left
  checkpoint=step_N  or last, or best (on validation); left out: the one whose figures summary.json has
  split=test         or validation, train; left out: test

examples
  hetrain eval run=runs/first
  hetrain eval run=runs/first checkpoint=last split=validation launch.nproc=1
  hetrain eval run=runs/first data.path=data/next_day
""",
    "predict": """\
usage: hetrain predict run=runs/NAME out=FILE.parquet [checkpoint=best|last|step_N] [split=test] [KEY=VALUE ...]

Writes label and predicted probability of every example of a split, in the data set's order.

keys
  run=runs/NAME      the folder that a training left
  out=FILE           .parquet or .csv, written over where it is there
  checkpoint=step_N  or last, or best (on validation); left out: the one whose figures summary.json has
  split=test         or validation, train; left out: test

examples
  hetrain predict run=runs/first out=scores.parquet
  hetrain predict run=runs/first out=scores.parquet data.path=data/next_day
""",
    "prepare": """\
usage: hetrain prepare data=NAME data.raw=FILE_OR_GLOB data.path=OUT [KEY=VALUE ...]

Turns raw logs into Parquet with a vocabulary per column, streaming, in bounded memory.

most used keys
  data.raw='day_*.gz'       plain or gzipped files, in order of their names
  data.path=data/criteo     where the data set is written
  data.min_count=1          ids seen less often share id 0
  data.split.train=0.8      shares (<= 1) or row counts (> 1), cut by position: train, validation, test
  data.on_bad_row=error     or skip: count bad rows and go on

examples
  hetrain prepare data=criteo data.raw=train.txt data.path=data/criteo
  hetrain prepare data=sample data.path=data/sample data.sample.rows=1000000
""",
    "stats": """\
usage: hetrain stats [data=NAME] [data.path=DIR] [options]

Counts the ids of the training rows, streaming: per column rows, distinct ids, missing ones, the share of lookups of the
hottest ids, distinct ids of a batch, and what caches of rows would answer. Leaves stats.json and stats.html beside
the data; `hetrain plan` reads the first. Memory: 4 bytes per row of all tables. Data that is there is counted as it is;
the sample is made where there is none.

examples
  hetrain stats
  hetrain stats data=criteo data.path=data/criteo
""",
    "plan": """\
usage: hetrain plan [KEY=VALUE | GROUP=NAME ...] [options]

Decides which rank holds which rows and columns of which table, and says what a step then costs on every rank, how far
that is from the best there can be, and what would help. No processes, no GPU and no tables are made. Leaves
plans/NAME/ with plan.json and plan.html, where one sees the pieces on the ranks.

most used keys
  planner=hierarchical      or round_robin, memory_balanced, memory_optimized, torchrec
  plan.tables=FILE          .json, .csv or .yaml: name, rows, dim, pooling of every table, as in
                            [{"name": "C1", "rows": 1000000, "dim": 64, "pooling": [1, 10]}]; or a shipped list.
                            Left out: the tables of data and model, with the skew that `hetrain stats` measured
  cluster=dgx_a100          the machines; cluster=local is this one
  cluster.nodes=4           how many; cluster.gpus_per_node=8 ranks on each
  cluster.hbm_gib=80        of a GPU; cluster.ddr_gib=2048 of a machine; cluster.intra_gb_s, cluster.inter_gb_s: links
  train.batch_size=8192     examples per rank and step
  planner.data_parallel_threshold=N  elements up to which a table is replicated; column_slice_threshold,
                            row_slice_threshold: from which it is cut
  planner.effort=10         planner=hierarchical searches ten times as long, for a better plan or a higher bound
  'planner.constraints={C3: {sharding_types: [row_wise]}}'   rules for single tables
  plan.out=DIR              where to write

option of plan alone
  --calibrate               measure this machine's lookups, exchanges and reductions with launch.nproc ranks, and what
                            pieces of tables and sharding types cost beside their bytes; save it all as
                            plans/profile.json, which plans for cluster=local then use, or as cluster.profile=FILE,
                            which plans with that key use. Takes launch.* and cluster.profile alone; not replaced is a
                            profile of other ranks or of another machine, nor one of even times by uneven ones

examples
  hetrain plan +experiment=merlin_medium cluster=dgx_a100 cluster.nodes=2
  hetrain plan plan.tables=my_tables.csv planner=hierarchical cluster=cpu_10gbe cluster.nodes=16
  hetrain plan +experiment=criteo_bsp data=criteo planner=hierarchical cluster.gpus_per_node=4
  hetrain plan --calibrate launch.nproc=4
""",
    "doctor": """\
usage: hetrain doctor

Prints versions against the tested ones, devices, backends, cores, memory and disk, and what each lack means.
Exit code 1 when training cannot run here.
""",
}


SHOWN = {  # config groups that a verb is about
    "train": (*GROUPS, EXPERIMENT),
    "eval": ("data", "launch"),
    "predict": ("data", "launch"),
    "prepare": ("data",),
    "stats": ("data", EXPERIMENT),
    "plan": ("planner", "cluster", "model", "optimizer", "consistency", "comms", "launch", "data", EXPERIMENT),
}


def verb_help(verb: str, folders: Sequence[Path]) -> str:
    """The text of `hetrain VERB --help`."""
    if verb == "doctor":
        return VERBS[verb]
    return f"{VERBS[verb]}\n{_groups(verb, folders)}\n{OPTIONS}{SWEEPS if verb == 'train' else ''}\n{EXITS}"


def _groups(verb: str, folders: Sequence[Path]) -> str:
    """The config groups that the verb is about, with their options, and the others, which it takes as well."""
    shown = SHOWN[verb]
    lines = [_wrapped(group, group_options(group, folders)) for group in shown]
    taken = {"eval": GROUPS_TAKEN, "predict": GROUPS_TAKEN, "stats": shown}.get(verb, (*GROUPS, EXPERIMENT))
    others = [group for group in taken if group not in shown]
    if others:
        why = "over the run's own" if verb in ("eval", "predict") else "of which only what they say of data counts"
        lines.append(_filled(f"  also taken, {why}: {', '.join(others)}"))
    experiments = "; +experiment=NAME" if EXPERIMENT in taken else ""
    return "\n".join([f"config groups (GROUP=NAME{experiments})", *lines, ""])


def _wrapped(group: str, options: Sequence[str]) -> str:
    """A group and its options, in lines of the width of a screen."""
    return _filled(f"  {group:<13}{', '.join(options)}")


def _filled(text: str) -> str:
    return textwrap.fill(text, 118, subsequent_indent=" " * 15, break_on_hyphens=False)
