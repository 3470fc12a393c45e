"""The paper's randomised algorithms and all that they share: schedule, loop, messages, constants."""
