"""Activation memory of dropless mixture-of-experts training: keep the rows that are there."""

from pallas_stash import permute, pipeline, sizing
from pallas_stash.allocators import Slot
from pallas_stash.checkpoint import checkpoint, StashedFunction
from pallas_stash.checks.debugging import debug
from pallas_stash.checks.padding_check import check_padding, PaddingReport
from pallas_stash.costs import with_expected_rows
from pallas_stash.gmm import gmm
from pallas_stash.grouped_mlp import grouped_mlp
from pallas_stash.handover import seal, SLOT_NAME
from pallas_stash.passes import PassExplanation, Saved, split_passes
from pallas_stash.policies import mark_rows, policy_by_name, save_in_stash
from pallas_stash.ragged import RaggedRows
from pallas_stash.slicing import dynamic_slice, dynamic_update_slice
from pallas_stash.stash import Stash
from pallas_stash.stats import StashStats, TierStats
from pallas_stash.step_explanation import explain, StepExplanation
from pallas_stash.threaded import threaded

__version__ = "0.1.0"

__all__ = [
  "check_padding",
  "checkpoint",
  "debug",
  "dynamic_slice",
  "dynamic_update_slice",
  "explain",
  "gmm",
  "grouped_mlp",
  "mark_rows",
  "PaddingReport",
  "PassExplanation",
  "permute",
  "pipeline",
  "policy_by_name",
  "RaggedRows",
  "save_in_stash",
  "Saved",
  "seal",
  "sizing",
  "Slot",
  "SLOT_NAME",
  "split_passes",
  "Stash",
  "StashedFunction",
  "StashStats",
  "StepExplanation",
  "threaded",
  "TierStats",
  "with_expected_rows",
]
