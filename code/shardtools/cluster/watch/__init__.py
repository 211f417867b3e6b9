"""Is a job using its GPUs, and where does it hang?

`sample` notes what each rank uses, and `report` draws it; `straggler` names the slow rank. `flight`
reads what each rank called, and `hang` says who is missing.
"""
