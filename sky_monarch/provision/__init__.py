"""Brings hosts up and takes them down, as the controller wants them: `python -m sky_monarch.provision CONFIG`.

| module | what it does |
|---|---|
| `provider` | what a provider is: launch, status, down, logs, notices |
| `local`, `skypilot` | the two there are: processes of this machine; SkyPilot's clusters |
| `classify` | what an error of a provider means: no capacity, wrong credentials, refused, or just an error |
| `candidates` | which choice of the plan is tried next, pure |
| `requests` | what was asked for and what became of it, on disk |
| `host` | one host, by a thread of its own |
| `leaving` | clusters of older attempts, taken down beside what follows them |
| `watch` | what became of hosts that were up |
| `provisioner` | all of them, and the controller |
| `head` | where that is a cluster: it is brought up and taken down |
| `launcher` | the same for the whole run |
| `succession` | what a head that follows a lost one is told of the run |
| `archive` | what is kept of such a run here |
"""
