"""At the node of site west: each answer takes SLOW seconds longer."""

import os
import sys

if sys.orig_argv[-2:] == ["--home", "west"]:
    import time

    from covey.federation.site.site import Site

    answer = Site.answer

    def late(self, message, operator=""):
        time.sleep(float(os.environ["SLOW"]))
        return answer(self, message, operator)

    Site.answer = late
