"""The tests of every stage, and what they share: `from tests.bounds import ...`."""
