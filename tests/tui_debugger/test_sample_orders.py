"""The orders of samples are those that the document knows."""

from typing import get_args

from replay_core.documents.samples import SampleOrder
from tui_debugger.sample_orders import ORDERS


def test_every_order_that_a_document_has_can_be_asked_for():
    assert get_args(SampleOrder) == ORDERS
