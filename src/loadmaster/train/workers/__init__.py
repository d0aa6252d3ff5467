"""What trains on one device for a study: in this process, in processes of its own or on Ray, with the
messages between it and the coordinator. The front door is `worker_pool`. It may import `disk` and what lies
below `train`; it knows neither the coordinator nor how a step is made: what trains is an `Engine`.
"""
