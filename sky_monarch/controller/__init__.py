"""The controller: decides for a run, remembers it, and answers for it.

``policy`` decides (pure), ``journal`` remembers, ``agents`` talks to the hosts, ``api`` answers the clients,
``controller`` joins them. Run as ``python -m sky_monarch.controller CONFIG.json`` by the head's agent.
"""
