"""In the coordinator of a test: each message is sent twice, and then the message before it once more."""

import sys

if any("flwr-serverapp" in word for word in sys.orig_argv):
    from covey.federation.flower.transport import FlowerTransport
    from covey.federation.wire.codec import Refusal
    from covey.federation.wire.messages import SiteMessage
    from covey.records import decode

    push, pull = FlowerTransport.push, FlowerTransport.pull
    came = {}

    def once(self, messages, timeout):
        push(self, messages, timeout)
        replies = {}
        while len(replies) < len(messages):
            replies |= pull(self, timeout)
        return replies

    before = {}

    def outcome(reply):
        body = decode(reply).body
        return f"refusal {body.reason}" if isinstance(body, Refusal) else "reply"

    def exchange(self, messages, timeout):
        first, second = once(self, messages, timeout), once(self, messages, timeout)
        body = decode(next(iter(messages.values()))).body
        kind = body.label if isinstance(body, SiteMessage) else "ask"
        print(f"covey: {kind} again: {'the same bytes' if first == second else 'other bytes'}", flush=True)
        if before:
            stale = {outcome(reply) for reply in once(self, dict(before), timeout).values()}
            print(f"covey: the message before {kind}: {stale.pop() if len(stale) == 1 else sorted(stale)}", flush=True)
        before.update(messages)
        return second

    def push_again(self, messages, timeout):
        came.update(exchange(self, messages, timeout))

    def pull_what_came(self, wait):
        found = dict(came)
        came.clear()
        return found

    FlowerTransport.push, FlowerTransport.pull = push_again, pull_what_came
