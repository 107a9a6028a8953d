"""Speculative decoding: drafts, verification in one step, and states in which rejected drafts leave no trace."""

from kimigraph.runtime.speculation.acceptance import Accepted, accept_greedy, accept_sampled, likelihoods
from kimigraph.runtime.speculation.drafts import Draft, FollowsModel, NgramDraft
from kimigraph.runtime.speculation.head_draft import UNREAD, HeadDraft, HeadSteps
from kimigraph.runtime.speculation.lengths import DraftLengths
from kimigraph.runtime.speculation.model_draft import ModelDraft
from kimigraph.runtime.speculation.replay_log import Fold, ReplayLog
from kimigraph.runtime.speculation.rollback import Rollback, StateShape
from kimigraph.runtime.speculation.rounds import Speculation, SpeculationCounts, Verify, VerifyPrograms
from kimigraph.runtime.speculation.snapshots import Snapshots

__all__ = [
    "UNREAD",
    "Accepted",
    "Draft",
    "DraftLengths",
    "Fold",
    "FollowsModel",
    "HeadDraft",
    "HeadSteps",
    "ModelDraft",
    "NgramDraft",
    "ReplayLog",
    "Rollback",
    "Snapshots",
    "Speculation",
    "SpeculationCounts",
    "StateShape",
    "Verify",
    "VerifyPrograms",
    "accept_greedy",
    "accept_sampled",
    "likelihoods",
]
