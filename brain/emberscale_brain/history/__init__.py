"""The configuration database: jobs, what was measured of them and of their start-ups, what was planned, how they ended.

* `changes`: what happens, one record a fact, and their codec.
* `tables`: the schema, and the way between records and rows; `migrations` bring older schemas up to date.
* `database`: opening, migrating and claiming it.
* `store`: reading and writing.
"""
