"""A job on many nodes: started, watched, and looked into when it hangs."""
