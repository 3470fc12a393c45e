"""The federation on Flower: the only place that imports flwr.

Reading order: ``transport`` (messages over Flower's Grid), ``node`` (the process at a site), ``server`` (the app beside the
link), ``launch`` (the processes that ``covey link``, ``covey node`` and ``covey federate`` start). ``app/`` is what ``flwr
run`` takes: a description that names these modules and holds no code. So a site runs the covey that is installed there.
"""
