"""Monitoring of a job: GPU use, slow ranks, and the cause of a hang.

`sample` records the use of each rank, and `report` draws it; `straggler` names the slow rank.
`flight` records and reads each rank's collectives, and `hang` names the missing rank.
"""
