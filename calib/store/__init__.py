"""The store: questions, answers, timings, failures, policies and the ledger on disk; rows in, arrays out.

Alone knows the schema. SQLite (a file, WAL) by default, PostgreSQL by URL; several processes may write one store.
`Store` (`calib.store.store`) is the front, over the tables (`schema`), the connections (`database`), what is written
(`entries`, `staging`, `verifications`), what is there (`holdings`) and what becomes `Outcomes` (`loading`).
"""

from calib.store.entries import Answered, Failed
from calib.store.holdings import CoverageCount, Covered, FailureCount, ModelStatus, SavedPolicy, StoreStatus
from calib.store.schema import ModelRow
from calib.store.staging import AuditAnswer, LatencyPass, PassState, Planned, StoredAnswer
from calib.store.store import Store, load_outcomes
from calib.store.verifications import Verification, VerifiedRows

__all__ = [
    "Answered",
    "AuditAnswer",
    "CoverageCount",
    "Covered",
    "Failed",
    "FailureCount",
    "LatencyPass",
    "ModelRow",
    "ModelStatus",
    "PassState",
    "Planned",
    "SavedPolicy",
    "Store",
    "StoreStatus",
    "StoredAnswer",
    "Verification",
    "VerifiedRows",
    "load_outcomes",
]
