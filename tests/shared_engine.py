"""The size of the engine that the test files share (tests/conftest.py builds it)."""

RANK = 32  # of its adapter slot
CONTEXT = 320  # tokens: more than two of the blocks that the prefix cache keeps on a CPU
