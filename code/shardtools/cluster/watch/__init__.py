"""Monitoring of a job: GPU use, slow ranks, and the cause of a hang.

`sample` records what each rank uses, and `report` draws it; `straggler` names the slow rank.
`flight` reads what each rank called, and `hang` names the missing rank.
"""
