"""The documents, typed: one file per kind, what each key holds, its unit. `schema.json` is made from these types."""
