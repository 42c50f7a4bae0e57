"""Tables of the durable store, and the steps from each earlier format."""

from __future__ import annotations

APPLICATION_ID = 0x4C6F636B
"""Marks the file as ours."""
FORMAT = 5

SCHEMA = """
CREATE TABLE state (id INTEGER PRIMARY KEY CHECK (id = 1), record BLOB NOT NULL);
CREATE TABLE environments (env_id INTEGER PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE groups (
    seq INTEGER PRIMARY KEY, line INTEGER NOT NULL, size INTEGER NOT NULL, longest INTEGER NOT NULL,
    n_bytes INTEGER NOT NULL, weights TEXT NOT NULL, stated INTEGER NOT NULL, place INTEGER NOT NULL,
    tokens INTEGER NOT NULL, reference INTEGER NOT NULL, uses INTEGER NOT NULL);
CREATE TABLE bodies (seq INTEGER PRIMARY KEY, crc INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE leases (batch_id INTEGER PRIMARY KEY, sent INTEGER NOT NULL, returned INTEGER NOT NULL);
CREATE TABLE keys (
    place INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE, status TEXT NOT NULL, buffer_size INTEGER, reason TEXT);
CREATE TABLE evaluations (id INTEGER PRIMARY KEY, record BLOB NOT NULL);
"""

UPGRADE = {
    1: "ALTER TABLE groups ADD COLUMN stated INTEGER NOT NULL DEFAULT 0;",
    2: """
ALTER TABLE groups RENAME TO groups_before;
CREATE TABLE groups (
    seq INTEGER PRIMARY KEY, line INTEGER NOT NULL, size INTEGER NOT NULL, longest INTEGER NOT NULL,
    n_bytes INTEGER NOT NULL, weights TEXT NOT NULL, stated INTEGER NOT NULL, place INTEGER NOT NULL);
INSERT INTO groups SELECT seq, line, size, longest, n_bytes, '[[0,' || version || ']]', stated, place FROM groups_before;
DROP TABLE groups_before;
DROP TABLE IF EXISTS clean_stop;
""",
    3: SCHEMA[SCHEMA.index("CREATE TABLE evaluations") :],
    # Bodies of before may have their empty ref_logprobs anywhere, so that no reference can be put into them.
    4: """
ALTER TABLE groups ADD COLUMN tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE groups ADD COLUMN reference INTEGER NOT NULL DEFAULT 1;
ALTER TABLE groups ADD COLUMN uses INTEGER NOT NULL DEFAULT 0;
UPDATE groups SET tokens = size * longest;
""",
}
"""From each earlier format to the one after it, for every SQLite: those before 3.35 can drop no column."""
