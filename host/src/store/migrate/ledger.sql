-- The schema and the ledger, which the first migration needs.
CREATE SCHEMA IF NOT EXISTS rouse AUTHORIZATION rouse_owner;
SET LOCAL ROLE rouse_owner;
CREATE TABLE rouse.migration (
    version    integer PRIMARY KEY,
    name       text NOT NULL,
    sha256     text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now());
-- The functions, views and privileges that were last applied.
CREATE TABLE rouse.definitions (
    sha256       text PRIMARY KEY,
    -- The release of the host that applied them.
    release      integer[] NOT NULL,
    -- The oldest protocol of hosts that they support.
    protocol_oldest integer NOT NULL,
    server_major integer NOT NULL,
    -- The definitions in force afterwards: a digest for each function, view, trigger and privilege.
    facts        jsonb NOT NULL,
    applied_at   timestamptz NOT NULL DEFAULT now());
RESET ROLE
