"""Durable checkpoints: the last resort when all donors are gone.

plan       what the job asks for
layout     names, marker and digests of the files of one checkpoint
folder     a folder of checkpoints: publish, find, verify, retire
contents   the state of a replica group as files of torch.distributed.checkpoint, and back
meeting    how the ranks of one group agree while they save one checkpoint
store      the same folder on a store that fsspec knows; uploads that go on where they were cut off
uploading  the thread that moves complete checkpoints there
saving     what the session asks: save what is due, restore the newest
"""
