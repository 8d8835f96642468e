"""The data side of training: from files to batches.

* `files`, `streams`: paths, and the bytes behind them.
* `records`, `formats`: the interface of a format, and the formats: `criteo`, `csv_text`, `parquet`.
* `lines`, `csv_kernels`, `arrow_columns`, `decoded`, `hashing`: from bytes to columns.
* `order`, `source`: the order of an epoch, and its batches.
* `inspect`, `convert`, `writers`: summaries of data, and its conversion to other formats.
* `synthetic`, `population`, `calibration`: data with a hidden teacher.
"""
