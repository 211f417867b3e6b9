"""With REHEARSE=<GPUs> in the environment, every Python that imports torch finds that many.

Python imports a module of this name by itself when it starts, if its folder is on PYTHONPATH. So
fresh ranks, kernels and other children, which inherit the environment, are rehearsed as well.
"""

import os
import sys

if os.environ.get("REHEARSE"):
    import importlib.util
    from pathlib import Path

    class _AfterTorch:
        def find_spec(self, name, path=None, target=None):
            if name != "torch":
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec("torch")
            execute = spec.loader.exec_module

            def run(module):
                execute(module)
                sys.path.append(str(Path(__file__).parents[2]))  # the folder of the tests
                import rehearsal

                rehearsal.install(int(os.environ["REHEARSE"]))

            spec.loader.exec_module = run
            return spec

    sys.meta_path.insert(0, _AfterTorch())
