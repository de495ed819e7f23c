"""Every kind of document there is."""

from __future__ import annotations

from typing import Union

from replay_core.documents.comparison import ComparisonDocument
from replay_core.documents.diagnosis import DiagnosisDocument
from replay_core.documents.difference import DifferenceDocument
from replay_core.documents.explanation import ExplanationDocument
from replay_core.documents.following import FollowingDocument
from replay_core.documents.gathering import GatheringDocument
from replay_core.documents.info import InfoDocument
from replay_core.documents.mismatch import MismatchDocument
from replay_core.documents.parity import ParityDocument
from replay_core.documents.record import RecordDocument
from replay_core.documents.replay import ReplayDocument
from replay_core.documents.ruling import RulingDocument
from replay_core.documents.run import RunDocument
from replay_core.documents.samples import SamplesDocument
from replay_core.documents.tensor import TensorDocument
from replay_core.documents.weights import WeightsDocument

Document = Union[  # noqa: UP007 - classes of typing have no | before Python 3.14
    RunDocument,
    RecordDocument,
    TensorDocument,
    ComparisonDocument,
    ReplayDocument,
    DiagnosisDocument,
    InfoDocument,
    DifferenceDocument,
    ParityDocument,
    FollowingDocument,
    ExplanationDocument,
    WeightsDocument,
    RulingDocument,
    SamplesDocument,
    MismatchDocument,
    GatheringDocument,
]
