"""RDMA on real RoCE v2, in virtual machines: ``python -m tests.rdma``."""
