"""An engine of the reader's own, in five files, graded on real ranks.

    python -m shardlab grade --start FOLDER     # writes the five files, empty but for signatures
    python -m shardlab grade FOLDER

`core` runs a case on its ranks and says what is wrong; a module for each part draws the cases and
knows what one process would do; `report` writes JSON and JUnit; `command` is the command line.
"""
