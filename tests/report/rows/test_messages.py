"""What stages send to each other, by arithmetic alone."""

from __future__ import annotations

from parallelizer.report.rows.messages import HEADS, MessageRow, message_rows
from parallelizer.simulate.record.trace import trace
from tests.simulate.setups import llama

ROWS, TOKENS, WIDTH, FLOAT = 32, 32, 64, 4
"""The rows of a step, the tokens of a row, the width of the residual stream, and the bytes of a number."""


def test_a_row_has_a_cell_for_each_head() -> None:
    row = MessageRow("gradients", (3, 2), (1, 0), 1_024, 3 << 20)
    assert dict(zip(HEADS, row.cells, strict=True)) == {
        "what": "gradients", "from stage": "3", "to stage": "2", "from pp rank": "1", "to pp rank": "0",
        "messages": "1,024", "of": "3.0 MiB", "sent": "3.0 GiB",
    }  # fmt: skip


def test_the_bytes_of_messages_are_those_of_the_residual_stream() -> None:
    """Stages 0 to 3 on ranks 0, 1, 0, 1. Data ranks have a half of the rows, accumulated parts a half of these, microbatches a
    quarter of these; sequence parallelism leaves a half of the tokens to a rank.
    """
    setup = llama(
        "parallel=pp2_fsdp2_tp2", "model.n_layers=4", f"train.batch_size={ROWS}", "train.accumulate=2",
        "parallel.pipeline.schedule=interleaved-1f1b", "parallel.pipeline.microbatches=4",
    )  # fmt: skip
    model = setup.build_model()
    program = setup.compile(model)
    found = trace(program, model, setup.recipe(), rank=0)
    one = (ROWS // 2 // 2 // 4) * (TOKENS // 2) * WIDTH * FLOAT
    assert message_rows(program, found.cuts) == [
        MessageRow("activations", (0, 1), (0, 1), 8, one),
        MessageRow("activations", (1, 2), (1, 0), 8, one),
        MessageRow("activations", (2, 3), (0, 1), 8, one),
        MessageRow("gradients", (1, 0), (1, 0), 8, one),
        MessageRow("gradients", (2, 1), (0, 1), 8, one),
        MessageRow("gradients", (3, 2), (1, 0), 8, one),
    ]
    # Rank 0 sends the activations of stages 0 and 2 and the gradients of stage 2; what it receives is not sent.
    sent = [e for e in found.ledger if e.axis == "pp" and e.kind == "send"]
    assert len(sent) == 24 and sum(e.wire_bytes for e in sent) == 24 * one
    received = [e for e in found.ledger if e.axis == "pp" and e.kind == "recv"]
    assert len(received) == 24 and sum(e.wire_bytes for e in received) == 0
    at_peak = found.memory.at_peak
    assert at_peak["received"] >= one and at_peak["unsharded"] > 0
