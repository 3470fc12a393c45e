"""In the coordinator of a test: each letter goes twice, and after it the one before once more, as by one who replays them."""

import sys

if any("flwr-serverapp" in word for word in sys.orig_argv):
    from covey.federation.flower.transport import FlowerTransport
    from covey.federation.wire.codec import Refusal
    from covey.federation.wire.messages import SiteMessage
    from covey.records import decode

    once = FlowerTransport.exchange
    before = {}

    def outcome(reply):
        body = decode(reply).body
        return f"refusal {body.reason}" if isinstance(body, Refusal) else "reply"

    def exchange(self, letters, timeout):
        first, second = once(self, letters, timeout), once(self, letters, timeout)
        body = decode(next(iter(letters.values()))).body
        kind = body.label if isinstance(body, SiteMessage) else "ask"
        print(f"covey: {kind} again: {'the same bytes' if first == second else 'other bytes'}", flush=True)
        if before:
            stale = {outcome(reply) for reply in once(self, dict(before), timeout).values()}
            print(f"covey: the letter before {kind}: {stale.pop() if len(stale) == 1 else sorted(stale)}", flush=True)
        before.update(letters)
        return second

    FlowerTransport.exchange = exchange
