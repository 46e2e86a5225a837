"""The most memory that a pass holds at once: the liveness of its program's buffers."""

from monta_megatron.chains.program import BoundProgram, Operation

# Tokens of a rank in the check of a chain's first use, at most.
CHECK_TOKENS = 256


def peak_bytes(bound: BoundProgram) -> float:
    """The peak of a pass's output, messages, and sums with what is converted for them.

    Indices are left out. In a chain of tokens they take up to 32 bytes for each copy of a row, kept
    until backward, and about 25 for each row and part while the copies are found.

    Returns:
        Bytes on this rank beyond the pass's input.
    """
    program = bound.program
    sizes = {slot: max(map(bound.num_bytes, buffers)) for slot, buffers in program.slots.items()}
    live = {program.buffers[0].slot: 0.0}
    peak = 0.0

    def end(operation: Operation) -> None:
        for number in {*operation.reads, *operation.writes}:
            buffer = program.buffers[number]
            # What nothing reads is needed by its own operation alone.
            if buffer.release == "last read" and buffer.last_read in (-1, operation.number):
                live.pop(buffer.slot, None)

    for operation in program.operations:
        for number in operation.waits:
            end(program.operations[number])
        for number in operation.writes:
            for slot in (buffers[0].slot for buffers in program.allocations[number]):
                live.setdefault(slot, sizes[slot])
        peak = max(peak, sum(live.values()))
        if not operation.is_collective:
            end(operation)
    return peak
