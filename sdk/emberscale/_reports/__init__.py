"""Reports of one run (`summary_table`), of several (`comparison`), of plans (`plan_report`) and of data (`skew_tables`,
`skew_picture`); `pictures` draws the first three.
"""
