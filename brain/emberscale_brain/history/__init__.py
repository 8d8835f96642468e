"""The configuration database: jobs, their profiles and start-ups, their plans, and how they ended.

* `changes`: what happens, one record per fact, and their codec.
* `tables`: the schema, and the conversion between records and rows; `migrations` bring older schemas up to date.
* `database`: opening, migrating and claiming it.
* `store`: reading and writing.
"""
