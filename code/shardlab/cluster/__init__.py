"""Jobs on many nodes: started, put into queues, started again, watched, and examined."""
