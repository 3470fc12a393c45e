"""In the coordinator of a test: each letter goes twice, and after it the one before once more, as by one who replays them."""

import sys

if any("flwr-serverapp" in word for word in sys.orig_argv):
    from covey.federation.flower.transport import FlowerTransport
    from covey.records import decode

    once = FlowerTransport.exchange
    before = {}

    def told(reply):
        letter = decode(reply)
        return f"{letter.kind} {letter.body.reason}" if letter.kind == "refusal" else letter.kind

    def exchange(self, letters, timeout):
        first, second = once(self, letters, timeout), once(self, letters, timeout)
        kind = decode(next(iter(letters.values()))).kind
        print(f"covey: {kind} again: {'the same bytes' if first == second else 'other bytes'}", flush=True)
        if before:
            stale = {told(reply) for reply in once(self, dict(before), timeout).values()}
            print(f"covey: the letter before {kind}: {stale.pop() if len(stale) == 1 else sorted(stale)}", flush=True)
        before.update(letters)
        return second

    FlowerTransport.exchange = exchange
