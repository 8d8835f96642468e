"""The data side of training: from files to batches.

* `files`, `streams`: paths, and the bytes behind them.
* `records`, `formats`: what a format must do, and which there are: `criteo`, `csv_text`, `parquet`.
* `lines`, `csv_kernels`, `arrow_columns`, `decoded`, `hashing`: from bytes to columns, compiled by `compiled`.
* `order`, `source`: the order of an epoch, and its batches.
* `inspect`, `convert`, `writers`: what data looks like, and other formats of it.
* `synthetic`, `population`, `calibration`: data with a hidden teacher.
"""
