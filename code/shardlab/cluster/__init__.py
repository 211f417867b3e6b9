"""Clusters: starting a job on many nodes, watching it, and starting it again."""
