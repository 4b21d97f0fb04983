-- Large payloads are in rouse.payload. Claims and settlements rewrite the row of a job, and the end of the job moves
-- the row to the history. If the payload were in the row, each of these would write it again. Small payloads stay in
-- the row, where a claim reads them at once.

-- The key under which a payload of this size, enqueued now, is written to rouse.payload; null if it stays in the row,
-- because it is small, or because today's partition is missing (no worker has run for a week). The threshold was
-- measured (docs/decisions/payloads-are-written-once.md).
CREATE OR REPLACE FUNCTION rouse._payload_at(p_bytes integer, p_at timestamptz) RETURNS timestamptz
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF p_bytes IS NULL OR p_bytes < 2048 OR to_regclass('rouse.payload_' || to_char(p_at AT TIME ZONE 'UTC', 'YYYYMMDD')) IS NULL THEN
        RETURN NULL;
    END IF;
    RETURN p_at;
END
$$;

-- The payload of a job, from the columns of its row. Null if it was removed. Served by payload_job, in the partition of
-- its day, or in those of later days. Reads the row at payload_at; if its partition was dropped, the last row after it,
-- which is its copy. The other rows are payloads that a gate has replaced. They may also be later: a new job that has
-- waited for the gate has an earlier time than the jobs that passed the gate in the meantime.
CREATE OR REPLACE FUNCTION rouse._payload(p_job bigint, p_payload jsonb, p_payload_at timestamptz) RETURNS jsonb
LANGUAGE plpgsql STABLE SET enable_seqscan = off AS $$
BEGIN
    IF p_payload_at IS NULL THEN
        RETURN p_payload;
    END IF;
    RETURN coalesce(
        (SELECT p.payload::jsonb FROM rouse.payload AS p WHERE p.job = p_job AND p.kept_at = p_payload_at LIMIT 1),
        (SELECT p.payload::jsonb FROM rouse.payload AS p WHERE p.job = p_job AND p.kept_at > p_payload_at ORDER BY p.kept_at DESC LIMIT 1));
END
$$;
