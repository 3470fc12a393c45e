"""In place of covey's site and coordinator, for tests of the transport alone.

The site does what its message says. The operator sends the messages of its settings and prints the replies.
"""

import json
import os
import sys
import time
import types


class Site:
    def __init__(self, name, read, policy, home, budget, identity, peers):
        self.name, self.identity, self.audit = name, identity, self

    def add(self, event, **about):
        print(event, file=sys.stderr, flush=True)

    def answer(self, message, operator):
        print(f"asked: {message.decode()}", file=sys.stderr, flush=True)
        word, _, rest = message.decode().partition(" ")
        if word == "break":
            raise ValueError(f"a secret value {rest}")
        if word == "sleep":
            time.sleep(float(rest))
        if word == "die":
            os._exit(1)
        return b"%s: %s, by process %d" % (self.name.encode(), message, os.getpid())


def operate(transport, settings, say):
    from covey.errors import DataError
    from covey.federation.wire.transport import wait_for_sites

    if settings.get("mistake"):
        raise DataError(settings["mistake"])
    sites = settings["sites"]
    wait_for_sites(transport, sites if isinstance(sites, int) else tuple(sites.split(",")), settings["wait"], say)
    answer = []
    for messages, timeout in settings["script"]:
        say(f"message {len(answer) + 1}")
        began = time.monotonic()
        replies = transport.exchange({name: message.encode() for name, message in messages.items()}, timeout)
        seconds = time.monotonic() - began
        words = {name: r.decode() if isinstance(r, bytes) else [r.why] for name, r in replies.items()}
        answer.append({"seconds": seconds, "replies": words})
    return json.dumps(answer)


standins = {
    "covey.federation.site.site": {"Site": Site, "Read": object},
    "covey.federation.operator.operate": {"operate": operate},
}
for module, things in standins.items():
    sys.modules[module] = types.ModuleType(module)
    for name, thing in things.items():
        setattr(sys.modules[module], name, thing)
