"""Coverage-guided fuzzing of everything that reads bytes of strangers: ``make fuzz`` (docs/explanation/fuzzing.rst).

One module for each target in :mod:`fuzz.targets`, each with ``one_input(data)``, which fails when what it drives breaks a
promise, and ``seeds()``, from which the search begins. They need no fuzzer: the tests run them with the kept corpus.
"""
