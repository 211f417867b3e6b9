"""A pytest suite that grades the reader's own engine, five files, on real ranks.

    python -m shardlab grade --start FOLDER     # writes the five files, with signatures only
    python -m shardlab grade FOLDER             # = pytest --pyargs shardtools.grade --engine FOLDER

`test_<part>` checks one file in 14 cases, `conftest` starts the ranks and counts points, `core`
draws the cases and compares values and traffic, and `command` is the command line.
"""
