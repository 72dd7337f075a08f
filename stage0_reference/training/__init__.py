"""Training the small byte-level model that the repository ships, and what it is measured against.

`corpus` gathers the Python source that the model reads and the held-out files that it must not
read; `baselines` says how many bits per byte ordinary compressors and a byte n-gram model need
for those same held-out files. Importing this package imports nothing heavy.
"""
