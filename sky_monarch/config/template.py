"""The job file that ``sky-monarch init`` writes."""

from __future__ import annotations

__all__ = ["INIT_TEMPLATE"]

INIT_TEMPLATE = """\
# A job for sky-monarch. Check it with `sky-monarch validate`, start it with `sky-monarch up`.
# Lines that begin with `#` show the defaults. YAML 1.2; every field is in docs/reference/job-file.md.

name: my-job                     # a-z, 0-9 and -; at most 40
replicas: 2                      # replica groups: each trains a full copy and can die without the others
min_replicas: 1                  # the job goes on while this many are left
ranks_per_replica: 1             # processes of one replica group, one a GPU as a rule

# infra: local                   # where it runs: local is this machine; slurm, k8s, ssh, runpod, oci ...
# placement: same-zone           # any: hosts may be far apart, which needs sync: diloco(n)
# head: auto                     # where lighthouse and controller run: here, or on a cluster
# resources:                     # what each replica group runs on
#   accelerators: null           # MI300X:8, [MI300X:8, MI325X:8] in order, {MI300X: 8, MI325X: 8} for any
#   cpus: null                   # 16, or 16+ for at least 16
#   memory_gib: null             # 128, or 128+ for at least 128
#   use_spot: false              # take capacity that can be taken back at any time
#   gpus_per_host: null          # 8: groups share hosts of eight; null: what costs least, else a host each
#   image: null                  # docker:rocm/pytorch:latest; null: one of AMD's, where containers run
#   any_of: null                 # alternatives to the fields above: [{use_spot: true}, {cpus: 16}]
#   ordered: null                # the same, the first wanted most; not together with any_of

# workdir: .                     # where setup and run start, relative to this file's folder
# setup: ""                      # shell text that prepares a host, once, before any rank starts
# setup_timeout_s: 1800          # longest run time of setup

run: python train.py             # what each rank runs; a single command gets no shell around it
# doctor: smoke                  # off: hosts are not looked at before their first step
# preload: []                    # modules that a warm standby imports ahead of time, such as [torch]
# sync: every_step               # diloco(20): each group takes 20 steps alone, then all average

# envs: {}                       # environment of the ranks, one NAME: value a line; values arrive as typed
# secrets: {}                    # the same, shown nowhere; better: `sky-monarch up --secret NAME`

# recovery:                      # when a process dies or stops making progress
#   max_restarts: 8              # restarts of one replica group inside window_s; then it is given up
#   window_s: 600                # older restarts are forgotten
#   backoff_s: 1                 # delay of a second restart, doubling; the first waits for nothing
#   backoff_max_s: 60            # longest delay
#   startup_limit_s: 1800        # longest time to a generation's first commit, or off
#   progress_limit_s: auto       # longest time between two commits: auto, off or seconds
#   grace_s: 10                  # time between TERM and KILL
#   standby: 1                   # warm standby processes a rank: 0 or 1
#   standby_start: fork          # exec: each standby imports for itself, where a preloaded module bears no fork
#   spare: 0                     # hosts kept ready, beyond this machine, for the groups of one that is lost
#   idle_limit_s: 21600          # hosts are kept so long while others are wanting to min_replicas, or off
#   healing: striped             # http: the state comes from one group only, as a copy
#   on_notice: leave             # checkpoint: save the state whenever a host is taken back, not with the last one only
#   standby_until: imports       # session: it also runs the script, up to its Session, ahead of time

# checkpoint: null               # where the state is saved for the case that every replica group is gone:
#   to: checkpoints              #   a folder, relative to this file's folder, or s3://bucket/folder
#   every_steps: 100             #   steps between two saves
#   keep: 2                      #   complete checkpoints that are kept

# lighthouse:                    # who forms the quorums; `lighthouse: torchft` is short for its kind
#   kind: sky-monarch            # sky-monarch, or torchft for TorchFT's own
#   join_timeout_s: 30           # longest wait of a forming quorum for groups that have not asked
#   heartbeat_timeout_s: 2       # silent for this long is out
#   quorum_timeout_s: 600        # longest wait of a group for a quorum
#   process_group_timeout_s: 30  # longest wait of one collective between groups

# logs:                          # captured output, for each rank and generation
#   segment_mib: 16              # size of one file
#   segments: 8                  # files kept; the oldest go first
#   archive_mib: 1024            # of runs on other hosts, kept beside the controller

# budget:                        # what a run may cost; then it ends in order
#   max_usd: off                 # US dollars for all hosts together, as far as their prices are known
#   max_hours: off               # hours from the launch on
"""
"""Commented text with every field and its default; it is a valid job as it stands."""
